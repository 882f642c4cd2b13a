"""Two sets of runs in one answer: the median generation of each, before beside after (SPEC section 6)."""

from collections.abc import Sequence
from statistics import median_low
from typing import Any

from sigmascope.analysis.compare import compare_metrics
from sigmascope.records.performance import BeforeAfterDict, PerformanceMetrics
from sigmascope.records.run import Run
from sigmascope.records.stage_seconds import is_duration


def before_after(new: Sequence[Run], baseline: Sequence[Run]) -> BeforeAfterDict | None:
    """The generation of median length on each side; None where one side holds no generation of a monitor's.

    Args:
        new: Any number of runs.
        baseline: Any number of runs.
    """
    before, after = _median_generation(baseline), _median_generation(new)
    return None if before is None or after is None else compare_metrics(before, after)


def _median_generation(runs: Sequence[Run]) -> PerformanceMetrics | None:
    """The metrics of the generation whose total is the median, or the lower of the two in the middle."""
    found = [metrics for run in runs for metrics in _generations(run)]
    if not found:
        return None
    middle = median_low(one["total_generation_time"] for one in found)
    return PerformanceMetrics.from_dict(next(one for one in found if one["total_generation_time"] == middle))


def _generations(run: Run) -> list[dict[str, Any]]:
    """What a monitor noted of each generation that went to its end."""
    noted = [stage.facts.get("performance") for stage in run.walk() if stage.success]
    return [one for one in noted if isinstance(one, dict) and is_duration(one.get("total_generation_time"))]
