"""Runs whose files were changed by hand: what each field that holds a time may hold, and who says so."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.run_comparison import compare_run_sets
from sigmascope.cli.root import app
from sigmascope.errors import ConfigError, RecordError
from sigmascope.records import Run, Stage, Steps, load_run, run_to_json
from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import impossible_times

NAN, INF = {"$float": "nan"}, {"$float": "inf"}
RUN = Run(
    "relit",
    "relight",
    "2026-11-20T10:00:00+00:00",
    4.0,
    stages=(
        Stage(
            "generation",
            0.1,
            3.5,
            children=(
                Stage(
                    "denoising",
                    0.5,
                    3.0,
                    steps=Steps((0.0, 1.0), (1.0, 1.0), (0.9, None)),
                    peak=PeakMemory(2**30, 0.1, (AcceleratorPeak("cuda:0", 5, 0.1, 6, 0.2),)),
                    facts={"device_seconds": 2.9},
                ),
            ),
        ),
    ),
)
INNER = "stages.0.children.0"
IMPOSSIBLE = [
    ("started_at", "yesterday"),
    ("started_at", "2026-13-01T00:00:00"),
    ("seconds", NAN),
    ("seconds", -4.0),
    ("seconds", 1e305),
    ("stages.0.started_seconds", INF),
    ("stages.0.seconds", -0.5),
    (f"{INNER}.seconds", NAN),
    (f"{INNER}.steps.started.1", NAN),
    (f"{INNER}.steps.seconds.0", -1.0),
    (f"{INNER}.steps.seconds.1", INF),
    (f"{INNER}.steps.gpu_seconds.0", NAN),
    (f"{INNER}.facts.device_seconds", -2.0),
    (f"{INNER}.facts.device_seconds", "long"),
    (f"{INNER}.peak.rss_at_seconds", NAN),
    (f"{INNER}.peak.accelerators.0.reserved_at_seconds", INF),
]
UNREADABLE = [
    (f"{INNER}.steps.seconds.1", None),
    (f"{INNER}.steps.seconds", [1.0]),
    (f"{INNER}.steps.gpu_seconds", [0.9, 0.9, 0.9]),
    (f"{INNER}.seconds", "3"),
    (f"{INNER}.seconds", 10**400),
    (f"{INNER}.peak.rss_bytes", 10**30),
    ("started_at", None),
]


def changed(path: Path, field: str, value: object) -> Path:
    """A file of the run with another value in one field, whose name has dots between its parts."""
    document = json.loads(run_to_json(RUN))
    at: Any = document["run"]
    *outer, last = field.split(".")
    for part in outer:
        at = at[int(part) if part.isdigit() else part]
    at[int(last) if last.isdigit() else last] = value
    path.write_text(json.dumps(document))
    return path


def place(field: str) -> str:
    """The field as messages name it."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in field.split("."))


def test_a_run_as_it_was_recorded_holds_none() -> None:
    assert list(impossible_times(RUN)) == []


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_what_cannot_be_a_time_is_named_by_all_who_would_reckon_with_it(
    tmp_path: Path, field: str, value: object
) -> None:
    run = load_run(changed(tmp_path / "run.json", field, value))
    (wrong,) = impossible_times(run)
    assert wrong.startswith(f"run{place(field)} is ")
    with pytest.raises(ConfigError, match=r"The run relit has no place on an axis of time: run"):
        run.to_trace(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
    assert f"Damaged: {wrong}." in " ".join(printed(run).split())
    diagnose(run)


@pytest.mark.parametrize(("field", "value"), [IMPOSSIBLE[0], IMPOSSIBLE[2], IMPOSSIBLE[9]])
@pytest.mark.parametrize("command", ["check", "compare"])
def test_the_command_line_names_file_and_field(
    tmp_path: Path, command: str, field: str, value: object
) -> None:
    RUN.save(tmp_path / "before.json")
    after = changed(tmp_path / "after.json", field, value)
    for paths in (
        [after, "--baseline", tmp_path / "before.json"],
        [tmp_path / "before.json", "--baseline", after],
    ):
        error = CliRunner().invoke(app, [command, *map(str, paths)]).exception
        assert isinstance(error, RecordError)
        assert error.message.startswith(f"{after}: is damaged: run{place(field)} is ")


@pytest.mark.parametrize(("field", "value"), UNREADABLE)
def test_what_a_field_cannot_hold_is_refused_with_its_place(
    tmp_path: Path, field: str, value: object
) -> None:
    last = field.rpartition(".")[2]
    named = (
        place(field.removesuffix(f".{last}"))
        if last in ("seconds", "gpu_seconds") and isinstance(value, list)
        else place(field)
    )
    with pytest.raises(RecordError) as caught:
        load_run(changed(tmp_path / "run.json", field, value))
    assert caught.value.message.startswith(f"{tmp_path / 'run.json'}: is damaged: ")
    assert f"run{named}" in caught.value.message


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -9.0])
def test_what_cannot_be_a_time_counts_in_no_comparison(wrong: float) -> None:
    whole = replace(RUN.stages[0].children[0], steps=Steps((0.0, 1.0, 2.0), (9.0, 1.0, 2.0)), facts={})
    odd = replace(whole, seconds=wrong, steps=Steps((0.0, 1.0, 2.0), (9.0, wrong, 2.0)))
    new = [in_one(whole), in_one(odd), in_one(whole)]
    found = {one.name: (one.new, one.runs) for one in compare_run_sets(new, [in_one(whole)] * 3)[0]}
    assert found["denoising"] == (3.0, (3, 2))
    assert found["denoising step"] == (1.5, (3, 3))


def in_one(stage: Stage, more: Sequence[Stage] = ()) -> Run:
    return replace(RUN, stages=(stage, *more))


def printed(run: Run) -> str:
    console = Console(file=StringIO(), width=80)
    run.print(console)
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()
