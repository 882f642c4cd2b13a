"""What the tests of `PipelineOptimizer.measure` share: calls of real pipelines, on a clock that the test turns."""

from collections.abc import Callable
from typing import Any

import torch
from tests.families import generate
from tests.pipeline.optimized import dtypes_of, optimizer

from sigmascope.pipeline.optimizer import Measurement

MS = 1_000_000
OPTIONS = ("keep", "min_psnr", "least_gain", "repeats", "warmup")


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


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
    options = {name: asked.pop(name) for name in OPTIONS if name in asked}
    return optimizer(**asked).measure(pipeline, call, **options)
