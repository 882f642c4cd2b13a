"""Two sets of runs of the same work: ratios of medians with confidence intervals, and tests.

The interval is the percentile bootstrap's (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, ch. 13), the
test that of Mann and Whitney (Annals of Mathematical Statistics 18, 1947), one-sided; both are SciPy's.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sigmascope.analysis.run_figures import Figure, Unit, figures_of, timed_on_device
from sigmascope.records.run import Run

CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 4_999
_FEWEST_FOR_AN_INTERVAL: Final = 3
_NOTHING: Final = 1e-12
"""Nobody's clock tells so few seconds from 0, and what is divided by less may be infinite."""


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure of the new runs beside that of the baseline.

    Attributes:
        name: Of the figure.
        unit: Of the medians.
        baseline: Median.
        new: Median.
        ratio: new / baseline; None: the baseline's is 0.
        lower: Lower bound of the ratio's confidence interval.
        upper: Upper bound.
        p_slower: How likely values this much higher are if nothing changed.
        least_p: The smallest p that so few runs can give.
        runs: How many values each side has, baseline first.
        unavailable: What could not be reckoned, and why; "runs": how many are left out.
    """

    name: str
    unit: Unit
    baseline: float
    new: float
    ratio: float | None
    lower: float | None
    upper: float | None
    p_slower: float
    least_p: float
    runs: tuple[int, int]
    unavailable: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"runs": list(self.runs)}


def compare_run_sets(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[tuple[FigureComparison, ...], dict[str, str]]:
    """Compare every figure that both sides have.

    Args:
        new: At least one run.
        baseline: At least one run of the same work before the change.
        seed: Of the resampling.

    Returns:
        The comparisons, in the order of the baseline's figures; and by name the figures that one side lacks, with the
        reason.
    """
    on_device = timed_on_device(new, baseline)
    ours, theirs = figures_of(new, on_device), figures_of(baseline, on_device)
    compared = tuple(_compare(ours[name], figure, seed) for name, figure in theirs.items() if name in ours)
    missing = {name: "not in the new runs" for name in theirs if name not in ours}
    missing |= {name: "not in the baseline" for name in ours if name not in theirs}
    return compared, missing


def _compare(new: Figure, baseline: Figure, seed: int) -> FigureComparison:
    found = compare_values(baseline.name, baseline.unit, new.values, baseline.values, seed=seed)
    sides = [
        f"{side.untimed} of {side.untimed + len(side.values)} {name} runs"
        for side, name in ((baseline, "baseline"), (new, "new"))
        if side.untimed
    ]
    if not sides:
        return found
    reason = f"{' and '.join(sides)} left out: the accelerator's clock did not time it there"
    return replace(found, unavailable={**found.unavailable, "runs": reason})


def compare_values(
    name: str, unit: Unit, new: Sequence[float], baseline: Sequence[float], *, seed: int = 0
) -> FigureComparison:
    """Compare two samples of one figure.

    Args:
        name: Of the figure.
        unit: Of the values.
        new: One value a run, at least one.
        baseline: The same before the change.
        seed: Of the resampling.
    """
    old_median, new_median = median(baseline), median(new)
    ratio = new_median / old_median if old_median > _NOTHING else None
    unavailable: dict[str, str] = {}
    interval: tuple[float, float] | None = None
    if ratio is None:
        unavailable["ratio"] = "the baseline's median is 0"
    elif min(len(new), len(baseline)) < _FEWEST_FOR_AN_INTERVAL:
        unavailable["interval"] = f"it takes {_FEWEST_FOR_AN_INTERVAL} runs on each side"
    elif min(baseline) <= _NOTHING:
        unavailable["interval"] = "some of the baseline's values are 0"
    else:
        interval = _interval(new, baseline, seed)
    return FigureComparison(
        name,
        unit,
        old_median,
        new_median,
        ratio,
        None if interval is None else interval[0],
        None if interval is None else interval[1],
        p_of_higher(new, baseline),
        1 / math.comb(len(new) + len(baseline), len(new)),
        (len(baseline), len(new)),
        unavailable,
    )


def p_of_higher(new: Sequence[float], baseline: Sequence[float]) -> float:
    """The p of Mann and Whitney's test that the new values are not higher; exact for small samples without ties.

    Args:
        new: At least one value.
        baseline: At least one value.
    """
    from scipy.stats import mannwhitneyu

    if len({*new, *baseline}) == 1:
        return 1.0
    return float(mannwhitneyu(new, baseline, alternative="greater").pvalue)


def _interval(new: Sequence[float], baseline: Sequence[float], seed: int) -> tuple[float, float]:
    from scipy.stats import bootstrap

    def ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(np.median(ours, axis=axis) / np.median(theirs, axis=axis))

    found = bootstrap(
        (np.asarray(new, dtype=np.float64), np.asarray(baseline, dtype=np.float64)),
        ratio,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
