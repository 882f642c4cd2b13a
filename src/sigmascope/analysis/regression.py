"""Has the work become slower, or hungrier for memory, than it was?

A figure has regressed if its values are higher than the baseline's beyond what chance explains (Mann-Whitney,
one-sided) and its median is higher by more than what is allowed. Either alone cries wolf: a test alone finds
differences of 0.1 % once there are enough runs, a threshold alone finds noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sigmascope.analysis.run_comparison import FigureComparison, compare_run_sets
from sigmascope.errors import ConfigError
from sigmascope.records.run import Run

Verdict = Literal["regressed", "higher", "same", "lower", "undecided"]
MAX_SLOWDOWN: Final = 0.03
MAX_GROWTH: Final = 0.03
ALPHA: Final = 0.01


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure and what is said of it.

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
    new: Sequence[Run],
    baseline: Sequence[Run],
    *,
    max_slowdown: float = MAX_SLOWDOWN,
    max_growth: float = MAX_GROWTH,
    alpha: float = ALPHA,
) -> RegressionCheck:
    """Hold runs against earlier runs of the same work.

    Args:
        new: At least one run.
        baseline: At least one run.
        max_slowdown: How much longer a time may be, as a fraction: 0.05 is 5 %.
        max_growth: The same for peaks of memory.
        alpha: How likely a difference by chance may be, of one figure.

    Raises:
        ConfigError: No runs on one side, nothing in them that could be compared, or a limit out of range.
    """
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
