"""Where a figure of runs like each other changed: change points in a series, one value a run.

A change of 10 % is to be found three runs after it began, in series that have late runs, that drift, and that hold the same
value a thousand times. So the series is walked as it came in: the last 3, 5 and 10 values stand beside the level before
them, which is up to 50 values since the last change point. What is found there starts the next level. Such a walk with a
rank test is Hawkins and Deng's chart ("A nonparametric change-point control chart", Journal of Quality Technology 42,
2010), cut to windows. Methods that look at the whole series at once cannot say when they would have known: E-divisive means
(Matteson and James, arXiv 1306.4933) in MongoDB's and Hunter's use (Fleming et al., arXiv 2301.03034), and the fit of levels
of asv's `step_detect`. From asv's fit is the place: of the splits around a find, the one with the least absolute
deviations from the two medians.

Whether a difference is noise is decided where it always is (`run_comparison.is_noise`), of the values without the late runs
of either side: of the three after a change, one in seven series has a late one where one run in 20 is late, and no rank test
finds the other two. But a series of a thousand runs is a thousand looks, and one in a hundred by chance would be ten false
alarms. So beside a level of 20 values or more a change point must also be

- far: 3.5 standard deviations from where the level drifts to, its line by Theil and Sen (JASA 63, 1968), and 3 from its median,
  since a drift may have ended. They are 1.4826 of the median absolute deviations from each (Hampel, JASA 69, 1974), which late
  runs do not widen;
- likely: the new values are ten times likelier as a new level, wherever that lies, than as more of the one before. Either has
  as many strays, such as late runs, as the level before has on that side of it. So a late run after a change says nothing
  against it, and where late runs are common, three of them in a row are a level only if they agree;
- new: at most one in 20 values of the level is where the new ones are, so that of a figure that jumps between two levels
  nothing is said;
- lasting: more of the values after it than one in 8 are not half of the way back, and a level of fewer than 10 values that came and
  went was not there in more than one in 20 of the values around it. A place that does not last is withdrawn, and the series
  walked without it.

A slow drift is no change point, since no run is where it began. `Trend.drift` has it.
"""

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sigmascope.analysis.run_comparison import USUAL, Limits, is_noise
from sigmascope.analysis.run_figures import Unit, theil_sen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST_NEW: Final = 3
"""Runs after which a change is told: of two, one may have been late."""
_WINDOWS: Final = (FEWEST_NEW, 5, 10)
MOST_BEFORE: Final = 50
FEWEST_BEFORE: Final = 3
_DEVIATIONS: Final = 3.5
_DEVIATIONS_FROM_MEDIAN: Final = 3.0
_TIMES_LIKELIER: Final = 10
"""Jeffreys calls this strong ("Theory of Probability", 1961, appendix B)."""
_LIKE_IT: Final = 2.0
"""Standard deviations around a level that are of it."""
_NORMAL: Final = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
_FEWEST_FOR_SCATTER: Final = 20
_FEWEST_FOR_RANGE: Final = 10
_PART_OF_THE_WAY: Final = 0.5
_SHARE_GONE: Final = 0.8
_BEYOND: Final = 8
_NEAR: Final = 20
_LEAST_STEP: Final[dict[Unit, float]] = {"seconds": 0.03, "bytes": 0.005}
"""Logarithms of ratios that are noise whatever the values are, see `is_noise`."""
_LEAST_SCATTER: Final[dict[Unit, float]] = {"seconds": 0.003, "bytes": 0.0005}
"""Of values that are all the same, the next may differ by this."""
_LEAST_RATIO: Final = 1e-9
"""A time of 0 has no logarithm."""
_ROWS_AT_ONCE: Final = 20_000
_FEWEST_FOR_DRIFT: Final = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A place in a series where its level changed.

    Attributes:
        at: Index of the first value of the new level.
        found_at: Index of the value with which it was known, two after `at` or more.
        before: Median of the level before; at most `MOST_BEFORE` values.
        after: Median of the level after, up to the next change point.
        start: Index of the first value of the level before.
        end: Index after the last value of the level after.
    """

    at: int
    found_at: int
    before: float
    after: float
    start: int
    end: int

    @property
    def share(self) -> float | None:
        """By what share it changed, such as 0.1 for 10 % more; None: the level before was 0."""
        return self.after / self.before - 1 if self.before > 0 else None


@dataclass(frozen=True, slots=True)
class Trend:
    """What a series did.

    Attributes:
        changes: In their order.
        level: The median since the last change point; None: there is no value.
        drift: By what share the values since the last change point moved from the first to the last of them, by Theil
            and Sen; None: they are fewer than 20, or that is noise.
    """

    changes: tuple[Change, ...]
    level: float | None
    drift: float | None


class SeriesRun(NamedTuple):
    """One run of a series: its number and id in the store, when it began (ISO 8601 in UTC), and its value."""

    number: int
    id: str
    started_at: str
    value: float


@dataclass(frozen=True, slots=True)
class ToldChange:
    """A change point, with the run that it began with.

    Attributes:
        change: In the series.
        run: Id of the first run of the new level.
        started_at: When that run began; ISO 8601 in UTC.
        causes: What differs between the runs before and after, such as "torch 2.13 → 2.14"; empty: nothing that is known.
            None: the records were not looked at.
        unavailable: Why the times of the two sides are not comparable, such as other programs; None: they are.
    """

    change: Change
    run: str
    started_at: str
    causes: tuple[str, ...] | None = None
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of all runs of a kind, in the order in which they ran.

    Attributes:
        figure: Such as "time".
        unit: Of its values.
        kind: What the runs have in common, by the names of the table's columns.
        runs: Those that have a value.
        trend: Of the values.
        changes: The change points of the trend.
        left_out: How many runs have no value.
        wrong_clocks: How many runs their clock puts elsewhere than where they stand.
        recipes: How many recipes they have.
    """

    figure: str
    unit: Unit
    kind: dict[str, Any]
    runs: tuple[SeriesRun, ...]
    trend: Trend
    changes: tuple[ToldChange, ...]
    left_out: int = 0
    wrong_clocks: int = 0
    recipes: int = 1

    @property
    def values(self) -> list[float]:
        """Of the runs."""
        return [run.value for run in self.runs]

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "figure": self.figure,
            "unit": self.unit,
            "kind": self.kind,
            "runs": [{"id": run.id, "started_at": run.started_at, "value": run.value} for run in self.runs],
            "level": self.trend.level,
            "drift": self.trend.drift,
            "changes": [
                {
                    "run": told.run,
                    "started_at": told.started_at,
                    "index": told.change.at,
                    "found_at": told.change.found_at,
                    "before": told.change.before,
                    "after": told.change.after,
                    "share": told.change.share,
                    "causes": None if told.causes is None else list(told.causes),
                    "unavailable": told.unavailable,
                }
                for told in self.changes
            ],
            "left_out": self.left_out,
            "wrong_clocks": self.wrong_clocks,
            "recipes": self.recipes,
        }


def is_value(value: object) -> bool:
    """Whether it can stand in a series: a number that is finite and not below 0."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )


def trend_of(values: Sequence[float], unit: Unit, *, limits: Limits = USUAL) -> Trend:
    """The change points of a series, its level and its drift.

    Args:
        values: One a run, in the order of the runs; see `is_value`. A hundred thousand take some two seconds.
        unit: Of all of them.
        limits: What is no noise where there is enough to test.

    Raises:
        ValueError: One of them is no value.
    """
    wrong = [value for value in values if not is_value(value)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} cannot stand in a series")
    places = _lasting_places(values, unit, limits)
    bounds = [0, *(at for at, _ in places), len(values)]
    changes = tuple(
        Change(
            at,
            found_at,
            median(values[max(start, at - MOST_BEFORE) : at]),
            median(values[at:end]),
            start,
            end,
        )
        for (at, found_at), (start, end) in zip(places, zip(bounds, bounds[2:], strict=False), strict=True)
    )
    last = values[bounds[-2] :]
    return Trend(changes, median(last) if last else None, _drift(last, unit, limits))


def changed_with_last(values: Sequence[float], unit: Unit) -> Change | None:
    """The change point that is known with the last value, and was not with the one before it; None: there is none."""
    found = trend_of(values, unit).changes
    return found[-1] if found and found[-1].found_at == len(values) - 1 else None


def _lasting_places(values: Sequence[float], unit: Unit, limits: Limits) -> list[tuple[int, int]]:
    """The places without those of which the values after them show that the series only jumps between two levels.

    What was taken for a level then belongs to the one before, and the series is walked anew.
    """
    may_be = _candidates(values, unit)
    withdrawn: set[int] = set()
    while True:
        places = list(_places(values, unit, limits, may_be, withdrawn))
        jumps = _jumps(values, [at for at, _ in places])
        if not jumps:
            return places
        withdrawn |= {last for at, last in places if at in jumps}


def _jumps(values: Sequence[float], places: Sequence[int]) -> set[int]:
    """The places where no new level begins: the old one is in what follows, or the new one was no rarity in the old."""
    bounds = [0, *places, len(values)]
    found: set[int] = set()
    for index, at in enumerate(places, 1):
        old = values[max(bounds[index - 1], at - MOST_BEFORE) : at]
        new = values[at : min(bounds[index + 1], at + MOST_BEFORE)]
        if index == len(places):
            new = _without_what_may_begin(new, median(old))
        if _gone(new, median(new), median(old)) > max(1, len(new) // _BEYOND):
            found.add(at)
        elif index < len(places) and len(new) < _WINDOWS[-1]:
            back = bounds[index + 1]
            later = values[back : min(bounds[index + 2], back + MOST_BEFORE)]
            around = [*old, *later]
            is_back = _gone([median(later)], median(new), median(old)) == 1
            if is_back and _near(around, median(around), median(new)) > len(around) // _NEAR:
                found |= {at, back}
    return found


def _without_what_may_begin(new: Sequence[float], old: float) -> Sequence[float]:
    """The last level without its last runs that went back to the old one, where they may be the first of a change back.

    They are too few to tell, and the level before them stood long enough to be one.
    """
    level = median(new)
    count = next((count for count, value in enumerate(reversed(new)) if not _gone([value], level, old)), 0)
    return new[: len(new) - count] if count < FEWEST_NEW and len(new) - count >= _WINDOWS[-1] else new


def _gone(values: Sequence[float], begin: float, end: float) -> int:
    """How many values have gone half of the way to another level."""
    if begin == end:
        return 0
    return sum((value - begin) / (end - begin) >= _PART_OF_THE_WAY for value in values)


def _near(values: Sequence[float], begin: float, end: float) -> int:
    """How many values are at another level, give or take half of the way there."""
    return sum(abs(value - end) <= abs(end - begin) / 2 for value in values)


def _places(
    values: Sequence[float],
    unit: Unit,
    limits: Limits,
    may_be: "NDArray[np.bool_]",
    withdrawn: AbstractSet[int],
) -> Iterator[tuple[int, int]]:
    """Of each change point the first index of the new level, and the last that was needed to know it."""
    start, last = 0, FEWEST_BEFORE + FEWEST_NEW - 1
    while last < len(values):
        if last not in withdrawn and (last - start < MOST_BEFORE + _WINDOWS[-1] or may_be[last]):
            width = next(
                (width for width in _WINDOWS if _has_changed(values, start, last, width, unit, limits)), None
            )
            if width is not None:
                start = _split(values, start, last + 1, width)
                yield start, last
                last = max(last, start + FEWEST_BEFORE + FEWEST_NEW - 2)
        last += 1


def _has_changed(
    values: Sequence[float], start: int, last: int, width: int, unit: Unit, limits: Limits
) -> bool:
    at = last + 1 - width
    if at - start < max(width, FEWEST_BEFORE):
        return False
    new, before = values[at : last + 1], values[max(start, at - MOST_BEFORE) : at]
    middle, now = median(before), median(new)
    if now == middle:
        return False
    if min(now, middle) <= 0:  # of which there is no ratio
        return _gone(new, middle, now) >= _SHARE_GONE * width and not is_noise(
            new, before, unit, limits=limits
        )
    if len(before) < _FEWEST_FOR_SCATTER:
        return (
            _gone(new, middle, now) >= _SHARE_GONE * width
            and _is_beyond_all(new, before)
            and not is_noise(new, before, unit, limits=limits)
        )
    scatter = max(_NORMAL * median(abs(value - middle) for value in before), _LEAST_SCATTER[unit] * middle)
    far = _DEVIATIONS * scatter
    new_ones = _of_either_level(new, middle, now, far)
    return (
        _gone(new_ones, middle, now) >= _SHARE_GONE * len(new_ones)
        and _is_new_level(new, before, unit)
        and not is_noise(
            [*new_ones, *[now] * (width - len(new_ones))],  # as many as there are, since fewer need more
            [value for value in before if abs(value - middle) <= far],
            unit,
            limits=limits,
        )
    )


def _of_either_level(new: Sequence[float], middle: float, now: float, far: float) -> Sequence[float]:
    """The new values without those that are of neither level: far from the one before, and not half of the way to the other.

    Such as a late run among faster ones. All values, if those of either level are no majority.
    """
    kept = [value for value in new if abs(value - middle) <= far or _gone([value], middle, now)]
    return kept if 2 * len(kept) > len(new) else new


def _is_beyond_all(new: Sequence[float], before: Sequence[float]) -> bool:
    """Beside a level of few values: whether the new ones are further from all of them than those are from each other."""
    gap = max(min(new) - max(before), min(before) - max(new))
    times = 1 if len(before) >= _FEWEST_FOR_RANGE else 3
    return gap > 0 and gap >= times * (max(before) - min(before))


def _is_new_level(new: Sequence[float], before: Sequence[float], unit: Unit) -> bool:
    """Whether the new values are far from the level before and from where it drifts to, where hardly any was, and likely."""
    middle = median(before)
    slope = theil_sen(before).value / middle
    centre = (len(before) - 1) / 2
    steps = [math.log(max(value / middle, _LEAST_RATIO)) for value in (*before, *new)]
    rests = [step - slope * (index - centre) for index, step in enumerate(steps)]
    line = median(rests[: len(before)])
    old, now = ([rest - line for rest in side] for side in (rests[: len(before)], rests[len(before) :]))
    from_median, from_line = median(steps[len(before) :]), median(now)
    scatter = _NORMAL * median(map(abs, old))
    if (
        from_median * from_line <= 0
        or abs(from_median) < _DEVIATIONS_FROM_MEDIAN * _NORMAL * median(map(abs, steps[: len(before)]))
        or abs(from_line) < _DEVIATIONS * scatter
    ):
        return False
    scatter = max(scatter, _LEAST_SCATTER[unit])
    like_it = abs(from_line) / 2
    if unit == "seconds":  # of memory no run is late: what was there was a level
        like_it = min(like_it, _LIKE_IT * scatter)
    if sum(abs(rest - from_line) <= like_it for rest in old) > len(old) // _NEAR:
        return False
    return _log_likelihood_ratio(now, old, from_line, scatter) >= math.log(_TIMES_LIKELIER)


def _log_likelihood_ratio(new: Sequence[float], old: Sequence[float], step: float, deviation: float) -> float:
    """The logarithm of how much likelier the new values are as a level of their own than as more of the old one.

    Σ log((φ(y - step) + w) / (mean φ(y - x) + w)) - log φ(0), for the new values y and the old ones x: φ is the normal density
    with the old level's deviation, w the share of strays on that side of it (and half a one more), which may lie anywhere
    within a factor of e. The last term is the price of not knowing where the new level lies: anywhere within such a factor, too.

    Args:
        new: Logarithms of ratios to where the old level drifts to.
        old: The same.
        step: Where the new level seems to be.
        deviation: Of the old level.
    """
    far = _DEVIATIONS * deviation
    above, below = ((sum(side * rest > far for rest in old) + 0.5) / (len(old) + 1) for side in (1, -1))
    total = -math.log(_density(0.0, deviation))
    for value in new:
        stray = above if value > 0 else below
        as_old = sum(_density(value - rest, deviation) for rest in old) / (len(old) + 1)
        total += math.log((_density(value - step, deviation) + stray) / (as_old + stray))
    return total


def _density(distance: float, deviation: float) -> float:
    return math.exp(-((distance / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))


def _split(values: Sequence[float], start: int, end: int, width: int) -> int:
    """The first index of the new level: of the splits around the find, that of the least absolute deviations.

    None counts for more than half of the step. Otherwise a late run shortly before the change would draw the place to itself.
    """
    begin, at = max(start, end - width - MOST_BEFORE), end - width
    most = abs(median(values[at:end]) - median(values[begin:at])) / 2

    def deviations(at: int) -> float:
        return sum(
            min(abs(value - middle), most)
            for side in (values[begin:at], values[at:end])
            for middle in (median(side),)
            for value in side
        )

    splits = range(max(begin + FEWEST_BEFORE, at - width + 1), min(at + width - 1, end - FEWEST_NEW) + 1)
    return min(splits, key=lambda split: (deviations(split), abs(split - at)))


def _candidates(values: Sequence[float], unit: Unit) -> "NDArray[np.bool_]":
    """By the index of the last value, whether some window may hold a change beside a whole level of `MOST_BEFORE` values.

    It asks what `_has_changed` does first, of many windows at once.
    """
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):  # a time of 0 is infinitely far
        series = np.log(np.asarray(values, dtype=np.float64))
    found = np.zeros(len(series), dtype=np.bool_)
    for width in _WINDOWS:
        firsts = np.arange(MOST_BEFORE, len(series) - width + 1)  # of the new values
        for rows in (firsts[at : at + _ROWS_AT_ONCE] for at in range(0, len(firsts), _ROWS_AT_ONCE)):
            before = series[rows[:, None] + np.arange(-MOST_BEFORE, 0)]
            with np.errstate(invalid="ignore"):
                middle = np.median(before, axis=1)
                step = np.median(series[rows[:, None] + np.arange(width)], axis=1) - middle
                scatter = _NORMAL * np.median(np.abs(before - middle[:, None]), axis=1)
                # NaN, of zeros: it is looked at one by one.
                found[rows + width - 1] |= (
                    (step != 0)
                    & ~(np.abs(step) < _LEAST_STEP[unit])
                    & ~(np.abs(step) < 0.99 * _DEVIATIONS_FROM_MEDIAN * scatter)
                )
    return found


def _drift(values: Sequence[float], unit: Unit, limits: Limits) -> float | None:
    """How far the values moved without a change point, as a share of where they began; None: no further than noise."""
    if len(values) < _FEWEST_FOR_DRIFT:
        return None
    part = len(values) // 4
    first, last = values[:part], values[-part:]
    if is_noise(last, first, unit, limits=limits):
        return None
    slope = theil_sen(values)
    if slope.lower <= 0 <= slope.upper:
        return None
    begins = median(values) - slope.value * (len(values) - 1) / 2
    return slope.value * (len(values) - 1) / begins if begins > 0 else None
