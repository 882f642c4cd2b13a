"""Nothing that a run file says makes the terminal do anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.analysis.run_sets import noisy_runs
from tests.reports.console.test_profile import PROFILE
from typer.testing import CliRunner

from sigmascope.cli import root
from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.performance import DeviceUtilization, Gauge
from sigmascope.records.run import AcceleratorFacts, Finding, HostFacts, Run, Stage, TensorFacts
from sigmascope.records.serialization import run_from_json, run_to_json, to_plain
from sigmascope.reports.console import print_run

EVIL = ("\x1b]0;yours\x07", "\x1b[2J\x1b[H", "\x9b31m", "\u202e", "[/bold]")
KEPT = ("severity", "started_at", "schema_version")
"""Fields without whose text a run is not read."""

TOLD = Run(
    "id",
    "run",
    "2026-01-01T00:00:00+00:00",
    2.0,
    host=HostFacts("cpu", 2, os="os", accelerators=(AcceleratorFacts("cuda:0", "name", 2**30),)),
    stages=(
        Stage(
            "denoising",
            0.0,
            2.0,
            success=False,
            error="failed",
            tensors={"latents": TensorFacts((1,), "float32", "cpu", 4, 1)},
            peak=PeakMemory(2**20, 0.5, accelerators=(AcceleratorPeak("cuda:0", 2**20, 0.5),)),
            facts={
                "component": "unet",
                "utilization": {"cuda:0": to_plain(DeviceUtilization("cuda:0", 9, Gauge(50.0, 60.0, 1.0)))},
                "profiles": [to_plain(replace(PROFILE, traces=("trace",)))],
            },
            findings=(Finding("id", "info", "inner", stage="denoising"),),
        ),
    ),
    findings=(Finding("id", "warning", "message", {"name": "value"}, "advice", "denoising"),),
)


def poisoned(value: object, name: str = "") -> object:
    """The same JSON with an escape sequence in every text but names of fields."""
    if isinstance(value, dict):
        own = name in ("tensors", "evidence")  # whose names are a file's too
        return {"".join(EVIL) * own + key: poisoned(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one, name) for one in value]
    return "".join(EVIL) + value if isinstance(value, str) and name not in KEPT else value


def assert_harmless(text: str) -> None:
    assert [char for char in text if not char.isprintable() and char != "\n"] == []


def test_the_record_of_a_run() -> None:
    run = run_from_json(json.dumps(poisoned(json.loads(run_to_json(TOLD)))))
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        print_run(run, console, full=True)
    shown = capture.get()
    assert_harmless(shown)
    for part in (
        "busy",
        "50 %",
        "Profile of",
        "Peak on",
        "failed: ",
        "What to do: ",
        "[/bold]",
        "1,024.0 MiB",
    ):
        assert part in shown


def test_colours_stay() -> None:
    console = Console(width=80, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        print_run(TOLD, console, full=True)
    assert "\x1b[" in capture.get()


@pytest.mark.parametrize("command", ["check", "compare"])
@pytest.mark.parametrize("evil", EVIL)
def test_runs_that_are_compared(tmp_path: Path, command: str, evil: str) -> None:
    for side, factor in {"new": 1.2, "old": 1.0}.items():
        save(tmp_path / side, evil, factor)
    done = CliRunner().invoke(root.app, [command, str(tmp_path / "new"), "--baseline", str(tmp_path / "old")])
    assert done.exit_code in (0, 1), done.output
    assert "denoising" in done.output
    assert_harmless(done.output)


def save(folder: Path, evil: str, factor: float = 1.0, case: str = "case") -> None:
    folder.mkdir()
    for index, run in enumerate(noisy_runs(6, factor=factor, seed=len(folder.name))):
        replace(
            run,
            facts={"benchmark": {"work": evil + case}},
            host=HostFacts(evil + folder.name),
            stages=tuple(replace(stage, name=evil + stage.name) for stage in run.stages),
        ).save(folder / f"{index}.json")


def test_cases_that_one_side_lacks_are_named_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "".join(EVIL)
    save(tmp_path / "new", evil, case="one")
    save(tmp_path / "old", evil, case="other")
    arguments = ["sigmascope", "check", str(tmp_path / "new"), "--baseline", str(tmp_path / "old")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        root.run()
    told = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "nothing in common" in told
    assert_harmless(told)
