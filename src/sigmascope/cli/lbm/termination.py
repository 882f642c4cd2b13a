"""SIGTERM taken as Ctrl-C is: what is half done is put back before the process ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""As shells report a process that SIGTERM ended."""


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises `SystemExit` with 143, so that every `finally` runs.

    Those that follow are ignored until the block is left: a service manager may send several, and cleaning up must not be
    cut short by them. Signals reach the main thread alone; in another one the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)
