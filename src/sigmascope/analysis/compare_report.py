"""All that is to be said of two sets of runs, work by work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigmascope.analysis.before_after import before_after
from sigmascope.analysis.compare_runs import FigureComparison, compare_run_sets
from sigmascope.analysis.compare_steps import compare_by_step, compare_pooled_steps
from sigmascope.analysis.run_differences import set_up_differences
from sigmascope.records.performance import BeforeAfterDict
from sigmascope.records.run import Run

_FEWEST_RUNS = 3


@dataclass(frozen=True, slots=True)
class WorkComparison:
    """Runs of the same work before and after a change.

    Attributes:
        work: The benchmark's case; empty for other runs.
        runs: How many there are on each side, baseline first.
        differences: What differs in the set-up, as (before, now).
        figures: Stages, steps and peaks, one value a run.
        pooled_steps: Steps taken together, where a side has too few runs for an interval.
        steps: Each step by its number, if that was asked for.
        missing: Figures that one side lacks, with the reason.
        before_after: The median generations; None without them.
    """

    work: str
    runs: tuple[int, int]
    differences: dict[str, tuple[str, str]]
    figures: tuple[FigureComparison, ...]
    pooled_steps: tuple[FigureComparison, ...]
    steps: tuple[FigureComparison, ...]
    missing: dict[str, str]
    before_after: BeforeAfterDict | None

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "work": self.work,
            "runs": list(self.runs),
            "differences": {name: list(sides) for name, sides in self.differences.items()},
            "figures": [one.as_dict() for one in self.figures],
            "pooled_steps": [one.as_dict() for one in self.pooled_steps],
            "steps": [one.as_dict() for one in self.steps],
            "missing": dict(self.missing),
            "before_after": self.before_after,
        }


def compare_work(
    work: str, new: Sequence[Run], baseline: Sequence[Run], *, by_step: bool = False, seed: int = 0
) -> WorkComparison:
    """Compare runs with the baseline's runs of the same work.

    Args:
        work: Its name.
        new: At least one run.
        baseline: At least one run.
        by_step: Also each step by its number.
        seed: Of the resampling.
    """
    figures, missing = compare_run_sets(new, baseline, seed=seed)
    too_few = min(len(new), len(baseline)) < _FEWEST_RUNS
    return WorkComparison(
        work,
        (len(baseline), len(new)),
        set_up_differences(new, baseline),
        figures,
        compare_pooled_steps(new, baseline, seed=seed) if too_few else (),
        compare_by_step(new, baseline, seed=seed) if by_step else (),
        missing,
        before_after(new, baseline),
    )
