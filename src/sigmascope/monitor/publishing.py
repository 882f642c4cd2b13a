"""Hands what is over to those who export it: a generation, a prompt, a LoRA that was put on. The host waits for none of it.

`publish` puts a run into a short queue; whoever listens hears of it on a thread of ours, or where a server is asked for
its metrics (`Publisher.drain`). Where nobody listens, nothing is made. A run that finds the queue full is dropped, and counted.

`export_runs` lets OpenTelemetry or a file for node_exporter listen, and so do the variables `SIGMASCOPE_OTLP` and
`SIGMASCOPE_TEXTFILE`.
"""

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sigmascope.errors import ConfigError
from sigmascope.monitor.guard import log_quietly
from sigmascope.monitor.recorder import LiveStage, Recorder, frames_here
from sigmascope.probes.reading import describe
from sigmascope.records.run import Run
from sigmascope.threads import hands_off, own_thread

if TYPE_CHECKING:
    from sigmascope.reports.prometheus import Metrics

_log = logging.getLogger("sigmascope")
OTLP: Final = "SIGMASCOPE_OTLP"
"""The environment variable that is "1" where runs are sent by OpenTelemetry."""
TEXTFILE: Final = "SIGMASCOPE_TEXTFILE"
"""The environment variable that names a file for node_exporter."""
MOST_WAITING: Final = 256
"""Runs. A listener counts one in a millisecond."""
LONGEST_WAIT_SECONDS: Final = 5.0
"""At the end of the process: until all is handed on, which is at once, and then until it is sent."""
GENERATION: Final = "generation"


class Published(NamedTuple):
    """A run that is over.

    Attributes:
        run: With one stage that lies in no other; a prompt of ComfyUI is a run of its own.
        parent: OpenTelemetry's span that was open where it ended; None: none was.
    """

    run: Run
    parent: Any = None


Listener = Callable[[Published], object]


class _Entry(NamedTuple):
    """A listener, what it does when nothing waits any more, and at the end in so many seconds."""

    hear: Listener
    rest: Callable[[], object]
    end: Callable[[float], object]


class Publisher:
    """The queue, and who listens. Where no run waits there is no thread.

    Attributes:
        dropped: How many runs found the queue full.
        failed: How many times a listener failed.
    """

    def __init__(self) -> None:
        self._waiting: deque[Published] = deque()
        self._listeners: list[_Entry] = []
        self._has_looked = False
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed = 0

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens, or will as soon as there is something: what the environment names begins then."""
        return bool(self._listeners) or (not self._has_looked and _environment_asks())

    def listen(
        self,
        hear: Listener,
        rest: Callable[[], object] = lambda: None,
        end: Callable[[float], object] = lambda _seconds: None,
    ) -> Callable[[], None]:
        """Let a listener hear of each run from now on.

        Args:
            hear: Takes a run. It must not wait for anything.
            rest: Called when no run waits any more.
            end: Called at the end of the process with the seconds that it may take.

        Returns:
            What ends it.
        """
        entry = _Entry(hear, rest, end)
        with self._lock:
            self._listeners = [*self._listeners, entry]

        def leave() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not entry]

        return leave

    def begin_anew(self) -> None:
        """Keep the listeners, and nothing else: of a child that was forked."""
        listeners, has_looked = self._listeners, self._has_looked
        self.__init__()  # type: ignore[misc] # others hold this object
        self._listeners, self._has_looked = listeners, has_looked

    def take(self, published: Published) -> None:
        """Queue a run. Returns at once."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self.dropped += 1
                return
            self._waiting.append(published)
            _finish_at_exit()
            if self._thread is not None:
                return
            self._thread = own_thread("publisher", self._work)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: `drain` hands it on
                self._thread = None

    def drain(self, seconds: float = 0.0) -> bool:
        """Hand on all that waits, here and now; in a device's thread no device is asked.

        Args:
            seconds: How long to wait for another thread that is handing on.

        Returns:
            Whether nothing waits any more.
        """
        if not self._counting.acquire(timeout=seconds) if seconds > 0 else not self._counting.acquire(False):
            return False
        try:
            with hands_off():
                has_handed_on = bool(self._waiting)
                if has_handed_on and not self._has_looked:
                    _export_as_environment_says()
                    self._has_looked = True  # only now: meanwhile others hand runs over, too
                while self._waiting:
                    published = self._waiting.popleft()
                    for entry in self._listeners:
                        self._safely(entry.hear, published)
                for entry in self._listeners if has_handed_on else ():
                    self._safely(entry.rest)
        finally:
            self._counting.release()
        return True

    def finish(self, seconds: float = LONGEST_WAIT_SECONDS) -> None:
        """Hand on what waits, then let all listeners end: each of the two in so many seconds at most."""
        self.drain(seconds)
        until = time.monotonic() + seconds
        for entry in self._listeners:
            self._safely(entry.end, max(0.0, until - time.monotonic()))

    def _safely(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as failure:  # noqa: BLE001 - the others are to hear of it all the same
            if not self.failed:
                log_quietly(_log, "sigmascope: a run was not exported (%s)", describe(failure))
            self.failed += 1

    def _work(self) -> None:
        while True:
            self.drain(LONGEST_WAIT_SECONDS)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return


def publish(run: Run) -> None:
    """Hand a run over to those who listen. Returns at once, and raises nothing.

    Args:
        run: What is over; it holds what its watch's privacy lets it.
    """
    publisher = PUBLISHER
    if publisher.is_heard:
        with suppress(Exception):  # a guest
            publisher.take(Published(run, _span_here()))


def publication(recorder: Recorder, stage: LiveStage) -> Callable[[], None]:
    """Return what hands over a stage that is over, now that it is: to be called once all is told of it.

    A stage that lies in a generation is handed over with that, and not by itself. Raises nothing, and costs nothing where
    nobody listens.
    """
    publisher = PUBLISHER
    try:
        if not publisher.is_heard or any(frame.scope.name == GENERATION for frame in frames_here()):
            return _nothing
        span = _span_here()
    except Exception:  # noqa: BLE001 - a guest
        return _nothing

    def hand_over() -> None:
        with suppress(Exception):  # a guest
            publisher.take(Published(recorder.run_of(stage), span))

    return hand_over


def _nothing() -> None:
    pass


def _span_here() -> Any:
    """OpenTelemetry's context with the span that is open here, if the host has loaded OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    with suppress(Exception):
        context = None if trace is None else trace.get_current_span().get_span_context()
        return context if context is not None and context.is_valid else None
    return None


class Export:
    """Runs on their way, until `close`; also a context."""

    def __init__(self, ends: Sequence[Callable[[], object]], dropped: Callable[[], dict[str, int]]) -> None:
        self._ends = [*ends]
        self._dropped = dropped

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send what waits, in at most five seconds, and listen no longer."""
        PUBLISHER.drain(LONGEST_WAIT_SECONDS)
        while self._ends:
            self._ends.pop(0)()

    def dropped(self) -> dict[str, int]:
        """How much was not exported as it was, by kind: `docs/metrics.md` lists them."""
        return self._dropped()


def export_runs(*, otlp: bool = False, textfile: str | os.PathLike[str] | None = None) -> Export:
    """Export each generation, prompt and LoRA of this process that is over from now on, whoever watches it.

    Args:
        otlp: Whether to send traces and metrics by OpenTelemetry, as the variables `OTEL_…` say. If the program has set
            OpenTelemetry up, its providers send.
        textfile: A file for node_exporter's textfile collector, which is written anew after each of them; it ends in .prom.

    Returns:
        What ends it. At the end of the process what is left is sent, in at most five seconds.

    Raises:
        ConfigError: A package is missing, a variable `OTEL_…` names something unknown, or `textfile` does not end in .prom.
    """
    ends: list[Callable[[], object]] = []
    counts: list[Callable[[], dict[str, int]]] = [lambda: {"runs": PUBLISHER.dropped}]
    metrics = None if textfile is None else _textfile_metrics(Path(textfile))
    if otlp:
        from sigmascope.reports.otlp import OpenTelemetry

        telemetry = OpenTelemetry()
        leave = PUBLISHER.listen(
            lambda published: telemetry.add(published.run, published.parent), end=telemetry.end
        )
        ends += [leave, telemetry.end]
        counts.append(telemetry.dropped)
    if metrics is not None and textfile is not None:
        path = Path(textfile).absolute()
        ends.append(
            PUBLISHER.listen(
                lambda _published: None, rest=lambda: metrics.write(path, {"runs": PUBLISHER.dropped})
            )
        )
        counts.append(metrics.labels.folded)

    def dropped() -> dict[str, int]:
        """What several exports do not take alike is one loss."""
        told = [counted() for counted in counts]
        return {name: max(count.get(name, 0) for count in told) for count in told for name in count}

    return Export(ends, dropped)


def _textfile_metrics(path: Path) -> "Metrics":
    if path.suffix != ".prom":
        raise ConfigError(f"{path} does not end in .prom.", hint="node_exporter reads no other files.")
    return counted_metrics()


def counted_metrics() -> "Metrics":
    """Metrics for Prometheus that count the runs of this process for as long as they are used.

    Raises:
        ConfigError: prometheus-client is not installed, or the folder of all processes' files does not exist.
    """
    from sigmascope.reports.prometheus import metrics_of_process

    metrics = metrics_of_process()
    if metrics not in _COUNTED:
        known = weakref.ref(metrics)

        def count(published: Published) -> None:
            counting = known()
            if counting is not None:
                counting.add_run(published.run)

        weakref.finalize(metrics, PUBLISHER.listen(count))
        _COUNTED.add(metrics)
    return metrics


_COUNTED: "Final[weakref.WeakSet[Metrics]]" = weakref.WeakSet()
"""Metrics that count runs already: those of several parts of a process may be one object."""


def _environment_asks() -> bool:
    return os.environ.get(OTLP, "0") not in ("", "0") or bool(os.environ.get(TEXTFILE))


def _export_as_environment_says() -> None:
    """On the thread that hands runs on: packages are imported here, which takes a moment."""
    if not _environment_asks():
        return
    otlp, textfile = os.environ.get(OTLP) or "0", os.environ.get(TEXTFILE) or None
    try:
        export_runs(otlp=otlp != "0", textfile=textfile)
    except Exception as failure:  # noqa: BLE001 - the host goes on without
        log_quietly(_log, "sigmascope: runs are not exported (%s)", describe(failure))


PUBLISHER = Publisher()
"""Of this process."""


def _finish_at_exit() -> None:
    """Let the end of this process wait for what is to be sent; children of multiprocessing leave without `atexit`."""
    global _will_finish
    if _will_finish != os.getpid():
        _will_finish = os.getpid()
        atexit.register(_finish)
        _hand_on_before_executors_end()
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, _finish, exitpriority=0)


def _hand_on_before_executors_end() -> None:
    """Let what waits be handed on before Python ends its executors, which OpenTelemetry needs while it is imported.

    They end before `atexit`. Those who want to be earlier register as they do; the last is called first.
    """
    with suppress(Exception):
        import concurrent.futures.thread  # noqa: F401

        threading._register_atexit(lambda: PUBLISHER.drain(LONGEST_WAIT_SECONDS))  # type: ignore[attr-defined]


def _finish() -> None:
    PUBLISHER.finish()


_will_finish: int | None = None


def _begin_anew() -> None:
    """A child that was forked has none of its parent's threads, and perhaps a lock that nobody will open."""
    PUBLISHER.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
