"""A small pipeline and what it makes when nobody watches."""

import copy
from typing import Any

import pytest
from tests.families import generate, make_pipeline
from torch import Tensor


@pytest.fixture(scope="session")
def unwatched() -> Tensor:
    """What SD1.5 makes in two steps of seed 0."""
    return generate(make_pipeline("sd15"), "sd15")


@pytest.fixture(scope="session")
def _warm() -> Any:
    pipeline = make_pipeline("sd15")
    generate(pipeline, "sd15", num_inference_steps=1)
    return pipeline


@pytest.fixture
def pipeline(_warm: Any) -> Any:
    """SD1.5, of this test alone, after a first call, with which a pipeline notes down things of its own."""
    return copy.deepcopy(_warm)
