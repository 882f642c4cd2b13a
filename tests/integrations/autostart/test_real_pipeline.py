"""A script with a real pipeline of diffusers, that generates, forks and fails: alone and under a watch."""

import json
from pathlib import Path

import pytest
from tests.integrations.programs import Ended, plain, watched, write

import sigmascope
from sigmascope.integrations.watch_settings import Settings
from sigmascope.records.run import Run

pytestmark = pytest.mark.slow

SCRIPT = f"""
import hashlib, os, sys, traceback
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import torch
from tests.families import generate, make_pipeline

pipe = make_pipeline("sd15")
print(hashlib.sha256(generate(pipe, "sd15").numpy().tobytes()).hexdigest(), flush=True)
child = os.fork()
if child == 0:
    raise SystemExit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(sys.excepthook is sys.__excepthook__)
try:
    pipe(prompt=4)
except ValueError:
    traceback.print_exc()
pipe(prompt=3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    write(folder, "script.py", SCRIPT)
    return folder


@pytest.fixture(scope="module")
def under_watch(folder: Path) -> Ended:
    settings = Settings(output="run.json", trace="trace.json", quiet="1", launched="1")
    return watched(["script.py"], folder, settings)


@pytest.fixture(scope="module")
def run(folder: Path, under_watch: Ended) -> Run:
    return sigmascope.load_run(folder / "run.json")


def test_picture_output_traceback_and_exit_code_are_the_same(folder: Path, under_watch: Ended) -> None:
    alone = plain(["script.py"], folder)
    assert under_watch.code == alone.code == 1
    assert under_watch.out == alone.out
    assert under_watch.err == alone.err


def test_the_stages_of_the_pipeline_are_recorded(run: Run) -> None:
    names = [stage.name for stage in run.stages[0].walk()]
    assert run.stages[0].name == "generation"
    assert [name for name in names if name in ("text_encoding", "denoising", "latent_decoding")] == [
        "text_encoding",
        "denoising",
        "latent_decoding",
    ]


def test_its_steps_are_recorded(run: Run) -> None:
    assert len(run.stage("denoising").steps) == 2


def test_the_call_that_failed_is_recorded(run: Run) -> None:
    error = run.stages[-1].error
    assert error is not None
    assert error.startswith("ValueError: `prompt` has to be of type")
    assert not run.complete


def test_the_trace_holds_the_same_stages(folder: Path, run: Run) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    drawn = sorted(event["name"] for event in events if event.get("cat") == "stage")
    assert drawn == sorted(stage.name for stage in run.walk())
