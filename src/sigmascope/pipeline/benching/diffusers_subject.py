"""A diffusers pipeline as the subject of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.pipeline.benching.call import (
    CALLBACK,
    call_arguments,
    check_call,
    parameters_of,
    what_was_made,
)
from sigmascope.pipeline.benching.pipeline_stages import PipelineStages
from sigmascope.pipeline.benching.waiting import waiter
from sigmascope.records.benchmark import BenchCase, Made

PROMPT = "a red fox jumps over a lazy dog, morning light, sharp photograph"


@dataclass(frozen=True)
class DiffusersSubject:
    """A pipeline that was loaded, or built.

    Attributes:
        name: What it is called in records and tables.
        pipeline: Callable as diffusers' are.
        device: Where it runs.
        prompt: What it is asked for.
        arguments: Of its call, besides what a case says.
    """

    name: str
    pipeline: Any
    device: torch.device
    prompt: str = PROMPT
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> object:
        """The pipeline."""
        return self.pipeline

    def check(self, case: BenchCase) -> None:
        """Refuse what the pipeline's call does not take.

        Raises:
            ConfigError: Names the setting, and what the call takes.
        """
        check_call(self.pipeline, case, self.arguments)

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Call the pipeline once, its parts as stages, and wait for the result."""
        wait = waiter(self.device)
        arguments = call_arguments(self.pipeline, case, self.prompt, seed, self.arguments)
        has_callback = CALLBACK in parameters_of(self.pipeline) and CALLBACK not in arguments
        stages = PipelineStages(self.pipeline, monitor, wait, calls_are_steps=not has_callback)
        if has_callback:
            arguments[CALLBACK] = stages.on_step_end
        with stages:
            output = self.pipeline(**arguments)
        wait()
        return what_was_made(output)
