"""Run a command and see what it takes: time, and memory of its own and of files that it maps."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PAUSE = 0.01
_FIELDS = {"VmHWM": "peak_bytes", "RssAnon": "anonymous_bytes"}


@dataclass(frozen=True)
class Measured:
    """What one process took.

    Attributes:
        seconds: From start to end, the interpreter and its imports included.
        cpu_seconds: Of all its threads, in user and system mode.
        peak_bytes: Largest resident set, mapped files included (Linux' `VmHWM`).
        anonymous_bytes: Largest resident memory that is no file's (`RssAnon`, looked at every 10 ms).
        output: What it printed.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    anonymous_bytes: int
    output: str


def run_measured(command: Sequence[str], log: Path) -> Measured:
    """Run a Python command to its end.

    Args:
        command: What follows the interpreter.
        log: A file for its output.

    Raises:
        RuntimeError: It failed; with the end of its output.
    """
    most = dict.fromkeys(_FIELDS.values(), 0)
    begin = time.perf_counter()
    with log.open("w+", encoding="utf-8") as stream:
        process = subprocess.Popen([sys.executable, *command], stdout=stream, stderr=subprocess.STDOUT)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            _look(process.pid, most)
            time.sleep(_PAUSE)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        stream.seek(0)
        output = stream.read()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode}: {output[-3000:]}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, **most, output=output)


def _look(pid: int, most: dict[str, int]) -> None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # it has just ended, or the system has no such files: then the figures stay 0
        return
    for line in lines:
        name, _, value = line.partition(":")
        if name in _FIELDS:
            key = _FIELDS[name]
            most[key] = max(most[key], int(value.split()[0]) * 1024)
