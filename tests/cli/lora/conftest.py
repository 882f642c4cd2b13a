"""The command line in the test's own process, in a folder of its own."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sigmascope.cli.root import run

Run = Callable[..., tuple[int, str, str]]
"""Called with the arguments; gives the exit code, stdout, and stderr with its lines joined."""


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
