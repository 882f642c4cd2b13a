"""Hands what is over to those who export it: a generation, a prompt, a LoRA that was put on. The host waits for none of it.

`publish` puts a run into a short queue; whoever `listen`s hears of it on a thread of ours, or where a server is asked for
its metrics (`drain`). Where nobody listens, nothing is made. A run that finds the queue full is dropped, and counted.
"""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from sigmascope.monitor.recorder import LiveStage, Recorder, frames_here
from sigmascope.records.run import Run
from sigmascope.threads import hands_off, own_thread

MOST_WAITING: Final = 256
"""Runs. A listener counts one in a millisecond."""
LONGEST_WAIT_SECONDS: Final = 5.0
"""At the end of the process, for all listeners together."""
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


class Publisher:
    """The queue, and who listens. Where no run waits there is no thread.

    Attributes:
        dropped: How many runs found the queue full.
        failed: How many times a listener failed.
    """

    def __init__(self) -> None:
        self._waiting: deque[Published] = deque()
        self._listeners: list[tuple[Listener, Callable[[float], object] | None]] = []
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed = 0

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listen(self, listener: Listener, end: Callable[[float], object] | None = None) -> Callable[[], None]:
        """Let a listener hear of each run from now on.

        Args:
            listener: Must not wait for anything.
            end: Called at the end of the process with the seconds that it may take.

        Returns:
            What ends it.
        """
        entry = (listener, end)
        with self._lock:
            self._listeners = [*self._listeners, entry]

        def leave() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not entry]

        return leave

    def take(self, published: Published) -> None:
        """Queue a run. Returns at once."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self.dropped += 1
                return
            self._waiting.append(published)
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
                while self._waiting:
                    self._hand_on(self._waiting.popleft())
        finally:
            self._counting.release()
        return True

    def finish(self, seconds: float = LONGEST_WAIT_SECONDS) -> None:
        """Hand on what waits and let each listener end, in bounded time."""
        until = time.monotonic() + seconds
        self.drain(seconds / 2)
        for _, end in self._listeners:
            if end is not None:
                with suppress(Exception):
                    end(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while True:
            self.drain(LONGEST_WAIT_SECONDS)
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return

    def _hand_on(self, published: Published) -> None:
        for listener, _ in self._listeners:
            try:
                listener(published)
            except Exception:  # noqa: BLE001 - the others are to hear of it all the same
                self.failed += 1


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
    if not publisher.is_heard or any(frame.scope.name == GENERATION for frame in frames_here()):
        return _nothing
    span = _span_here()

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


PUBLISHER = Publisher()
"""Of this process."""


def _finish() -> None:
    PUBLISHER.finish()


atexit.register(_finish)


def _begin_anew() -> None:
    """A child that was forked has none of its parent's threads, and perhaps a lock that nobody will open."""
    listeners = PUBLISHER._listeners
    PUBLISHER.__init__()  # type: ignore[misc] - the object is known by others
    PUBLISHER._listeners = listeners


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
