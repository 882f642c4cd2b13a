"""Programs run by Python alone and by Python under a watch."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sigmascope.integrations.launch import environment_for
from sigmascope.integrations.watch_settings import Settings

_MOST_SECONDS = 300


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote. `told` is what Sigmascope added to stderr."""

    code: int
    out: str
    err: str
    told: str


def ended(program: subprocess.CompletedProcess[str]) -> Ended:
    lines = program.stderr.splitlines(keepends=True)
    told = "".join(line for line in lines if line.startswith("Sigmascope: "))
    err = "".join(line for line in lines if not line.startswith("Sigmascope: "))
    return Ended(program.returncode, program.stdout, err, told)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def plain(program: Sequence[str], folder: Path, **more: str) -> Ended:
    """The program under Python alone."""
    done = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=_MOST_SECONDS,
    )
    return ended(done)


def watched(program: Sequence[str], folder: Path, settings: Settings | None = None, **more: str) -> Ended:
    """The program as `sigmascope watch` launches it."""
    told = environment_for(environment(**more), settings or Settings(quiet="1", launched="1"))
    done = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=_MOST_SECONDS,
    )
    return ended(done)


def write(folder: Path, name: str, code: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return name
