"""Runs that go on: each says once a second how far it is, in a small file beside the store, for who looks from outside.

A thread of its own reads the recorders of this process (`announce`) and writes the files; what is watched waits for nothing and
calls nothing. A file holds no prompt. It is gone when its run is over; one that a killed process left is removed by who finds it.
"""

import atexit
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final
from uuid import uuid4

from sigmascope.files import has_ended
from sigmascope.history.location import is_kept, live_folder, store_url
from sigmascope.threads import own_thread

SECONDS: Final = 1.0
"""Between two writes; a run that is shorter leaves no file."""
MOST_STEPS: Final = 120
"""The last ones, whose times are told."""
LONGEST_SILENCE_SECONDS: Final = 60.0
_IDLE_TICKS: Final = 5
_LARGEST: Final = 65_536
"""Bytes of a file; one that is larger is none of ours."""
_MOST_FILES: Final = 100


@dataclass(frozen=True, slots=True)
class LiveRun:
    """How far a run is.

    Attributes:
        id: Of the run that the store will have.
        name: What it is called.
        started_at: ISO 8601.
        seconds: Since then.
        stage: The innermost open stage with those around it, in words; empty: none is open.
        stage_seconds: Since that stage began; of none 0.
        generations: How many generations are over.
        steps: How many steps of the stage are over.
        planned: How many there will be; None: nobody said.
        step_seconds: Of the last steps, the oldest first, by the host's clock.
        peak_bytes: The highest memory of what is open; None: not read.
        peak_of: The device, or "process".
        process_id: Of the process.
        host: The machine's name.
        told_at: When this was so, as `time.time` has it.
    """

    id: str
    name: str
    started_at: str
    seconds: float
    stage: str = ""
    stage_seconds: float = 0.0
    generations: int = 0
    steps: int = 0
    planned: int | None = None
    step_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    peak_of: str = ""
    process_id: int = 0
    host: str = ""
    told_at: float = 0.0


Look = Callable[[], LiveRun | None]
"""Says how far a run is; None: it has not begun, or is over."""


class Announcer:
    """Writes the files of one process. Its thread ends a few seconds after the last run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._looks: dict[int, Look] = {}
        self._files: dict[int, Path] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._end = threading.Event()

    def add(self, look: Look) -> int:
        """Tell of a run from now on; the number takes it back."""
        number = next(self._numbers)
        with self._lock:
            self._looks[number] = look
            if self._thread is None:
                self._thread = own_thread("live-file", self._work)
                try:
                    self._thread.start()
                except RuntimeError:  # the system gives no thread
                    self._thread = None
        return number

    def remove(self, number: int) -> None:
        """Tell of it no longer. Its file goes with the thread's next turn."""
        with self._lock:
            self._looks.pop(number, None)

    def tell(self) -> None:
        """Write the files of all runs, and remove those of runs that are over."""
        with self._lock:
            looks = dict(self._looks)
        with self._writing:
            if self._is_over:
                return
            for number in [number for number in self._files if number not in looks]:
                self._files.pop(number).unlink(missing_ok=True)
            for number, look in looks.items():
                with suppress(Exception):  # a guest: nobody looks from outside, then
                    self._write(number, look())

    def end(self) -> None:
        """Remove all files, for good."""
        self._end.set()
        with self._writing:
            self._is_over = True
            for file in self._files.values():
                with suppress(OSError):
                    file.unlink(missing_ok=True)
            self._files.clear()

    def _work(self) -> None:
        idle = 0
        while idle <= _IDLE_TICKS and not self._end.wait(SECONDS):
            with suppress(Exception):
                self.tell()
            with self._lock:
                idle = 0 if self._looks or self._files else idle + 1
                if idle > _IDLE_TICKS:
                    self._thread = None

    def _write(self, number: int, live: LiveRun | None) -> None:
        if live is None:
            return
        path = self._files.get(number)
        if path is None:
            folder = live_folder(store_url())
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self._files[number] = folder / f"{os.getpid()}-{uuid4().hex}.json"
        told = asdict(live) | {
            "process_id": os.getpid(),
            "host": socket.gethostname(),
            "told_at": time.time(),
        }
        temporary = path.with_suffix(".part")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(told, file)
        temporary.replace(path)


_announcer: Announcer | None = None
_making = threading.Lock()


def announce(look: Look) -> int | None:
    """Let others see a run that goes on, unless no run is kept. Raises nothing.

    Returns:
        What `withdraw` takes; None: nobody is told.
    """
    global _announcer
    if not is_kept():
        return None
    try:
        with _making:
            if _announcer is None:
                _announcer = Announcer()
                atexit.register(_announcer.end)
        return _announcer.add(look)
    except Exception:  # noqa: BLE001 - a guest: the run goes on
        return None


def withdraw(number: int | None) -> None:
    """Tell of a run no longer. Waits for nothing, and raises nothing."""
    if number is not None and _announcer is not None:
        _announcer.remove(number)


def _begin_anew() -> None:
    """A child that was forked has none of its parent's threads, and no file of its own."""
    global _announcer, _making
    _announcer, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def live_runs(url: str) -> list[LiveRun]:
    """The runs that go on now, the oldest first. A file whose process is gone is removed.

    Args:
        url: The store's, beside which the files lie.
    """
    folder, found = live_folder(url), []
    files: list[Path] = []
    with suppress(OSError):  # it is not there, or closed
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    for file in files[:_MOST_FILES]:
        live = _read(file)
        if live is None:
            continue
        if live.host == socket.gethostname() and has_ended(live.process_id):
            with suppress(OSError):
                file.unlink()
        elif time.time() - live.told_at <= LONGEST_SILENCE_SECONDS:
            found.append(live)
    return sorted(found, key=lambda live: (live.started_at, live.id))


def _read(file: Path) -> LiveRun | None:
    """What a file says; None: nothing that can be understood."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            return None
        values = json.loads(text)
        known = {field.name: values[field.name] for field in fields(LiveRun)}
        known["step_seconds"] = tuple(float(value) for value in known["step_seconds"][-MOST_STEPS:])
        for name in ("seconds", "stage_seconds", "told_at"):
            known[name] = float(known[name])
        for name in ("generations", "steps", "process_id"):
            known[name] = int(known[name])
        for name in ("planned", "peak_bytes"):
            known[name] = None if known[name] is None else int(known[name])
        for name in ("id", "name", "started_at", "stage", "peak_of", "host"):
            known[name] = str(known[name])
        return LiveRun(**known)
    except (OSError, ValueError, TypeError, KeyError):
        return None
