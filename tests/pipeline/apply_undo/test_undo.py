"""Applying and undoing are exact inverses, for every choice alone and together, on all seven families."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import (
    ALONE,
    OFFERED,
    SAMPLES_AND_SLOW_FAMILIES,
    TOGETHER,
    first_image,
    optimizer,
    warm_pipeline,
)

from sigmascope.errors import OptimizationError

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
MOST_FAMILIES_SLOWLY = pytest.mark.parametrize("family", SAMPLES_AND_SLOW_FAMILIES)


@contextmanager
def diffusers_warnings_allowed() -> Iterator[None]:
    """SDXL warns that its own way to widen a float16 VAE will go."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _there_and_back(family: str, asked: dict[str, Any]) -> tuple[list[str], bool]:
    """What differs after applying, generating and undoing, and whether the next image is bit for bit the first."""
    pipeline, first = warm_pipeline(family), first_image(family)
    tool = optimizer(**asked)
    plan = tool.plan(pipeline)
    assert plan.choices
    before = deep_snapshot(pipeline)
    tool.apply(pipeline, plan)
    with diffusers_warnings_allowed():
        generate(pipeline, family)
    changed = tool.undo()
    assert changed == []
    return differences(before, deep_snapshot(pipeline)), torch.equal(generate(pipeline, family), first)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), OFFERED)
def test_one_choice_is_undone_exactly(family: str, name: str) -> None:
    assert _there_and_back(family, ALONE[name]) == ([], True)


@pytest.mark.slow
@MOST_FAMILIES_SLOWLY
def test_all_choices_together_are_undone_exactly(family: str) -> None:
    assert _there_and_back(family, TOGETHER) == ([], True)


@EVERY_FAMILY
@pytest.mark.slow
def test_a_pipeline_that_never_ran_is_as_it_was_after_undo(family: str) -> None:
    pipeline = make_pipeline(family)
    before = deep_snapshot(pipeline)
    tool = optimizer(**TOGETHER)
    tool.apply(pipeline)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []


@MOST_FAMILIES_SLOWLY
def test_a_choice_does_change_the_pipeline(family: str) -> None:
    pipeline = warm_pipeline(family)
    before = deep_snapshot(pipeline)
    with optimizer(dtype="bfloat16").applied(pipeline):
        assert differences(before, deep_snapshot(pipeline))


@pytest.mark.parametrize(
    "name", ["bfloat16", "layerwise_casting", "model_offload", "first_block_cache", "compile"]
)
def test_a_second_apply_changes_nothing_and_one_undo_gives_the_original_back(name: str) -> None:
    pipeline = warm_pipeline("flux")
    before = deep_snapshot(pipeline)
    tool = optimizer(**ALONE[name])
    plan = tool.apply(pipeline)
    applied = deep_snapshot(pipeline)
    assert tool.apply(pipeline) == tool.apply(pipeline, plan) == plan
    with tool.applied(pipeline):
        assert differences(applied, deep_snapshot(pipeline)) == []
    assert differences(applied, deep_snapshot(pipeline)) == []
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []
    with pytest.raises(OptimizationError, match="nothing to undo"):
        tool.undo()


def test_a_plan_of_which_a_part_is_in_force_adds_the_rest() -> None:
    pipeline = warm_pipeline("sd15")
    before = deep_snapshot(pipeline)
    tool = optimizer(vae_slicing=True, vae_tiling=True)
    plan = tool.plan(pipeline)
    tool.apply(pipeline, plan.without(["vae_tiling"]))
    tool.apply(pipeline, plan)
    tool.undo()
    assert (pipeline.vae.use_slicing, pipeline.vae.use_tiling) == (True, False)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []


def test_a_part_that_was_replaced_is_done_too() -> None:
    pipeline, other = make_pipeline("sd15"), make_pipeline("sd15")
    tool = optimizer(vae_slicing=True)
    tool.apply(pipeline)
    pipeline.vae = other.vae
    tool.apply(pipeline)
    assert pipeline.vae.use_slicing


def test_undo_takes_the_last_plan_first() -> None:
    pipeline = warm_pipeline("sd15")
    before = deep_snapshot(pipeline)
    tool = optimizer()
    first, second = optimizer(vae_slicing=True).plan(pipeline), optimizer(vae_tiling=True).plan(pipeline)
    tool.apply(pipeline, first)
    tool.apply(pipeline, second)
    tool.undo()
    assert (pipeline.vae.use_slicing, pipeline.vae.use_tiling) == (True, False)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []
