"""Two sets of runs of the same work: ratios of medians, intervals, tests, and what regressed.

Runs are sorted by the work that they did, since a run of 512×512 says nothing about one of 1024×1024
(`pairs_by_work`). Steps can be compared too: all of a stage together, or each by its number.

The interval and the test are those of `two_samples`.

A figure has regressed if its values are higher than the baseline's beyond what chance explains (Mann-Whitney,
one-sided) and its median is higher by more than what is allowed. Either alone cries wolf: a test alone finds
differences of 0.1 % once there are enough runs, a threshold alone finds noise.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from sigmascope.analysis.generations import before_after
from sigmascope.analysis.recipe import WhatChanged, what_changed
from sigmascope.analysis.run_figures import (
    Figure,
    Unit,
    figures_of,
    timed_on_device,
    timed_steps,
    warm,
)
from sigmascope.analysis.two_samples import p_of_higher, ratio_interval
from sigmascope.errors import ConfigError, RecordError
from sigmascope.records.performance import BeforeAfterDict, work_of
from sigmascope.records.recorded import Recorded, runs_of
from sigmascope.records.run import Run

_FEWEST_RUNS_WITHOUT_POOLING = 3
CONFIDENCE: Final = 0.95
_FEWEST_RUNS_FOR_INTERVAL: Final = 3
_MOST_COUNTED_AS_0: Final = 1e-12
"""A shorter time is below any clock's resolution, and dividing by it may give infinity."""
_LEAST_CHANGE: Final = 0.01
_LEAST_CHANGE_OF_FEW_RUNS: Final = 0.1
Verdict = Literal["regressed", "higher", "same", "lower", "undecided"]
MAX_SLOWDOWN: Final = 0.03
MAX_GROWTH: Final = 0.03
ALPHA: Final = 0.01


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
        unavailable: What could not be calculated, and why; "runs": how many are left out.
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

    @property
    def has_changed(self) -> bool:
        """Whether `compare` shows the figure: it differs by more than noise, as far as so few runs can tell.

        From three runs a side there is a 95 % interval of the ratio (`compare_values`): 1 is outside of it, and the change
        above 1 %. Of fewer runs, seconds differ by more than 10 %, other figures by 1 %. `check` decides in `_judge`.
        """
        if self.ratio is None:
            return self.baseline != self.new
        change = abs(self.ratio - 1)
        if self.lower is not None and self.upper is not None:
            return not self.lower <= 1 <= self.upper and change > _LEAST_CHANGE
        return change > (_LEAST_CHANGE_OF_FEW_RUNS if self.unit == "seconds" else _LEAST_CHANGE)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"runs": list(self.runs)}


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
    work: str, new: Sequence[Run], baseline: Sequence[Run], *, by_step: bool = False, seed: int = 0
) -> WorkComparison:
    """Compare runs with the baseline's runs of the same work."""
    figures, missing = compare_run_sets(new, baseline, seed=seed)
    too_few = min(len(new), len(baseline)) < _FEWEST_RUNS_WITHOUT_POOLING
    return WorkComparison(
        work,
        (len(baseline), len(new)),
        what_changed(new, baseline),
        figures,
        compare_pooled_steps(new, baseline, seed=seed) if too_few else (),
        compare_by_step(new, baseline, seed=seed) if by_step else (),
        missing,
        before_after(new, baseline),
        (_folded_generations(baseline), _folded_generations(new)),
    )


def _folded_generations(runs: Sequence[Run]) -> int:
    return sum(run.folded.generations for run in runs if run.folded is not None)


def compare_run_sets(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[tuple[FigureComparison, ...], dict[str, str]]:
    """Compare every figure that both sides have.

    Returns:
        The comparisons, in the order of the baseline's figures; and by name the figures that one side lacks, with the
        reason.
    """
    on_device = timed_on_device(new, baseline)
    ours, theirs = figures_of(new, on_device), figures_of(baseline, on_device)
    compared = tuple(
        _compare_figures(ours[name], figure, seed) for name, figure in theirs.items() if name in ours
    )
    missing = {name: "not in the new runs" for name in theirs if name not in ours}
    missing |= {name: "not in the baseline" for name in ours if name not in theirs}
    return compared, missing


def _compare_figures(new: Figure, baseline: Figure, seed: int) -> FigureComparison:
    comparison = compare_values(baseline.name, baseline.unit, new.values, baseline.values, seed=seed)
    left_out = [
        f"{side.untimed} of {side.untimed + len(side.values)} {name} runs"
        for side, name in ((baseline, "baseline"), (new, "new"))
        if side.untimed
    ]
    if not left_out:
        return comparison
    reason = f"{' and '.join(left_out)} left out, because the accelerator did not time them"
    return replace(comparison, unavailable={**comparison.unavailable, "runs": reason})


def compare_values(
    name: str, unit: Unit, new: Sequence[float], baseline: Sequence[float], *, seed: int = 0
) -> FigureComparison:
    """Compare two samples of one figure."""
    old_median, new_median = median(baseline), median(new)
    ratio = new_median / old_median if old_median > _MOST_COUNTED_AS_0 else None
    unavailable: dict[str, str] = {}
    interval: tuple[float, float] | None = None
    if ratio is None:
        unavailable["ratio"] = "the baseline's median is 0"
    elif min(len(new), len(baseline)) < _FEWEST_RUNS_FOR_INTERVAL:
        unavailable["interval"] = f"it takes {_FEWEST_RUNS_FOR_INTERVAL} runs on each side"
    elif min(baseline) <= _MOST_COUNTED_AS_0:
        unavailable["interval"] = "some of the baseline's values are 0"
    else:
        interval = ratio_interval(new, baseline, confidence=CONFIDENCE, seed=seed)
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


def compare_pooled_steps(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[FigureComparison, ...]:
    """All steps of each stage but every run's first, as one sample a side.

    For too few runs to compare run by run. The intervals then hold for these very runs only: the steps of a run share
    its circumstances, so another run may lie outside.
    """
    on_device = timed_on_device(new, baseline)
    ours, theirs = _steps_by_stage(new, on_device), _steps_by_stage(baseline, on_device)
    return tuple(
        compare_values(f"{name} step", "seconds", ours[name], values, seed=seed)
        for name, values in theirs.items()
        if name in ours
    )


def _steps_by_stage(runs: Sequence[Run], on_device: Collection[str]) -> Mapping[str, list[float]]:
    by_stage: dict[str, list[float]] = {}
    for run in runs:
        for stage in run.walk():
            seconds = warm(timed_steps(stage, on_device))
            if seconds:
                by_stage.setdefault(stage.name, []).extend(seconds)
    return by_stage


def compare_by_step(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[FigureComparison, ...]:
    """Each step of each stage by its number, with one value for each run; steps that one side lacks are left out."""
    on_device = timed_on_device(new, baseline)
    ours, theirs = _steps_by_number(new, on_device), _steps_by_number(baseline, on_device)
    return tuple(
        compare_values(f"{name} step {number}", "seconds", ours[name, number], values, seed=seed)
        for (name, number), values in theirs.items()
        if (name, number) in ours
    )


def _steps_by_number(
    runs: Sequence[Run], on_device: Collection[str]
) -> Mapping[tuple[str, int], list[float]]:
    """By stage and number from 1 on, each run's seconds; a stage passed twice counts on."""
    by_number: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        passed: dict[str, int] = {}
        for stage in run.walk():
            for seconds in timed_steps(stage, on_device):
                number = passed[stage.name] = passed.get(stage.name, 0) + 1
                if seconds is not None:
                    by_number.setdefault((stage.name, number), []).append(seconds)
    return by_number


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure and the verdict on it.

    Attributes:
        comparison: The two samples.
        verdict: "regressed": by more than allowed and not by chance; "higher": not by chance, but by no more than
            allowed; "undecided": by more than allowed, but there are too few runs, or too much noise, to tell it from
            chance; "lower": the interval of the ratio lies below 1; "same": none of these.
        why: The verdict in words.
    """

    comparison: FigureComparison
    verdict: Verdict
    why: str

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**self.comparison.as_dict(), "verdict": self.verdict, "why": self.why}


@dataclass(frozen=True, slots=True)
class RegressionCheck:
    """What a check found.

    Attributes:
        figures: In the order of the baseline's.
        missing: Figures that one side lacks, with the reason.
    """

    figures: tuple[CheckedFigure, ...]
    missing: dict[str, str]

    @property
    def regressed(self) -> tuple[CheckedFigure, ...]:
        """The figures that got worse."""
        return tuple(figure for figure in self.figures if figure.verdict == "regressed")

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "regressed": [figure.comparison.name for figure in self.regressed],
            "figures": [figure.as_dict() for figure in self.figures],
            "missing": dict(self.missing),
        }


def check_regression(
    new: Recorded | Iterable[Recorded],
    baseline: Recorded | Iterable[Recorded],
    *,
    max_slowdown: float = MAX_SLOWDOWN,
    max_growth: float = MAX_GROWTH,
    alpha: float = ALPHA,
) -> RegressionCheck:
    """Check runs against earlier runs of the same work.

    Args:
        new: At least one run, or what has one, such as a `Watch`.
        baseline: The same.
        max_slowdown: How much longer a time may be, as a fraction: 0.05 is 5 %.
        max_growth: The same for peaks of memory.
        alpha: How likely a difference by chance may be, for each figure.

    Raises:
        ConfigError: No runs on one side, nothing in them that could be compared, or a limit out of range.
    """
    new, baseline = runs_of(new), runs_of(baseline)
    _require(new, baseline, max_slowdown, max_growth, alpha)
    compared, missing = compare_run_sets(new, baseline)
    if not compared:
        raise ConfigError(
            "The runs and the baseline have no stage, step or peak in common.",
            hint="Check runs of the same pipeline.",
        )
    allowed = {"seconds": max_slowdown, "bytes": max_growth}
    figures = tuple(_judge(comparison, allowed[comparison.unit], alpha) for comparison in compared)
    return RegressionCheck(figures, missing)


def _require(
    new: Sequence[Run], baseline: Sequence[Run], max_slowdown: float, max_growth: float, alpha: float
) -> None:
    if not new or not baseline:
        raise ConfigError(
            "There are no runs to check." if not new else "There is no run in the baseline.",
            hint="Give saved runs: sigmascope check new/*.json --baseline old/*.json",
        )
    for name, limit in (("--max_slowdown", max_slowdown), ("--max_growth", max_growth)):
        if not limit >= 0:
            raise ConfigError(f"{name} is {limit}.", hint="Give 0 or more, such as 5%.")
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha is {alpha}.", hint="Give a probability between 0 and 1, such as 0.01.")


def _judge(comparison: FigureComparison, allowed: float, alpha: float) -> CheckedFigure:
    growth = None if comparison.ratio is None else comparison.ratio - 1
    is_higher = comparison.p_slower < alpha
    if growth is None:
        return CheckedFigure(comparison, "undecided", comparison.unavailable["ratio"])
    if growth > allowed:
        if is_higher:
            why = f"{growth:+.1%}, more than the {allowed:.1%} allowed (p = {comparison.p_slower:.2g})"
            return CheckedFigure(comparison, "regressed", why)
        if comparison.least_p >= alpha:
            return CheckedFigure(comparison, "undecided", f"{growth:+.1%}, but {_too_few(comparison, alpha)}")
        why = f"{growth:+.1%}, but within the noise of the runs (p = {comparison.p_slower:.2g})"
        return CheckedFigure(comparison, "undecided", why)
    if is_higher and growth > 0:
        return CheckedFigure(comparison, "higher", f"{growth:+.1%}, no more than the {allowed:.1%} allowed")
    if comparison.upper is not None and comparison.upper < 1:
        return CheckedFigure(comparison, "lower", f"{growth:+.1%}")
    return CheckedFigure(comparison, "same", f"{growth:+.1%}")


def _too_few(comparison: FigureComparison, alpha: float) -> str:
    before, after = comparison.runs
    return f"{before} and {after} runs cannot give p < {alpha:g} (at best {comparison.least_p:.2g})"


def pairs_by_work(
    new: Sequence[Run], baseline: Sequence[Run]
) -> tuple[dict[str, tuple[list[Run], list[Run]]], dict[str, str]]:
    """New runs beside the baseline's runs of the same work.

    Runs that broke off are left out: the work that they did not do would count as time saved.

    Returns:
        By work, the runs of both sides (new first); and by name the work that one side lacks, with the reason, and how
        many runs were left out.
    """
    ours, theirs = by_work(_complete_runs(new)), by_work(_complete_runs(baseline))
    pairs = {work: (ours[work], runs) for work, runs in theirs.items() if work in ours}
    missing = {work: "not in the new runs" for work in theirs if work not in ours}
    missing |= {work: "not in the baseline" for work in ours if work not in theirs}
    return pairs, missing | _left_out("new runs", new) | _left_out("baseline runs", baseline)


def _complete_runs(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.complete]


def _left_out(name: str, runs: Sequence[Run]) -> dict[str, str]:
    count = len(runs) - len(_complete_runs(runs))
    return {name: f"{count} of {len(runs)} broke off and were left out"} if count else {}


def require_pairs(
    new: Sequence[Run], baseline: Sequence[Run], *, named: Path
) -> tuple[dict[str, tuple[list[Run], list[Run]]], dict[str, str]]:
    """`pairs_by_work`, when there must be something to compare.

    Raises:
        RecordError: The two sides have no work in common.
    """
    pairs, missing = pairs_by_work(new, baseline)
    if not pairs:
        reasons = "; ".join(f"{work or 'runs outside a benchmark'}: {why}" for work, why in missing.items())
        raise RecordError(
            named,
            f"has nothing in common with the baseline ({reasons}).",
            hint="Compare whole runs of the same cases.",
        )
    return pairs, missing


def by_work(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by the case of the benchmark that made them, in the order of the first of each; "" for all others."""
    by_case: dict[str, list[Run]] = {}
    for run in runs:
        by_case.setdefault(work_of(run.facts), []).append(run)
    return by_case
