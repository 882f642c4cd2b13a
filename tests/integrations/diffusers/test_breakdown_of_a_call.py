"""What slows a real pipeline down has a row of its own: planted sleeps, whose length is the least that the row holds."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.families.changes import slowed
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.breakdown import TimeShare, time_breakdown

SLEEP = 0.2
STEPS = 2


@pytest.fixture(scope="module")
def pipe() -> Any:
    return make_pipeline("sd15")


def breakdown(pipe: Any, **call: Any) -> dict[str, TimeShare]:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", num_inference_steps=STEPS, **call)
    return {row.label: row for row in time_breakdown(watching.record())}


def preview(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    time.sleep(SLEEP)
    return kwargs


class Preview:
    def __call__(self, *args: Any) -> dict[str, Any]:
        return preview(*args)

    def method(self, *args: Any) -> dict[str, Any]:
        return preview(*args)


FILE = __file__.rsplit("/", 1)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "named"),
    [
        (preview, f"preview ({FILE}:{preview.__code__.co_firstlineno})"),
        (functools.partial(preview), f"preview ({FILE}:{preview.__code__.co_firstlineno})"),
        (Preview(), f"Preview ({FILE}:{Preview.__call__.__code__.co_firstlineno})"),
        (Preview().method, f"Preview.method ({FILE}:{Preview.method.__code__.co_firstlineno})"),
    ],
)
def test_a_callback_is_named_by_function_and_line(
    pipe: Any, callback: Callable[..., Any], named: str
) -> None:
    row = breakdown(pipe, callback_on_step_end=callback)["denoising, between steps"]
    assert row.callback == named
    assert row.seconds >= STEPS * SLEEP


def test_the_scheduler_has_its_own_row(pipe: Any) -> None:
    with slowed(type(pipe.scheduler), "step", SLEEP):
        rows = breakdown(pipe)
    assert rows["denoising, scheduler"].seconds >= STEPS * SLEEP
    assert rows["denoising, scheduler"].count == STEPS


def test_a_tokenizer_is_told_from_the_text_encoder(pipe: Any) -> None:
    with slowed(type(pipe.tokenizer), "__call__", SLEEP):
        row = breakdown(pipe)["text_encoding"]
    assert row.in_models is not None
    assert row.seconds - row.in_models >= SLEEP


def test_what_the_watch_itself_takes_is_no_part_of_the_script(pipe: Any) -> None:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", num_inference_steps=STEPS)
        time.sleep(SLEEP)
    run = watching.record()
    before, later = run.facts["watch_seconds"]
    assert before > 0
    assert later > 0
    assert 0 < run.facts["watch_cpu_seconds"] <= before + later
    rows = {row.label: row.seconds for row in time_breakdown(run)}
    assert rows["the watch itself"] == pytest.approx(before + later)
    assert rows["after the last stage"] >= SLEEP


def test_the_rows_sum_to_the_whole(pipe: Any) -> None:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", num_inference_steps=STEPS)
    run = watching.record()
    assert sum(row.seconds for row in time_breakdown(run)) == pytest.approx(run.seconds, rel=0.01)
