"""A line on stderr that says how the running generations are doing.

It is drawn by a thread of its own that looks at them four times a second, so that a step costs nothing more and a
terminal that does not take output holds nobody up. The thread lives as long as a generation is running.

A generation says where it is with a `StepProgress`. `StepListeners` are told the same after each step.
"""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from rich.cells import cell_len, set_cell_size

from sigmascope import units
from sigmascope.monitor.guard import log_quietly
from sigmascope.plain_text import in_encoding, printable
from sigmascope.probes.reading import describe, error_text
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.threads import own_thread, start_thread

_log = logging.getLogger(__name__)
_HZ: Final = 4.0
_JOIN_SECONDS: Final = 1.0
_USUAL_WIDTH: Final = 80
_NAME_CELLS = 24


@runtime_checkable
class Stream(Protocol):
    """What of a text file the line needs."""

    def write(self, text: str, /) -> object:
        """Write."""
        ...

    def flush(self) -> None:
        """Flush the text."""
        ...

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        ...

    def fileno(self) -> int:
        """Its descriptor."""
        ...


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Where a running generation is at the end of a step. Times are seconds.

    Attributes:
        step: Steps done.
        steps: Steps that are planned; 0: nobody said, and then `projected_seconds` is the time elapsed.
        projected_seconds: Elapsed + mean of the last steps · steps left.
        misses_target: Whether that is above a target that somebody gave.
    """

    step: int
    steps: int
    step_seconds: float
    elapsed_seconds: float
    projected_seconds: float
    target_seconds: float
    misses_target: bool


@runtime_checkable
class Shown(Protocol):
    """What of a generation the line needs."""

    @property
    def metrics(self) -> PerformanceMetrics:
        """What it is called and, once it is over, how it went."""
        ...

    def live_text(self) -> str:
        """How it is doing, by `running_text`."""
        ...


class LiveLine:
    """Shows any number of generations, of any number of monitors, in one line. Raises nothing.

    On a terminal the line is drawn over itself. Elsewhere (a file, a pipe, `TERM=dumb`) each generation has a line
    now and then. In both it leaves one line when it is over.

    Args:
        stream: Where to write; None: `sys.stderr` at that time.
        hz: How often to draw it.
        plain_every_seconds: Seconds between a generation's lines if there is no terminal.
    """

    def __init__(
        self, stream: Stream | None = None, *, hz: float = _HZ, plain_every_seconds: float = 10.0
    ) -> None:
        self._stream = stream
        self._period_seconds = 1.0 / hz
        self._plain_every = max(1, round(plain_every_seconds * hz))
        self._gave_up = False
        self._has_logged = False
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child, which has no such thread and may have a lock that nobody frees."""
        self._lock = threading.Lock()
        self._open: list[Shown] = []
        self._over: list[str] = []
        self._stop = threading.Event()
        self._running: threading.Thread | None = None
        self._drawn = False
        self._looks = 0

    def add(self, generation: Shown) -> None:
        """Show a generation from now on.

        Raises:
            RuntimeError: The system gives no more threads.
        """
        if self._gave_up:
            return
        with self._lock:
            if self._running is None or not self._running.is_alive():
                self._stop, self._looks = threading.Event(), 0
                self._running = own_thread("live", self._watch, self._stop)
                start_thread(self._running, self._stop)
            self._open.append(generation)

    def remove(self, generation: Shown, error: BaseException | None = None) -> None:
        """Stop showing a generation, and leave a line on how it ended. The last one also ends the thread.

        A second call does nothing.
        """
        with self._lock:
            if generation in self._open:
                self._over.append(over_text(generation.metrics, error))
                self._open.remove(generation)
            if self._open or self._running is None:
                return
            self._stop.set()  # first: whoever is interrupted now may not come back
            thread, self._running = self._running, None
        thread.join(_JOIN_SECONDS)
        # A thread that lives on waits for a stream that takes nothing: never wait for that again.
        self._gave_up = thread.is_alive()

    def _watch(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self._period_seconds):
                self._show()
            self._show()
        except Exception as failure:  # noqa: BLE001 - a display must not end in a traceback on the host's terminal
            if not self._has_logged:
                self._has_logged = True
                log_quietly(_log, "The live line cannot be shown: %s", describe(failure))

    def _show(self) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        with self._lock:
            over, self._over = self._over, []
            running = list(self._open)
        self._looks += 1
        if stream is None:  # a program without a console
            return
        draw = self._draw if _is_terminal(stream) else self._write
        draw(stream, over, running)
        stream.flush()

    def _draw(self, stream: Stream, over: list[str], running: list[Shown]) -> None:
        """Draw the line over itself; the cursor goes back to its start, where the host's own output begins."""
        width = _width_of(stream) - 1  # the last column would break the line on some terminals
        for text in over:
            _put(stream, f"\r{fitted(text, width)}\n")
        line = join_lines([generation.live_text() for generation in running])
        if line or (self._drawn and not over):
            _put(stream, f"\r{fitted(line, width)}\r")
        self._drawn = bool(line)

    def _write(self, stream: Stream, over: list[str], running: list[Shown]) -> None:
        """Write a line for each generation that is over, and now and then for those that are running."""
        for text in over:
            _put(stream, f"{text}\n")
        if self._looks % self._plain_every == 0:
            for generation in running:
                _put(stream, f"{generation.live_text()}\n")


def _put(stream: Stream, text: str) -> None:
    stream.write(in_encoding(text, getattr(stream, "encoding", None) or "utf-8"))


def _is_terminal(stream: Stream) -> bool:
    return os.environ.get("TERM") != "dumb" and stream.isatty()


def _width_of(stream: Stream) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):  # no descriptor, or one that is no terminal
        return _USUAL_WIDTH


def live_line_for(live: "bool | LiveLine") -> LiveLine | None:
    """The line that a monitor shows its generations in: the process's, one of the caller's, or none."""
    if isinstance(live, LiveLine):
        return live
    return LIVE_LINE if live else None


def _times(progress: StepProgress) -> str:
    elapsed, target = units.seconds(progress.elapsed_seconds), units.seconds(progress.target_seconds)
    ahead = progress.step and progress.steps > progress.step
    whole = f"{elapsed} of {units.seconds(progress.projected_seconds)}" if ahead else elapsed
    return f"{whole}, target {target}" + (" missed" if progress.misses_target else "")


def _in_one_line(text: str) -> str:
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def _name(metrics: PerformanceMetrics) -> str:
    name = _in_one_line(metrics.model_name) or "generation"
    return name if cell_len(name) <= _NAME_CELLS else set_cell_size(name, _NAME_CELLS - 1) + "…"


def running_text(
    metrics: PerformanceMetrics, progress: StepProgress, busy_percent: Mapping[str, float]
) -> str:
    """How a running generation is doing.

    Such as `FLUX 12/20 · 412 ms a step · 4.90 s of 8.20 s, target 5.00 s missed · GPU 97 %`.
    """
    parts = [_name(metrics)]
    if progress.step:
        planned = f"/{progress.steps}" if progress.steps else ""
        parts = [
            f"{_name(metrics)} {progress.step}{planned}",
            f"{units.seconds(progress.step_seconds)} a step",
        ]
    parts.append(_times(progress))
    if busy_percent:
        parts.append("GPU " + ", ".join(f"{percent:.0f} %" for percent in busy_percent.values()))
    return " · ".join(parts)


def over_text(metrics: PerformanceMetrics, error: BaseException | None) -> str:
    """How a generation ended: `FLUX: 4.83 s, meets the target of 5.00 s (score 100.0)`."""
    took = units.seconds(metrics.total_generation_time)
    if error is not None:
        return _in_one_line(f"{_name(metrics)}: ended after {took} by {error_text(error)}")
    relation = "meets" if metrics.target_met else "misses"
    target = units.seconds(metrics.target_generation_time)
    return f"{_name(metrics)}: {took}, {relation} the target of {target} (score {metrics.performance_score})"


def join_lines(texts: Sequence[str]) -> str:
    """Several generations in one line, with their number in front: the line may be too narrow for all."""
    return " | ".join(texts) if len(texts) < 2 else f"{len(texts)} running: " + " | ".join(texts)


def fitted(text: str, width: int) -> str:
    """The text in exactly that many cells of a terminal: cut with "…", or filled with spaces."""
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 1)) + "…"
    return set_cell_size(text, max(0, width))


LIVE_LINE: Final = LiveLine()
"""The one of this process: two lines on one terminal would draw over each other."""

Listener = Callable[[StepProgress], None]


@dataclass(slots=True)
class StepListeners:
    """Who is told of a monitor's steps.

    Attributes:
        on_step: Called after each.
        on_warning: Called as soon as a generation heads beyond its target; None: that is logged.
        seconds: Gets the seconds of each step.
    """

    on_step: Listener | None = None
    on_warning: Listener | None = None
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1))

    def warn(self, progress: StepProgress) -> None:
        """Say that a generation heads beyond its target."""
        if self.on_warning is not None:
            self.on_warning(progress)
            return
        log_quietly(
            _log,
            "At step %d of %d the generation heads for %.2f s, above its target of %.2f s.",
            progress.step, progress.steps, progress.projected_seconds, progress.target_seconds,
        )  # fmt: skip


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LIVE_LINE.forget)
