"""The command line in the test's own process, in a folder of its own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sigmascope.cli.root import run

Run = Callable[..., tuple[int, str, str]]
"""Called with the arguments; gives the exit code, stdout, and stderr with its lines joined."""


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    code: int
    out: str
    err: str


Terminal = Callable[..., Outcome]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    """The command line in this process, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["sigmascope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run()
        out, err = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), out, err)

    return call


@pytest.fixture
def sigmascope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sigmascope", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, " ".join(err.split())

    return call
