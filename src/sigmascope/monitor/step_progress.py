"""Where a running generation is, for displays and warnings."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Where a running generation is at the end of a step. Times are seconds.

    Attributes:
        step: Steps done.
        steps: Steps that are planned; 0: not known, and then `projected_seconds` is the time elapsed.
        projected_seconds: Elapsed + mean of the last steps · steps left.
        misses_target: Whether that is above the target.
    """

    step: int
    steps: int
    step_seconds: float
    elapsed_seconds: float
    projected_seconds: float
    target_seconds: float
    misses_target: bool


Listener = Callable[[StepProgress], None]
