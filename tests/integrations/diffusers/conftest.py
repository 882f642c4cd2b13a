"""A small pipeline and what it makes when nobody watches."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.families import generate, make_pipeline
from tests.families.weights import copied
from torch import Tensor


@pytest.fixture(scope="session")
def unwatched() -> Tensor:
    """What SD1.5 makes in two steps of seed 0."""
    return generate(make_pipeline("sd15"), "sd15")


@pytest.fixture(scope="session")
def _copy_of_warm() -> Callable[[], Any]:
    @copied
    def warm() -> Any:
        pipeline = make_pipeline("sd15")
        generate(pipeline, "sd15", num_inference_steps=1)
        return pipeline

    return warm


@pytest.fixture
def pipeline(_copy_of_warm: Callable[[], Any]) -> Any:
    """SD1.5, of this test alone, after a first call, with which a pipeline notes down things of its own."""
    return _copy_of_warm()
