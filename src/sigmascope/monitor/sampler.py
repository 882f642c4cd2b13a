"""A slow background thread that looks at memory between the steps."""

import os
import threading
from collections.abc import Callable

MAX_SAMPLE_HZ = 10.0
"""On one core a 100 Hz sampler costs 2 per cent of the host's time, a 10 Hz one cannot be measured."""

_JOIN_SECONDS = 1.0
_LONGEST_SECONDS = 3600.0
"""No thread can wait for centuries."""


class Wish:
    """One recorder's wish to be called, for as long as it has open scopes.

    Args:
        sample: What to call; it must not raise.
        hz: Calls a second, above 0; more than 10 is taken as 10.
    """

    __slots__ = ("open_scopes", "period_seconds", "sample")

    def __init__(self, sample: Callable[[], None], hz: float) -> None:
        self.sample = sample
        self.period_seconds = min(1.0 / min(hz, MAX_SAMPLE_HZ), _LONGEST_SECONDS)
        self.open_scopes = 0


class Sampler:
    """One thread for all recorders of a process: it lives exactly as long as one of them has an open scope.

    The thread is a daemon, so it never keeps the process alive. A forked child starts without it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Be as new: for a forked child, which has no such thread and may have a lock that nobody frees."""
        self._lock = threading.Lock()
        self._wishes: list[Wish] = []
        self._stop = threading.Event()
        self._running: threading.Thread | None = None

    def open(self, wish: Wish) -> None:
        """Count one more open scope of this wish; all are called as often as the most frequent one asks.

        Raises:
            RuntimeError: if the system gives no more threads.
        """
        with self._lock:
            if self._running is None:
                self._start()
            if wish not in self._wishes:
                wish.open_scopes = 0
                self._wishes.append(wish)
            wish.open_scopes += 1

    def close(self, wish: Wish) -> None:
        """Count one open scope less; when it was the last of all, the thread has ended at return."""
        with self._lock:
            if wish not in self._wishes:
                return
            wish.open_scopes -= 1
            if wish.open_scopes == 0:
                self._wishes.remove(wish)
            if self._wishes or self._running is None:
                return
            thread, stop = self._running, self._stop
            self._running = None
        stop.set()
        thread.join(_JOIN_SECONDS)

    def _start(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), name="sigmascope-sampler", daemon=True)
        thread.start()
        self._stop, self._running = stop, thread

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._period_seconds()):
            for wish in list(self._wishes):
                wish.sample()

    def _period_seconds(self) -> float:
        return min((wish.period_seconds for wish in list(self._wishes)), default=1.0 / MAX_SAMPLE_HZ)


SAMPLER = Sampler()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SAMPLER.forget)
