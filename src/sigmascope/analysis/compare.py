"""One generation before a change beside one after it (SPEC section 6)."""

from typing import Final, TypeGuard

from sigmascope.records.performance import (
    BeforeAfterDict,
    ComparedGenerationDict,
    ComparisonSummaryDict,
    ImprovementDict,
    PerformanceMetrics,
)
from sigmascope.records.stage_seconds import is_duration

SIGNIFICANT_PERCENT: Final = 50.0
"""An improvement of the total time above this is called significant."""


def compare_metrics(before: PerformanceMetrics, after: PerformanceMetrics) -> BeforeAfterDict:
    """What changed from one generation to another, positive where it became faster.

    Args:
        before: The generation before the change.
        after: The one after it.
    """
    improvement: ImprovementDict = {
        "total_time_percent": improvement_percent(before.total_generation_time, after.total_generation_time),
        "per_step_time_percent": improvement_percent(
            before.generation_time_per_step, after.generation_time_per_step
        ),
        "performance_score_change": _difference(before.performance_score, after.performance_score),
        "target_status_change": f"{before.target_met} → {after.target_met}",
    }
    return {
        "before": _side(before),
        "after": _side(after),
        "improvement": improvement,
        "summary": _summary(improvement["total_time_percent"], before, after),
    }


def improvement_percent(before: float | None, after: float | None) -> float | None:
    """(before − after) / before in per cent; None when a side is not known or there was nothing before."""
    if not _is_known(before) or after is None or not is_duration(after):
        return None
    return (before - after) / before * 100


def improvement_factor(before: float | None, after: float | None) -> float | None:
    """Before / after; None when a side is not known or zero."""
    if not _is_known(before) or not _is_known(after):
        return None
    return before / after


def _is_known(seconds: float | None) -> TypeGuard[float]:
    """Whether there is a time, and one to reckon with."""
    return seconds is not None and seconds != 0 and is_duration(seconds)


def _side(metrics: PerformanceMetrics) -> ComparedGenerationDict:
    return {
        "total_time": metrics.total_generation_time,
        "per_step_time": metrics.generation_time_per_step,
        "target_met": metrics.target_met,
        "performance_score": metrics.performance_score,
        "model": metrics.model_name,
    }


def _summary(
    percent: float | None, before: PerformanceMetrics, after: PerformanceMetrics
) -> ComparisonSummaryDict:
    return {
        "faster": None if percent is None else percent > 0,
        "improvement_factor": improvement_factor(before.total_generation_time, after.total_generation_time),
        "meets_target_now": after.target_met,
        "significant_improvement": None if percent is None else percent > SIGNIFICANT_PERCENT,
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
