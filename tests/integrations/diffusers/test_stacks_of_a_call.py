"""Where a script is while its pipeline takes no step: planted functions with sleeps, whose length is what a row can hold."""

import functools
import inspect
import threading
import time
from typing import Any

import pytest
import torch
from tests.families.pipelines import generate
from tests.own_threads import own_threads
from torch import Tensor

import sigmascope
from sigmascope.analysis.breakdown import TimeShare, time_breakdown
from sigmascope.records.performance import host_stacks
from sigmascope.records.run import Run

SLEEP = 0.3
FILE = __file__.rsplit("/", 1)[-1]


def read_image() -> None:
    time.sleep(SLEEP)


def preview(_pipe: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    read_image()
    return kwargs


def compute() -> None:
    """For as long of the thread's own time, however busy the machine is; looks pause where it is."""
    until = time.thread_time() + 2 * SLEEP
    while time.thread_time() < until:
        sum(range(1000))


def place_of(function: Any) -> str:
    """Its second line, in which it is."""
    return f"{function.__name__} ({FILE}:{function.__code__.co_firstlineno + 1})"


def rows_of(run: Run) -> dict[str, TimeShare]:
    return {row.label: row for row in time_breakdown(run)}


def longest_in(row: TimeShare) -> str:
    return row.places[0].label


def test_a_helper_of_the_callback_is_found_between_the_steps(pipeline: Any) -> None:
    with sigmascope.watch(pipeline, stacks=True) as watching:
        generate(pipeline, "sd15", callback_on_step_end=preview)
    run = watching.record()
    row = rows_of(run)["denoising, between steps"]
    assert longest_in(row) == place_of(read_image)
    assert sum(place.seconds for place in row.places) <= row.seconds * (1 + 1e-9)


def test_helpers_before_between_and_after_stages_are_found(pipeline: Any) -> None:
    with sigmascope.watch(pipeline, stacks=True) as watching:
        for _ in range(2):
            read_image()
            generate(pipeline, "sd15")
        read_image()
    rows = rows_of(watching.record())
    for name in ("before the first stage", "between stages", "after the last stage"):
        assert longest_in(rows[name]) == place_of(read_image)


@pytest.mark.slow
def test_what_a_worker_thread_computes_is_found(pipeline: Any) -> None:
    worker = threading.Thread(target=compute)
    with sigmascope.watch(pipeline, stacks=True) as watching:
        generate(pipeline, "sd15")
        worker.start()
        worker.join()
    places = rows_of(watching.record())["after the last stage"].places
    assert any(place.function == "compute" and place.in_thread for place in places)


def test_the_pipeline_s_own_line_is_named_where_none_of_the_script_is(pipeline: Any) -> None:
    kind = type(pipeline)
    lines, first = inspect.getsourcelines(kind.__call__)
    line = first + next(
        number for number, text in enumerate(lines) if "self.maybe_free_model_hooks()" in text
    )
    # In no frame of Python's, and for longer than looks pause on a busy machine.
    pipeline.maybe_free_model_hooks = functools.partial(time.sleep, 3 * SLEEP)
    with sigmascope.watch(pipeline, stacks=True) as watching:
        generate(pipeline, "sd15")
    row = rows_of(watching.record())["generation, the rest"]
    assert longest_in(row) == f"{kind.__name__}.__call__ (pipeline_stable_diffusion.py:{line})"


def test_the_record_says_what_the_looks_cost(pipeline: Any) -> None:
    with sigmascope.watch(pipeline, stacks=True) as watching:
        generate(pipeline, "sd15", callback_on_step_end=preview)
    seen = host_stacks(watching.record())
    assert seen is not None
    assert seen.samples > 0
    assert 0 < seen.cost_seconds < watching.seconds
    assert seen.cost_share == pytest.approx(seen.cost_seconds / watching.seconds, rel=0.1)


def test_the_picture_is_the_same_bit_for_bit(pipeline: Any, unwatched: Tensor) -> None:
    with sigmascope.watch(pipeline, stacks=True):
        assert torch.equal(generate(pipeline, "sd15"), unwatched)


def test_no_thread_is_left_and_errors_are_the_host_s_own(pipeline: Any) -> None:
    earlier = own_threads()
    with pytest.raises(ValueError, match=r"^mine$"), sigmascope.watch(pipeline, stacks=True):
        raise ValueError("mine")
    watching = sigmascope.watch(pipeline, stacks=True)
    with pytest.raises(KeyboardInterrupt), watching:
        raise KeyboardInterrupt
    assert not watching.complete
    assert own_threads() - earlier == set()


def test_it_is_off_unless_asked_for(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as watching:
        assert "sigmascope-stacks" not in [thread.name for thread in threading.enumerate()]
        generate(pipeline, "sd15")
    assert host_stacks(watching.record()) is None
    assert not any(row.places for row in time_breakdown(watching.record()))
