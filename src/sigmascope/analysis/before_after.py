"""Two sets of runs in one answer: the median generation of each, before beside after (SPEC section 6)."""

from collections.abc import Iterator, Sequence
from statistics import median_low

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
    found = [(seconds, metrics) for run in runs for seconds, metrics in _generations(run)]
    if not found:
        return None
    middle = median_low(seconds for seconds, _ in found)
    return next(metrics for seconds, metrics in found if seconds == middle)


def _generations(run: Run) -> Iterator[tuple[float, PerformanceMetrics]]:
    """What a monitor noted of each generation that went to its end, with its total; what nobody noted so is left out."""
    for stage in run.walk():
        noted = stage.facts.get("performance")
        if not stage.success or not isinstance(noted, dict):
            continue
        try:
            metrics = PerformanceMetrics.from_dict(noted)
        except ValueError:
            continue
        total = metrics.total_generation_time
        if "total_generation_time" in noted and total is not None and is_duration(total):
            yield total, metrics
