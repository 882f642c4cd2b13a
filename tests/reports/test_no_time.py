"""Records whose times are 0, by a coarse clock or somebody's hand: no surface divides by them."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.work_comparison import compare_work
from sigmascope.records.run import Run, Stage
from sigmascope.reports.html import to_html
from sigmascope.reports.markdown import to_markdown
from sigmascope.reports.trace import trace_of


@pytest.fixture(scope="module")
def recorded() -> Run:
    """A whole call with a callback, which takes most of the time between the steps."""
    pipeline = make_pipeline("sd15")

    def look(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs

    with sigmascope.watch(pipeline, sample_hz=None) as watched:
        generate(pipeline, "sd15", callback_on_step_end=look)
    run: Run = watched.record()
    return run


def timeless(stage: Stage) -> Stage:
    steps = replace(stage.steps, seconds=(0.0,) * len(stage.steps.seconds))
    return replace(stage, seconds=0.0, steps=steps, children=tuple(map(timeless, stage.children)))


ALTERED: dict[str, Callable[[Run], Run]] = {
    "the run": lambda run: replace(run, seconds=0.0),
    "its stages": lambda run: replace(run, stages=tuple(map(timeless, run.stages))),
    "the outermost stages": lambda run: replace(
        run, stages=tuple(replace(stage, seconds=0.0) for stage in run.stages)
    ),
    "both": lambda run: replace(run, seconds=0.0, stages=tuple(map(timeless, run.stages))),
}


@pytest.mark.parametrize("what", ALTERED)
def test_a_time_of_0_is_shown_everywhere(recorded: Run, what: str, tmp_path: Path) -> None:
    run = ALTERED[what](recorded)
    diagnose(run)
    for full in (False, True):
        run.print(Console(file=StringIO(), width=100), full=full)
    assert "denoising" in to_html(run)
    assert "StableDiffusionPipeline" in to_markdown(run)
    assert trace_of([run])["traceEvents"]
    for pair in ((run, recorded), (recorded, run), (run, run)):
        compare_work("sd15", [pair[0]], [pair[1]])
    run.save(tmp_path / "run.json")
    assert sigmascope.load_run(tmp_path / "run.json").seconds == run.seconds
