"""`sigmascope trend`, and `sigmascope check --against-history`."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.history.kept_runs import kept_run
from typer.testing import CliRunner, Result

from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, SigmascopeError, StoreError
from sigmascope.history.store import open_store
from sigmascope.records.run import Run


@pytest.fixture(autouse=True)
def file(store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return store_file


def invoked(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def did(*words: object) -> Result:
    done = invoked(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def on_day(day: int, level: float = 10.0, torch: str = "2.13", **other: object) -> Run:
    seconds = level * random.Random(day).gauss(1, 0.01)
    run = kept_run(started_at=f"2026-03-{day:02}T12:00:00+00:00", seconds=seconds, **other)  # type: ignore[arg-type]
    assert run.host is not None
    return replace(run, host=replace(run.host, libraries={"torch": torch}))


def kept(*runs: Run) -> None:
    """As if each had been kept when it ended."""
    with open_store() as store:
        for run in runs:
            store.add(run, "watch", imported=True)


def kept_with_a_change() -> None:
    kept(*(on_day(day) for day in range(1, 16)), *(on_day(day, 12.0, "2.14") for day in range(16, 20)))


def test_a_change_is_shown_with_its_day_and_cause() -> None:
    kept_with_a_change()
    lines = did("trend").stdout.splitlines()
    assert lines[0] == "Flux 1024×768, 4 steps, models/flux, NVIDIA H200"
    assert lines[1].startswith("time: 10.0")
    assert "since 2026-03-16" in lines[1]
    assert "4 runs ago" in lines[1]
    assert lines[2].count("▁") + lines[2].count("▂") == 15
    [row] = [line for line in lines if "torch 2.13 → 2.14" in line]
    assert row.split()[0] == "2026-03-16"
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, "1 run: too few to tell, 5 more are needed."), (5, "5 runs: too few to tell, 1 more is needed.")],
)
def test_of_few_runs_it_says_how_many_are_missing(count: int, said: str) -> None:
    kept(*(on_day(1 + day) for day in range(count)))
    assert said in did("trend").output


def test_json_has_every_run_and_change() -> None:
    kept_with_a_change()
    [series] = json.loads(did("trend", "latest", "--json").stdout)
    assert len(series["runs"]) == 19
    [change] = series["changes"]
    assert (change["index"], change["found_at"], change["causes"]) == (15, 17, ["torch 2.13 → 2.14"])
    assert change["started_at"].startswith("2026-03-16")
    assert change["share"] == pytest.approx(0.2, abs=0.02)
    [peaks] = json.loads(did("trend", "--figure", "peak", "--json").stdout)
    assert (peaks["unit"], peaks["level"], peaks["changes"]) == ("bytes", 20 * 2**30, [])


def test_a_page_and_markdown_escape_what_a_record_holds(tmp_path: Path) -> None:
    kept(*(on_day(day, source="<script>alert(1)</script> [x](http://e.org) @all") for day in range(1, 8)))
    did("trend", "--html", tmp_path / "trend.html")
    page = (tmp_path / "trend.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    text = did("trend", "--markdown").stdout
    assert "<script>" not in text
    assert "http://" not in text
    assert "@all" not in text


@pytest.mark.parametrize(
    ("words", "error", "code"),
    [
        (("trend", "--figure", "speed"), ConfigError, 2),
        (("trend", "@none"), StoreError, 1),
        (("trend", "--pipeline", "wan"), StoreError, 1),
        (("check", "latest"), ConfigError, 2),
        (("check", "latest", "--against-history", "--baseline", "latest~1"), ConfigError, 2),
        (("check", "latest~6", "--against-history"), StoreError, 2),  # none before it
    ],
)
def test_errors_have_the_exit_codes_that_are_documented(
    words: tuple[str, ...], error: type[SigmascopeError], code: int
) -> None:
    kept(*(on_day(day) for day in range(1, 8)))
    done = invoked(*words)
    assert isinstance(done.exception, error)
    assert done.exception.exit_code == code


def test_figures_that_may_be_asked_for_are_listed_once_each() -> None:
    kept(*(on_day(day) for day in range(1, 8)))
    error = invoked("trend", "--figure", "speed").exception
    assert isinstance(error, ConfigError)
    names = str(error.hint).removeprefix("Give one of ").removesuffix(".").split(", ")
    assert "generation" in names
    assert len(names) == len(set(names))


def test_without_a_store_it_says_how_to_get_one() -> None:
    done = invoked("trend")
    assert isinstance(done.exception, StoreError)
    assert "No run is kept yet" in done.exception.message


@pytest.mark.parametrize(
    ("level", "new", "code"),
    [
        (10.0, ("latest", "latest~1", "latest~2"), 0),
        (11.2, ("latest", "latest~1", "latest~2"), 1),
        (11.2, ("latest~2",), 0),  # of one alone a tenth is no proof
        (13.0, ("latest~2",), 1),
    ],
)
def test_a_check_against_history(level: float, new: tuple[str, ...], code: int) -> None:
    kept(*(on_day(day) for day in range(1, 16)), *(on_day(day, level) for day in range(16, 19)))
    done = invoked("check", *new, "--against-history")
    assert done.exit_code == code, done.output
    assert "Against 15 kept runs, 2026-03-01" in done.stderr
    found = json.loads(invoked("check", *new, "--against-history", "--json").stdout)
    assert ("generation" in found["regressed"]) == (code == 1)


def test_a_single_run_needs_a_history_of_ten(tmp_path: Path) -> None:
    kept(*(on_day(day) for day in range(1, 6)))
    on_day(9, 20.0).save(tmp_path / "new.json")
    done = did("check", "new.json", "--against-history")
    assert "undecided" in done.output


def test_a_check_in_markdown_for_a_pull_request() -> None:
    kept_with_a_change()
    done = invoked("check", "latest", "latest~1", "latest~2", "latest~3", "--against-history", "--markdown")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert "torch 2.13 → 2.14 may explain it." in lines[0]
    assert lines[0].startswith("**")
    assert "| torch | 2.13 | 2.14 |" in lines
    assert any(line.startswith("| generation | 9.") and "| regressed |" in line for line in lines)
