"""How far the image moved decides whether a choice stays."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.families import generate
from tests.pipeline.measured import IMAGE, MS, Clock, generated, half_is_fast, measure
from tests.pipeline.optimized import dtypes_of, optimizer

from sigmascope.errors import ConfigError


@pytest.mark.slow
def test_how_far_the_image_moved_is_told_against_the_first(clock: Clock, sd15: Any) -> None:
    found = measure(sd15, generated(clock, half_is_fast), dtype="bfloat16", repeats=1, warmup=0)
    tool = optimizer(dtype="bfloat16")
    first = generate(sd15, "sd15").double()
    with tool.applied(sd15):
        error = generate(sd15, "sd15").double() - first
    assert found.image.relative_l2 == pytest.approx(float(error.norm() / first.norm()))


def test_an_image_that_moved_too_far_is_dropped_however_fast(clock: Clock, sd15: Any) -> None:
    found = measure(
        sd15, generated(clock, half_is_fast), dtype="bfloat16", min_psnr=90.0, repeats=1, warmup=0
    )
    assert found.plan.choices == ()
    assert "less than the 90 dB asked for" in found.results[0].verdict


def test_an_image_of_nan_is_dropped_however_fast(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        is_half = torch.bfloat16 in dtypes_of(pipeline.unet)
        clock.ns += (50 if is_half else 100) * MS
        return (torch.full((1, 3, 2, 2), float("nan") if is_half else 0.5),)

    found = measure(sd15, call, dtype="bfloat16")
    assert found.results[0].verdict == "It breaks the image: 12 values are NaN or Inf."


def test_a_call_without_a_seed_is_told_of(clock: Clock, sd15: Any) -> None:
    seeds = iter(range(100))
    found = measure(
        sd15,
        lambda pipeline: (generate(pipeline, "sd15", seed=next(seeds)),),
        vae_slicing=True,
        repeats=2,
        warmup=0,
    )
    assert found.repeatable is False
    assert "did not give the same image twice" in str(found)


def test_bytes_that_became_all_black_are_dropped_however_fast(clock: Clock, sd15: Any) -> None:
    """What diffusers gives of NaN: it turns them into zeros without a word."""
    picture = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3)

    def call(pipeline: Any) -> object:
        is_half = torch.bfloat16 in dtypes_of(pipeline.unet)
        clock.ns += (50 if is_half else 100) * MS
        return (picture * 0 if is_half else picture,)

    found = measure(sd15, call, dtype="bfloat16")
    assert found.results[0].verdict == "It breaks the image: all of it is one value."
    assert found.plan.choices == ()


def test_an_image_that_cannot_be_compared_does_not_pass_for_near(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        clock.ns += half_is_fast(pipeline) * MS
        return None

    found = measure(sd15, call, dtype="bfloat16", min_psnr=30.0)
    assert found.results[0].verdict == (
        "Whether the image still has 30 dB to the first is unknown: "
        "it is not compared (the output holds no known kind of image)."
    )
    assert "image not compared (the output holds no known kind of image)" in str(found)
    assert measure(sd15, call, dtype="bfloat16").results[0].kept


def test_where_nothing_ran_as_found_no_distance_is_asked_for(clock: Clock, sd15: Any) -> None:
    def call(pipeline: Any) -> object:
        if not pipeline.vae.use_tiling:
            raise MemoryError("the image is too large")
        clock.ns += MS
        return (IMAGE,)

    assert measure(sd15, call, vae_tiling=True, min_psnr=30.0).results[0].kept


@pytest.mark.parametrize(
    "wrong", [{"min_psnr": float("nan")}, {"least_gain": float("nan")}, {"least_gain": -1.0}]
)
def test_demands_that_make_no_sense_are_refused(sd15: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        measure(sd15, {}, vae_slicing=True, **wrong)
