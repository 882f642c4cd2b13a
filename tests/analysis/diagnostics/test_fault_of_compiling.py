"""A first step that truly compiles, on the machine's own clock."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline

import sigmascope
from sigmascope.records.run import Finding

RULE = "time.first_step_compiles"


@pytest.fixture
def pipeline() -> Iterator[Any]:
    pipeline = make_pipeline("sd15")
    generate(pipeline, "sd15", num_inference_steps=1)
    torch._dynamo.reset()  # what other tests compiled may fit this model as well
    yield pipeline
    torch._dynamo.reset()


def _findings(pipeline: Any) -> dict[str, Finding]:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=4)
    return {finding.id: finding for finding in run.findings}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_a_first_step_that_compiles_is_told_once(pipeline: Any) -> None:
    assert RULE not in _findings(pipeline)
    pipeline.unet.compile(backend="eager")  # traced by Dynamo, which takes seconds, and run as it is
    finding = _findings(pipeline)[RULE]
    assert finding.evidence["compiled"] is True
    assert "torch.compile compiles in it" in finding.message
    assert RULE not in _findings(pipeline)
