"""What is known so far is kept, in case the program is killed before it can be asked."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from sigmascope.records.run import Run

SECONDS: Final = 10.0
_SHARE: Final = 50
"""A record that takes long to write is written seldom: this many times as long apart."""


class Keeper:
    """Writes the record now and then on a thread of its own, which ends with the process.

    Args:
        record: Gives the run as it is now.
        path: Where it goes.
        seconds: How long to wait between two times, at least.
    """

    def __init__(self, record: Callable[[], Run], path: Path, seconds: float = SECONDS) -> None:
        self._record = record
        self._path = path
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sigmascope-keeper", daemon=True)

    def start(self) -> None:
        """Begin. Without a thread to be had, nothing is kept before the end."""
        with suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        """Write no more; at return nothing is being written."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def keep(self) -> None:
        """Write what is known now, if there is anything. A failure is for the end to tell."""
        with suppress(Exception):
            run = self._record()
            if run.stages:
                run.save(self._path)

    def _work(self) -> None:
        pause = self._seconds
        while not self._stop.wait(pause):
            began = time.perf_counter()
            self.keep()
            pause = max(self._seconds, _SHARE * (time.perf_counter() - began))
