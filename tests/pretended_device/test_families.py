"""Every family of pipelines is watched, and every optimization applied and undone, on a device."""

from typing import Any

import pytest
import torch
from tests.conftest import Pretend
from tests.families import generate, make_pipeline
from tests.pipeline.optimized import ALONE
from tests.pretend_device import Kind
from torch import Tensor

from sigmascope import OptimizationConfig, PipelineOptimizer, watch

pytestmark = pytest.mark.slow

WAITS = {"probes/copies.py"}
"""Copies from Metal: PyTorch tells of no moment at which one is over."""
TRANSFORMERS_ALONE = {"attention", "first_block_cache", "pyramid_cache", "faster_cache", "taylorseer_cache"}


def made_by(pipeline: Any, family: str) -> Tensor:
    return generate(pipeline, family).cpu()


@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("family", ["sd15", "flux"])  # the others differ in shapes alone
def test_a_watched_pipeline_gives_the_same_bits_and_waits_for_nothing_else(
    pretend: Pretend, family: str, kind: Kind
) -> None:
    pipeline = make_pipeline(family)
    with pretend(kind) as device:
        pipeline.to(kind)
        plain = made_by(pipeline, family)
        device.waits.clear()
        device.uploads.clear()
        with watch(pipeline):
            seen = made_by(pipeline, family)
            ours = [*device.our_waits, *(upload for upload in device.uploads if upload.is_ours)]
        assert torch.equal(seen, plain)
        assert {wait.place.partition(":")[0] for wait in ours} <= WAITS


@pytest.mark.parametrize("kind", ["cuda"])
@pytest.mark.parametrize("name", [name for name in ALONE if name != "compile"])
def test_an_optimization_runs_and_is_undone_to_the_bit(pretend: Pretend, name: str, kind: Kind) -> None:
    family = "flux" if name in TRANSFORMERS_ALONE else "sd15"
    pipeline = make_pipeline(family)
    with pretend(kind):
        pipeline.to(kind)
        plain = made_by(pipeline, family)
        optimizer = PipelineOptimizer(OptimizationConfig(**ALONE[name], compile=False))
        plan = optimizer.apply(pipeline)
        assert plan.choices
        assert made_by(pipeline, family).isfinite().all()
        optimizer.undo(pipeline)
        assert torch.equal(made_by(pipeline, family), plain)
