"""`sigmascope show`: the verdict of saved runs, and which one is the newest."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, RecordError
from sigmascope.history.location import STORE
from sigmascope.history.store import open_store
from sigmascope.records.run import Finding, Run, Stage


def saved(path: Path, name: str = "portrait", *, written_at: float = 1e9) -> Path:
    findings = tuple(
        Finding(f"rule.{number}", "info", f"Number {number} is odd.", {"figure": number}, "Look at it.")
        for number in range(8)
    )
    run = Run(
        "1",
        name,
        "2026-01-02T03:04:05+00:00",
        10.0,
        stages=(Stage("denoising", 1.0, 8.0),),
        findings=findings,
    )
    run.save(path)
    os.utime(path, (written_at, written_at))
    return path


def show(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_the_verdict_comes_first_and_at_most_five_findings(tmp_path: Path) -> None:
    lines = show(saved(tmp_path / "run.json")).output.splitlines()
    assert "Run: portrait" in lines[0]
    assert lines[1] == "80 % of 10.00 s went into denoising."
    assert [line for line in lines if "is odd" in line] == [
        f"info Number {number} is odd." for number in range(5)
    ]
    assert lines[-1].startswith("3 more findings")


def test_in_full_there_is_everything(tmp_path: Path) -> None:
    output = show(saved(tmp_path / "run.json"), "--full").output
    assert output.count("is odd") == 8
    assert "figure 7" in output
    assert "✓ denoising" in output


def test_a_script_reads_the_same_as_json(tmp_path: Path) -> None:
    report = json.loads(show(saved(tmp_path / "run.json"), "--json").stdout)[0]
    assert report["headline"] == "80 % of 10.00 s went into denoising."
    assert [(row["label"], row["seconds"]) for row in report["time"]] == [
        ("before the first stage", 1.0),
        ("denoising", 8.0),
        ("after the last stage", 1.0),
    ]
    assert len(report["findings"]) == 8


def test_alone_it_shows_the_newest_run_and_says_what_it_passes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "old.json", "old", written_at=1e9)
    saved(tmp_path / "new.json", "new", written_at=2e9)
    other = tmp_path / "settings.json"
    other.write_text("{}")
    os.utime(other, (3e9, 3e9))
    monkeypatch.chdir(tmp_path)
    done = show()
    assert "Run: new" in done.stdout
    assert "new.json" in done.stderr
    assert "settings.json" in done.stderr
    assert "old.json" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "is_terminal", "opens"),
    [
        ((), True, True),
        ((), False, False),
        (("--no_browser",), True, False),
        (("--full",), True, False),
        (("run.json",), True, False),
        (("run.json", "--browser"), False, True),
    ],
)
def test_alone_in_a_terminal_it_opens_the_browser(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    is_terminal: bool,
    opens: bool,
) -> None:
    saved(tmp_path / "run.json")
    opened: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "sigmascope.cli.compare.sys", SimpleNamespace(platform="linux", stdout=Terminal(is_terminal))
    )

    def open_page(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", open_page)
    done = show(*arguments)
    assert "80 % of 10.00 s went into denoising." in done.stdout
    pages = list(tmp_path.glob("sigmascope-*/report.html"))
    assert opened == [page.as_uri() for page in pages]
    assert len(pages) == opens


class Terminal:
    """A stream that says whether it is one."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_without_a_screen_no_browser_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "run.json")
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "sigmascope.cli.compare.sys", SimpleNamespace(platform="linux", stdout=Terminal(True))
    )
    monkeypatch.setattr("webbrowser.open", lambda address: pytest.fail("a browser was opened"))
    assert show().exit_code == 0


def test_a_folder_without_a_run_is_an_error_that_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = show()
    assert done.exit_code != 0
    assert "sigmascope watch" in getattr(done.exception, "hint", "")


def test_a_level_of_privacy_that_is_none_is_named_as_it_was_typed(tmp_path: Path) -> None:
    error = show(saved(tmp_path / "run.json"), "--prompts", "ful").exception
    assert isinstance(error, ConfigError)
    assert error.message == "--prompts ful does not exist."


def test_a_run_that_is_nowhere_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, f"sqlite:///{tmp_path / 'runs.db'}")
    with open_store():
        pass  # makes it
    error = show("lates").exception
    assert isinstance(error, RecordError)
    assert error.message == "lates: does not exist. No run that is kept has the id lates."
