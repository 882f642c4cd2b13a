"""Blocks that are compiled for real, by Inductor on the CPU."""

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.pipeline.deep_snapshot import deep_snapshot, differences
from tests.pipeline.optimized import optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of itself while Inductor is imported
def test_compiled_blocks_give_the_same_image_and_are_undone_exactly() -> None:
    pipeline = make_pipeline("flux")
    first = generate(pipeline, "flux")
    before = deep_snapshot(pipeline)
    tool = optimizer(compile=True)
    tool.apply(pipeline)
    torch.testing.assert_close(generate(pipeline, "flux"), first, atol=1e-4, rtol=0)
    tool.undo()
    assert differences(before, deep_snapshot(pipeline)) == []
    assert torch.equal(generate(pipeline, "flux"), first)
