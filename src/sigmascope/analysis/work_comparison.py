"""Runs of the same work before and after a change: what changed and why, and every figure that can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sigmascope.analysis.generations import before_after
from sigmascope.analysis.run_comparison import (
    USUAL,
    FigureComparison,
    Limits,
    compare_by_step,
    compare_pooled_steps,
    compare_run_sets,
)
from sigmascope.analysis.what_changed import WhatChanged, what_changed
from sigmascope.records.performance import BeforeAfterDict
from sigmascope.records.run import Run

_FEWEST_RUNS_WITHOUT_POOLING: Final = 3


@dataclass(frozen=True, slots=True)
class WorkComparison:
    """Runs of the same work before and after a change.

    Attributes:
        work: The benchmark's case; empty for other runs.
        runs: How many there are on each side, baseline first.
        changed: What differs in recipe, times and outputs, and what explains it.
        figures: Stages, steps and peaks, one value a run.
        pooled_steps: Steps taken together, where a side has too few runs for an interval.
        steps: Each step by its number, if that was asked for.
        missing: Figures that one side lacks, with the reason.
        before_after: The median generations; None without them.
        folded: How many generations of each side are in sums alone, and have no steps here; baseline first.
    """

    work: str
    runs: tuple[int, int]
    changed: WhatChanged
    figures: tuple[FigureComparison, ...]
    pooled_steps: tuple[FigureComparison, ...]
    steps: tuple[FigureComparison, ...]
    missing: dict[str, str]
    before_after: BeforeAfterDict | None
    folded: tuple[int, int] = (0, 0)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "work": self.work,
            "runs": list(self.runs),
            "headline": self.changed.headline,
            "differences": {name: list(sides) for name, sides in self.changed.recipe.items()},
            "changed": self.changed.as_dict(),
            "figures": [figure.as_dict() for figure in self.figures],
            "pooled_steps": [figure.as_dict() for figure in self.pooled_steps],
            "steps": [figure.as_dict() for figure in self.steps],
            "missing": dict(self.missing),
            "before_after": self.before_after,
            **({"folded": list(self.folded)} if any(self.folded) else {}),
        }


def compare_work(
    work: str,
    new: Sequence[Run],
    baseline: Sequence[Run],
    *,
    by_step: bool = False,
    seed: int = 0,
    limits: Limits = USUAL,
) -> WorkComparison:
    """Compare runs with the baseline's runs of the same work."""
    figures, missing = compare_run_sets(new, baseline, seed=seed, limits=limits)
    too_few = min(len(new), len(baseline)) < _FEWEST_RUNS_WITHOUT_POOLING
    return WorkComparison(
        work,
        (len(baseline), len(new)),
        what_changed(new, baseline, limits=limits),
        figures,
        compare_pooled_steps(new, baseline, seed=seed, limits=limits) if too_few else (),
        compare_by_step(new, baseline, seed=seed, limits=limits) if by_step else (),
        missing,
        before_after(new, baseline),
        (_folded_generations(baseline), _folded_generations(new)),
    )


def _folded_generations(runs: Sequence[Run]) -> int:
    return sum(run.folded.generations for run in runs if run.folded is not None)
