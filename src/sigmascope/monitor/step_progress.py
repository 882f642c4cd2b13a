"""Where a running generation is, for displays and warnings."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


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


@dataclass(slots=True)
class StepListeners:
    """Who is told of a monitor's steps.

    Attributes:
        on_step: Called after each.
        on_warning: Called as soon as a generation heads beyond its target; None: that is logged.
        seconds: Takes the length of each.
    """

    on_step: Listener | None = None
    on_warning: Listener | None = None
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1))

    def warn(self, progress: StepProgress) -> None:
        """Say that a generation heads beyond its target."""
        if self.on_warning is not None:
            self.on_warning(progress)
            return
        _log.warning(
            "At step %d of %d the generation heads for %.2f s, above its target of %.2f s.",
            progress.step, progress.steps, progress.projected_seconds, progress.target_seconds,
        )  # fmt: skip
