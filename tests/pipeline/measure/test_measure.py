"""What measuring keeps, drops and says, and what it leaves behind."""

import json
from typing import Any

import pytest
from tests.families import generate, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.measured import (
    IMAGE,
    MS,
    Clock,
    measure,
    sliced_is_fast,
    timed,
)
from tests.pipeline.optimized import optimizer, warm_pipeline
from tests.pipeline.warm_pipelines import turned_clock

from sigmascope.analysis.generations import cases
from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizer import Measurement


@pytest.fixture(scope="module")
def slicing_pays() -> Measurement:
    """Of a pipeline that slicing makes faster and tiling slower."""
    with pytest.MonkeyPatch.context() as patch:
        call = timed(turned_clock(patch), sliced_is_fast)
        return measure(warm_pipeline("sd15"), call, vae_slicing=True, vae_tiling=True)


def test_what_saves_time_is_kept_and_what_costs_time_is_dropped(slicing_pays: Measurement) -> None:
    assert [(result.choice.kind, result.kept) for result in slicing_pays.results] == [
        ("vae_slicing", True),
        ("vae_tiling", False),
    ]


def test_each_choice_has_its_own_gain(slicing_pays: Measurement) -> None:
    assert [result.saved_percent for result in slicing_pays.results] == pytest.approx([40.0, -100 / 6])


def test_the_whole_gain_is_that_of_what_was_kept(slicing_pays: Measurement) -> None:
    assert slicing_pays.factor == pytest.approx(100 / 60)


def test_the_reduced_plan_says_why_the_rest_was_dropped(slicing_pays: Measurement) -> None:
    assert [choice.kind for choice in slicing_pays.plan.choices] == ["vae_slicing"]
    (left,) = (one for one in slicing_pays.plan.not_taken if one.kind == "vae_tiling")
    assert left.reason.startswith("It did not pay. 70.0 ms instead of 60.0 ms, 1.167 times as long")


def test_the_pipeline_is_as_it_was_after_measuring(clock: Clock, sd15: Any) -> None:
    before = deep_snapshot(sd15)
    measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True, dtype="bfloat16")
    assert differences(before, deep_snapshot(sd15)) == []


def test_what_paid_can_be_kept_and_undone_later(clock: Clock) -> None:
    pipeline = make_pipeline("sd15")
    generate(pipeline, "sd15")
    before = deep_snapshot(pipeline)
    tool = optimizer(vae_slicing=True, vae_tiling=True)
    tool.measure(pipeline, timed(clock, sliced_is_fast), keep=True)
    assert (pipeline.vae.use_slicing, pipeline.vae.use_tiling) == (True, False)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []


def test_a_set_up_that_does_not_run_is_dropped_with_its_error(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        if pipeline.vae.use_tiling:
            raise MemoryError("tiles are too much")
        clock.ns += MS
        return (IMAGE,)

    before = deep_snapshot(sd15)
    found = measure(sd15, call, vae_tiling=True)
    assert found.results[0].verdict == "It does not run: MemoryError: tiles are too much."
    assert differences(before, deep_snapshot(sd15)) == []


def test_a_call_that_does_not_run_at_all_is_not_the_choice_s_fault(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        raise ValueError("There is no prompt.")

    found = measure(sd15, call, vae_tiling=True)
    assert found.results[0].verdict == "It does not run, nor without it: ValueError: There is no prompt."


def test_what_lets_the_pipeline_run_at_all_is_kept(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        if not pipeline.vae.use_tiling:
            raise MemoryError("the image is too large")
        clock.ns += MS
        return (IMAGE,)

    found = measure(sd15, call, vae_tiling=True)
    assert found.first.error == "MemoryError: the image is too large"
    assert (found.results[0].kept, found.results[0].verdict) == (True, "The pipeline runs only with it.")


def test_a_choice_that_cannot_be_applied_is_dropped_with_the_reason(clock: Clock) -> None:
    pipeline = warm_pipeline("flux")
    found = measure(pipeline, timed(clock, lambda _: 1), attention_backend="flash")
    assert "flash-attn" in found.results[0].verdict
    assert not found.results[0].kept


def test_arguments_of_the_pipelines_call_are_enough(sd15: Any) -> None:
    call = {"prompt": "a fox", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    found = measure(sd15, call, vae_slicing=True, repeats=2, warmup=0)
    assert found.repeatable is True
    assert found.first.step_seconds is not None


@pytest.mark.slow
def test_the_runs_can_be_diagnosed(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True)
    (case,) = cases(found.last.runs[0])
    assert case.pipeline is not None
    assert case.pipeline.components["vae"].slicing is True


def test_ctrl_c_undoes_everything_and_passes(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        if pipeline.vae.use_tiling:
            raise KeyboardInterrupt
        clock.ns += (50 if pipeline.vae.use_slicing else 100) * MS
        return (IMAGE,)

    before = deep_snapshot(sd15)
    with pytest.raises(KeyboardInterrupt):
        measure(sd15, call, vae_slicing=True, vae_tiling=True)
    assert differences(before, deep_snapshot(sd15)) == []


def test_a_measurement_is_json_and_a_table(slicing_pays: Measurement) -> None:
    assert json.loads(json.dumps(slicing_pays.as_dict()))["results"][0]["kept"] is True
    lines = str(slicing_pays).splitlines()
    assert lines[0].startswith("As found: 100 ms")
    assert lines[1].startswith("+ vae_slicing of vae: 60.0 ms")
    assert lines[2].startswith("- vae_tiling of vae: 70.0 ms")
    assert "1.67 times as fast" in lines[3]


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}])
def test_numbers_of_runs_that_make_no_sense_are_refused(sd15: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        measure(sd15, {}, vae_slicing=True, **wrong)
