"""A generation against its target, and while it runs, where it will end (SPEC section 6)."""

import math
from typing import Final

FULL_SCORE: Final = 100.0


def performance_score(seconds: float | None, target_seconds: float) -> float | None:
    """min(100, 100 · target / time), to one decimal.

    Args:
        seconds: What the generation took; None: not known.
        target_seconds: What it may take.

    Returns:
        0-100; None when the time is not known. A time of 0 meets every target.

    Examples:
        >>> performance_score(16.0, 5.0), performance_score(2.4, 5.0)
        (31.2, 100.0)
    """
    if seconds is None or math.isnan(seconds):
        return None
    if seconds <= target_seconds:
        return FULL_SCORE
    return round(FULL_SCORE * target_seconds / seconds, 1)


def meets_target(seconds: float | None, target_seconds: float) -> bool | None:
    """Whether time ≤ target; None when the time is not known."""
    return None if seconds is None or math.isnan(seconds) else seconds <= target_seconds


def projected_seconds(elapsed_seconds: float, recent_step_seconds: float, steps_left: int) -> float:
    """Where a running generation will end: elapsed + mean of recent steps · steps left.

    Args:
        elapsed_seconds: Since the generation began.
        recent_step_seconds: Mean of the last few steps.
        steps_left: Not begun yet; fewer than 0 counts as 0.
    """
    return elapsed_seconds + recent_step_seconds * max(steps_left, 0)
