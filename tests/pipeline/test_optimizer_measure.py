"""What measuring keeps, drops and says: real pipelines, on a clock that the test turns."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import dtypes_of, optimizer, warm_pipeline

from sigmascope.analysis.diagnostics.case import cases
from sigmascope.errors import ConfigError
from sigmascope.monitor.recorder import Recorder
from sigmascope.pipeline.optimizer import Measurement
from sigmascope.pipeline.optimizing import trial_runs

MS = 1_000_000


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trial_runs, "Recorder", partial(Recorder, sample_hz=None, clock=made))
    return made


@pytest.fixture
def sd15() -> Any:
    return warm_pipeline("sd15")


IMAGE = torch.full((1, 3, 2, 2), 0.5)


def timed(clock: Clock, cost_ms: Callable[[Any], int]) -> Callable[[Any], object]:
    """A call that takes as long as the set-up of the pipeline makes it, and always gives the same image."""

    def call(pipeline: Any) -> object:
        clock.ns += cost_ms(pipeline) * MS
        return (IMAGE,)

    return call


def generated(clock: Clock, cost_ms: Callable[[Any], int]) -> Callable[[Any], object]:
    """The same with the image that the pipeline makes."""

    def call(pipeline: Any) -> object:
        clock.ns += cost_ms(pipeline) * MS
        return (generate(pipeline, "sd15"),)

    return call


def half_is_fast(pipeline: Any) -> int:
    """100 ms; 50 in bfloat16."""
    return 50 if torch.bfloat16 in dtypes_of(pipeline.unet) else 100


def sliced_is_fast(pipeline: Any) -> int:
    """100 ms; 60 with slicing, and 10 more with tiling."""
    return 100 - 40 * int(pipeline.vae.use_slicing) + 10 * int(pipeline.vae.use_tiling)


def measure(pipeline: Any, call: Any, **asked: Any) -> Measurement:
    options = {name: asked.pop(name) for name in ("keep", "min_psnr", "repeats", "warmup") if name in asked}
    return optimizer(**asked).measure(pipeline, call, **options)


def test_what_saves_time_is_kept_and_what_costs_time_is_dropped(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True)
    assert [(result.choice.kind, result.kept) for result in found.results] == [
        ("vae_slicing", True),
        ("vae_tiling", False),
    ]


def test_each_choice_has_its_own_gain(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True)
    assert [result.saved_percent for result in found.results] == pytest.approx([40.0, -100 / 6])


def test_the_whole_gain_is_that_of_what_was_kept(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True)
    assert found.factor == pytest.approx(100 / 60)


def test_the_reduced_plan_says_why_the_rest_was_dropped(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True)
    assert [choice.kind for choice in found.plan.choices] == ["vae_slicing"]
    (left,) = (one for one in found.plan.not_taken if one.kind == "vae_tiling")
    assert left.reason.startswith("It did not pay. 70.0 ms instead of 60.0 ms, 1.167 of it")


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


def test_how_far_the_image_moved_is_told_against_the_first(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, generated(clock, half_is_fast), dtype="bfloat16")
    tool = optimizer(dtype="bfloat16")
    first = generate(sd15, "sd15").double()
    with tool.applied(sd15):
        error = generate(sd15, "sd15").double() - first
    assert found.image.relative_l2 == pytest.approx(float(error.norm() / first.norm()))


def test_an_image_that_moved_too_far_is_dropped_however_fast(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, generated(clock, half_is_fast), dtype="bfloat16", min_psnr=90.0)
    assert found.plan.choices == ()
    assert "90 are asked for" in found.results[0].verdict


def test_an_image_of_nan_is_dropped_however_fast(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        is_half = torch.bfloat16 in dtypes_of(pipeline.unet)
        clock.ns += (50 if is_half else 100) * MS
        return (torch.full((1, 3, 2, 2), float("nan") if is_half else 0.5),)

    found = measure(sd15, call, dtype="bfloat16")
    assert found.results[0].verdict == "It breaks the image: 12 values are NaN or Inf."


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


def test_what_lets_the_pipeline_run_at_all_is_kept(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        if not pipeline.vae.use_tiling:
            raise MemoryError("the image is too large")
        clock.ns += MS
        return (IMAGE,)

    found = measure(sd15, call, vae_tiling=True)
    assert found.first.error == "MemoryError: the image is too large"
    assert (found.results[0].kept, found.results[0].verdict) == (True, "With it the pipeline runs.")


def test_a_choice_that_cannot_be_applied_is_dropped_with_the_reason(clock: Clock) -> None:
    pipeline = warm_pipeline("flux")
    found = measure(pipeline, timed(clock, lambda _: 1), attention_backend="flash")
    assert "flash-attn" in found.results[0].verdict
    assert not found.results[0].kept


def test_slow_runs_of_a_busy_machine_do_not_make_a_choice_pay(clock: Clock, sd15: Any) -> None:
    costs = iter(
        [10, 90, 10, 100, 95, 12, 11, 10, 12, 11]
    )  # as found: warm-up, then 90, 10, 100; the choice: 12, 11, 10
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert not found.results[0].kept


def test_a_machine_that_became_faster_meanwhile_does_not_make_a_choice_pay(clock: Clock, sd15: Any) -> None:
    costs = iter([100] * 4 + [97] * 4 + [94] * 4 + [97] * 4)  # in turn: as found, with it, as found, with it
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert not found.results[0].kept
    assert len(found.results[0].before.seconds) == 6


def test_a_small_gain_that_comes_back_is_kept(clock: Clock, sd15: Any) -> None:
    costs = iter(([100] * 4 + [95] * 4) * 2)
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert found.results[0].saved_percent == pytest.approx(5.0)
    assert found.results[0].kept


def test_the_first_warm_up_tells_what_compiling_took(clock: Clock, sd15: Any) -> None:
    costs = iter([500, 10, 10, 10, 900, 5, 5, 5])
    found = measure(sd15, timed(clock, lambda _: next(costs)), vae_slicing=True)
    assert (found.first.warmup_seconds, found.last.warmup_seconds) == (0.5, 0.9)


def test_a_call_without_a_seed_is_told_of(clock: Clock, sd15: Any) -> None:
    seeds = iter(range(100))
    found = measure(sd15, lambda pipeline: (generate(pipeline, "sd15", seed=next(seeds)),), vae_slicing=True)
    assert found.repeatable is False
    assert "did not give the same image twice" in str(found)


def test_arguments_of_the_pipelines_call_are_enough(sd15: Any) -> None:
    call = {"prompt": "a fox", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    found = measure(sd15, call, vae_slicing=True, repeats=2, warmup=0)
    assert found.repeatable is True
    assert found.first.step_seconds is not None


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


def test_a_measurement_is_json_and_a_table(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, timed(clock, sliced_is_fast), vae_slicing=True, vae_tiling=True)
    assert json.loads(json.dumps(found.as_dict()))["results"][0]["kept"] is True
    lines = str(found).splitlines()
    assert lines[0].startswith("As found: 100 ms")
    assert lines[1].startswith("+ vae_slicing of vae: 60.0 ms")
    assert lines[2].startswith("- vae_tiling of vae: 70.0 ms")
    assert "1.67 times as fast" in lines[3]


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}])
def test_numbers_of_runs_that_make_no_sense_are_refused(sd15: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        measure(sd15, {}, vae_slicing=True, **wrong)
