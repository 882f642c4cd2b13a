"""What can be benchmarked: anything that makes pictures when it is told size, batch and steps."""

from typing import Protocol, runtime_checkable

import torch

from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.records.benchmark import BenchCase, Made


@runtime_checkable
class Subject(Protocol):
    """A loaded pipeline.

    Its generations must be the same work each time: the same case and seed, the same steps on the same shapes. Stages
    are those of the current recorder (`sigmascope.monitor.stage`); steps are timed by the monitor, or by
    `sigmascope.monitor.step`.
    """

    @property
    def name(self) -> str:
        """What it is called in records and tables."""
        ...

    @property
    def model(self) -> object:
        """The pipeline or denoiser, to read facts from."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def check(self, case: BenchCase) -> None:
        """Refuse a case that it cannot run, before anything is run.

        Raises:
            ConfigError: Says which setting, and what it takes.
        """
        ...

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Make one generation, and wait until it is there.

        Args:
            case: Size, batch and steps.
            seed: Of its noise.
            monitor: In whose generation this is called.
        """
        ...
