"""Two sets of runs of the same work: ratios of medians, intervals, tests, what is noise, and what regressed.

Runs are sorted by the work that they did, since a run of 512×512 says nothing about one of 1024×1024
(`pairs_by_work`). Steps can be compared too: all of a stage together, or each by its number.

The interval and the test are those of `two_samples`. Whether a difference is noise has one answer, `is_noise`, for the
first sentence, the table, and the check.

The time of a part of a run, such as a stage or a step, is judged beside that of the whole run (`_as_part`). A machine that
became slower is in every part, and there are many parts. Where the whole has not changed, a part has only if it did so
beyond what the run around it moved, and beyond what one of so many parts does by chance. Otherwise it is undecided.

Where a run waited for a processor for much of its time, the clock on the wall tells of the other programs: the times are
called not comparable, and nothing is accused. The processor time of the process is given in their place; it too grows
beside other programs, where threads spin while they wait for each other.

A figure has regressed if its values are higher than the baseline's beyond what chance explains (Mann-Whitney,
one-sided) and its median is higher by more than what is allowed. Either alone cries wolf: a test alone finds
differences of 0.1 % once there are enough runs, a threshold alone finds noise. And the test alone takes the drift of a
machine for a change, since it knows no order: a change must be more than a side moves by itself, which is less, the more the
sides took turns.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from sigmascope.analysis.machine_speed import OwnWork, is_same_work, own_work_of
from sigmascope.analysis.run_figures import (
    GENERATION,
    MUCH_WAITED,
    STEP,
    TOTAL,
    Figure,
    Unit,
    figures_of,
    theil_sen,
    timed_on_device,
    timed_steps,
    total_of,
    warm,
)
from sigmascope.analysis.run_order import in_order, share_apart
from sigmascope.analysis.two_samples import p_of_higher, ratio_interval
from sigmascope.errors import ConfigError, RecordError
from sigmascope.records.performance import work_of
from sigmascope.records.recorded import Recorded, runs_of
from sigmascope.records.run import Run, is_duration
from sigmascope.units import counted, percent_change

CONFIDENCE: Final = 0.95
_FEWEST_RUNS_FOR_INTERVAL: Final = 3
_MOST_COUNTED_AS_0: Final = 1e-12
"""A shorter time is below any clock's resolution, and dividing by it may give infinity."""
_FEWEST_TO_TEST: Final = 5
"""On each side, or three and more beside so many that p can be as low as with five on each."""
_FEWEST_TO_SEPARATE: Final = 3
"""With this many on each side, but too few to test, all of one side must be above all of the other."""
_LEAST_CHANGES_OF_FEW: Final[dict[Unit, tuple[float, float]]] = {"seconds": (0.1, 0.2), "bytes": (0.01, 0.01)}
"""The least change that is no noise: of enough values to separate, and of fewer."""
_LEAST_SECONDS_OF_FEW: Final = 0.1
"""Other programs may delay a few runs by this much."""
_MUCH_EXPLAINED: Final = 0.2
_TIMES_ITS_SCATTER: Final = 2.5
"""Of the median deviation of a side's times: medians of five values of one normal distribution differ by less in 93 of 100
pairs, of ten in 99."""
_TIMES_ITS_TREND: Final = 0.9
"""Of the way that the trend of a side goes in as many values again: that is where the medians of the other side would be."""
_TIMES_ITS_OWN: Final = 1.5
"""Of what a side moves by itself: of seven parts of five runs a side, one is that far apart by chance in 1 of 100 pairs."""
_LIKELY: Final = 0.05
"""A p below which the machine's speed probably changed."""
_FELT_BY_PIPELINES: Final = 0.5
"""By so much of what changes the watch's work a pipeline's changes: as a power, measured on 201 sides of a loop 0.4 to 0.6."""
_MOST_MORE: Final = 40
"""Runs that one is advised to measure, on each side."""
_ORDERS_OF_FIVE: Final = math.comb(2 * _FEWEST_TO_TEST, _FEWEST_TO_TEST)
"""The orders in which five values of each side can lie: in one of them all of one side are the highest."""
_NO_WHOLE: Final = (
    "the runs have no whole time that can be one, so nothing tells whether the machine was slower"
)
Verdict = Literal["regressed", "higher", "same", "lower", "undecided"]
State = Literal["changed", "as before", "undecided", "not comparable"]
MAX_SLOWDOWN: Final = 0.05
"""Two sides that run one after the other differ by some 3 % on an idle machine: its clock rates and caches drift."""
MAX_GROWTH: Final = 0.03
ALPHA: Final = 0.01
FEWEST_OF_HISTORY: Final = 10
"""Earlier runs beside which a single one can be judged: it has to lie beyond all of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is no noise where there are enough values to test.

    Attributes:
        alpha: How likely a difference by chance may be, for each figure.
        seconds: The least change of a time, as a fraction: 0.05 is 5 %.
        bytes: The same for peaks of memory.
        apart: How far the sides lie apart in time, see `share_apart`.
        looks: Of how many figures this is one, which share alpha (Bonferroni).
    """

    alpha: float = ALPHA
    seconds: float = MAX_SLOWDOWN
    bytes: float = 0.01
    apart: float = 1.0
    looks: int = 1

    def of(self, unit: Unit) -> float:
        """The least change of figures of this unit."""
        return self.seconds if unit == "seconds" else self.bytes


USUAL: Final = Limits()


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
        unavailable: What could not be calculated, and why; "runs": how many are left out; "wall": why the times of the
            runs are not comparable, and these are processor times where they are known.
        is_noise: Whether chance explains the difference, see `is_noise`.
        is_noise_on_the_wall: The same of the times as the clock on the wall tells them, comparable or not.
        waited: The median share of the time that was waited for a processor, baseline first; None: not known.
        own_change: By what share the side that moves more does so by itself, see `own_change_of`; of times.
        undecided: Why chance can neither be excluded nor blamed for a difference above the limit, and what to measure next;
            None: there is no such difference, or it is decided.
        is_processor_time: Whether the times are processor times, in place of those of the wall, which are not comparable.
        is_allowed: Whether it differs beyond chance, but by no more than limits allow that are wider than usual.
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
    is_noise: bool = True
    is_noise_on_the_wall: bool = True
    waited: tuple[float, float] | None = None
    own_change: float = 0.0
    undecided: str | None = None
    is_processor_time: bool = False
    is_allowed: bool = False

    @property
    def state(self) -> State:
        """What every surface says of the figure."""
        if not self.is_comparable:
            return "not comparable"
        if self.undecided is not None:
            return "undecided"
        return "as before" if self.is_noise else "changed"

    @property
    def has_changed(self) -> bool:
        """Whether the figure differs beyond noise, by the clock that it is compared by."""
        return not self.is_noise

    @property
    def is_comparable(self) -> bool:
        """Whether the clock on the wall tells of the runs, and not of other programs."""
        return "wall" not in self.unavailable

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        waited = None if self.waited is None else list(self.waited)
        return asdict(self) | {"runs": list(self.runs), "waited": waited, "state": self.state}


def is_noise(
    new: Sequence[float],
    baseline: Sequence[float],
    unit: Unit,
    *,
    limits: Limits = USUAL,
    least_seconds: float = _LEAST_SECONDS_OF_FEW,
) -> bool:
    """Whether chance explains that the medians of two samples differ: the one answer to this question.

    The fewer values there are, the larger a difference must be. From five on each side a test decides (Mann and
    Whitney, two-sided), and the change must be above the limit. The test takes the values for independent, and runs of one
    side that follow each other are not: they drift together. So a time must also change by more than either side moves
    by itself (`own_change_of`). Three beside ten, or four beside seven, tell the test as much as five beside five. Of three
    or four beside fewer all of one side must lie above all of the other, and a time change by 10 %. One or two must lie
    beyond all of the other side, a time by 20 %. A peak of memory changes by 1 %.

    Figures that share alpha need a p that is smaller by their number. Or all of one side must lie above all of the other, and
    the change be half as much again as either side moves by itself.

    Args:
        new: At least one value, in the order in which they were measured.
        baseline: The same.
        unit: Of both.
        limits: For enough values to test; fewer must differ by no less.
        least_seconds: By so much fewer than five times must differ; 0 for steps, whose median no short delay moves.
    """
    now, before = median(new), median(baseline)
    fewest = min(len(new), len(baseline))
    separate, few = (max(least, limits.of(unit)) for least in _LEAST_CHANGES_OF_FEW[unit])
    if before <= _MOST_COUNTED_AS_0:
        return now <= _MOST_COUNTED_AS_0
    change = abs(now / before - 1)
    higher, lower = (new, baseline) if now > before else (baseline, new)
    if can_be_tested(len(new), len(baseline)):
        p = 2 * p_of_higher(higher, lower)
        if change <= _least_change(new, baseline, unit, limits) or p >= limits.alpha:
            return True
        if p * limits.looks < limits.alpha:
            return False
        least = _TIMES_ITS_OWN * _own_change(new, baseline, limits)
        return change <= least or not min(higher) > max(lower)
    if fewest < _FEWEST_TO_SEPARATE:  # one may be late: the nearest of the sides are compared
        now, before = min(higher), max(lower)
        separate, change = few, now / before - 1 if before > 0 else math.inf
    if unit == "seconds" and abs(now - before) < least_seconds:
        return True
    return change <= separate or not min(higher) > max(lower)


def can_be_tested(new: int, baseline: int) -> bool:
    """Whether so many values on each side can give p < 0.01, two-sided; two on a side never do, as one may be late."""
    fewest = min(new, baseline)
    return fewest >= _FEWEST_TO_SEPARATE and math.comb(new + baseline, fewest) >= _ORDERS_OF_FIVE


def _least_change(new: Sequence[float], baseline: Sequence[float], unit: Unit, limits: Limits) -> float:
    """Of enough values to test: the limit, or what the sides move by themselves, if that is more."""
    if unit != "seconds":
        return limits.of(unit)
    return max(limits.seconds, _own_change(new, baseline, limits))


def _own_change(new: Sequence[float], baseline: Sequence[float], limits: Limits) -> float:
    """Of the side that moves more; of three or four values beside many nobody can tell a trend from one late run."""
    known = [side for side in (new, baseline) if len(side) >= _FEWEST_TO_TEST]
    return max(own_change_of(side, apart=limits.apart) for side in known or (new, baseline))


def own_change_of(values: Sequence[float], *, apart: float = 1.0) -> float:
    """By what share the times of one side move by themselves.

    This is 0.9 times the way that their trend (Theil and Sen's, which one late run does not move) goes in as many values
    again, which is where the other side lies (`apart` of that, see `share_apart`); or 2.5 times their median deviation from
    the median, if that is more.
    """
    if len(values) < 2 or (middle := median(values)) <= _MOST_COUNTED_AS_0:
        return 0.0
    trend = apart * _TIMES_ITS_TREND * abs(theil_sen(values).value) * len(values)
    scatter = _TIMES_ITS_SCATTER * median(abs(value - middle) for value in values)
    return max(trend, scatter) / middle


def _between(new: Sequence[Run], baseline: Sequence[Run], limits: Limits) -> Limits:
    """The limits for these two sides: what a machine drifts moves sides that took turns less far apart."""
    return replace(limits, apart=share_apart(new, baseline))


def compare_totals(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0, limits: Limits = USUAL
) -> FigureComparison:
    """Compare what whole runs took; each side has at least one with a valid time.

    They are not comparable either where the machine itself became slower, or faster, by what they changed or enough to hide a
    change: see `machine_speed`.
    """
    ours, theirs, limits = total_of(new), total_of(baseline), _between(new, baseline, limits)
    compared = _compare_figures(ours, theirs, seed, limits)
    work = own_work_of(new, baseline) if compared.is_comparable else None
    why = None if work is None else _by_machine(compared, ours.values, theirs.values, work, limits)
    if why is None or not is_same_work(new, baseline):
        return compared
    because = {**compared.unavailable, "wall": why}
    return replace(compared, is_noise=True, undecided=None, is_allowed=False, unavailable=because)


def _by_machine(
    compared: FigureComparison,
    new: Sequence[float],
    baseline: Sequence[float],
    work: OwnWork,
    limits: Limits,
) -> str | None:
    """How much slower or faster the machine was, in words, if that explains a difference or may hide one; None: neither."""
    if compared.ratio is None or not _is_likely(work):
        return None
    now, before = median(work.now), median(work.before)
    speed = now / before
    hides = compared.state == "as before"
    if hides:
        at_same_speed = [value / speed**_FELT_BY_PIPELINES for value in new]
        if compare_values("total", "seconds", at_same_speed, baseline, limits=limits).state == "as before":
            return None
    elif not _explains(speed, compared.ratio, new, baseline, limits):
        return None
    what = "slower" if speed > 1 else "faster"
    return (
        f"the machine itself was {what}{', which may hide a change' if hides else ''}, since the same work of the watch took "
        f"{1e3 * now:.1f} ms of processor time ({1e3 * before:.1f} ms before, {percent_change(speed - 1)})"
    )


def _explains(
    speed: float, ratio: float, new: Sequence[float], baseline: Sequence[float], limits: Limits
) -> bool:
    """Whether nothing beyond noise is left of a difference once all of the machine's is taken out."""
    if (speed > 1) != (ratio > 1):
        return False
    at_same_speed = [value / speed for value in new]
    return abs(math.log(ratio)) <= abs(math.log(speed)) or is_noise(
        at_same_speed, baseline, "seconds", limits=limits
    )


def _is_likely(work: OwnWork) -> bool:
    """Whether the machine's speed probably changed: this takes from what is told, and needs less than what tells."""
    if not can_be_tested(len(work.now), len(work.before)):
        return not is_noise(work.now, work.before, "seconds", least_seconds=0.0)
    sides = (work.now, work.before) if median(work.now) > median(work.before) else (work.before, work.now)
    return p_of_higher(*sides) < _LIKELY


def compare_wholes(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0, limits: Limits = USUAL
) -> FigureComparison | None:
    """The same; None where a side has no time that can be one, such as NaN or 0."""
    if not all(any(is_duration(run.seconds) for run in side) for side in (new, baseline)):
        return None
    whole = compare_totals(new, baseline, seed=seed, limits=limits)
    return whole if whole.ratio else None


def compare_run_sets(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0, limits: Limits = USUAL
) -> tuple[tuple[FigureComparison, ...], dict[str, str]]:
    """Compare every figure that both sides have; the times of parts are judged beside those of whole runs.

    Returns:
        The comparisons, in the order of the baseline's figures, with the total wherever no other says what it says; and
        by name the figures that one side lacks, with the reason.
    """
    whole = compare_wholes(new, baseline, seed=seed, limits=limits)
    on_device, limits = timed_on_device(new, baseline), _between(new, baseline, limits)
    ours, theirs = figures_of(new, on_device), figures_of(baseline, on_device)
    stages = {
        name.removesuffix(STEP) for name, one in theirs.items() if name in ours and one.unit == "seconds"
    }
    shared = replace(limits, looks=max(1, len(stages - {TOTAL})))
    alone = [
        _compare_figures(ours[name], figure, seed, limits) for name, figure in theirs.items() if name in ours
    ]
    times = {one.name: one for one in alone if one.unit == "seconds"}
    compared = [
        _as_part(
            one,
            ours[one.name].values,
            theirs[one.name].values,
            whole,
            shared,
            _least_seconds_of(one.name),
            _moved_around(times.get(one.name.removesuffix(STEP)), whole),
        )
        for one in alone
    ]
    missing = {name: "not in the new runs" for name in theirs if name not in ours}
    missing |= {name: "not in the baseline" for name in ours if name not in theirs}
    is_told = any(row.name in (TOTAL, GENERATION) and whole and row.state == whole.state for row in compared)
    is_bare = not all(any(run.stages for run in side) for side in (new, baseline))
    if (compared or is_bare) and whole is not None and not is_told:
        compared.insert(0, whole)
        missing.pop(TOTAL, None)
    return tuple(compared), missing


def _moved_around(part: FigureComparison | None, whole: FigureComparison | None) -> float | None:
    """The ratio of the time around a part, where that is most of the run, as a measure of the machine; else of the whole."""
    if part is None or whole is None or not (part.is_comparable and whole.is_comparable):
        return None if whole is None else whole.ratio
    before, now = whole.baseline - part.baseline, whole.new - part.new
    return now / before if min(before, now) > 0 and before > part.baseline else whole.ratio


def _as_part(
    part: FigureComparison,
    new: Sequence[float],
    baseline: Sequence[float],
    whole: FigureComparison | None,
    limits: Limits,
    least_seconds: float,
    moved: float | None,
) -> FigureComparison:
    """The time of a part, judged beside that of the whole around it: it decides nothing that the whole leaves open.

    A machine that became slower is in all parts of a run, and their steps are no more runs than the whole has. So where the
    whole has not changed, a part must differ beyond noise twice: as it is, and with what the run around it moved taken out of
    its times. And of many parts one is beyond noise by chance, so they share alpha. What fails is undecided. Where the whole is
    not comparable, neither is a part that seems to have changed. A peak of memory is judged by itself.

    Args:
        part: Judged by itself.
        new: Its values now.
        baseline: Its values before.
        whole: Judged; None: it has no time that can be one.
        limits: What the parts share.
        least_seconds: See `is_noise`.
        moved: The ratio of the time around the part, see `_moved_around`.
    """
    if part.unit != "seconds" or part.state not in ("changed", "undecided"):
        return part
    if whole is None or not moved:
        return replace(part, is_noise=True, undecided=_NO_WHOLE)
    if not whole.is_comparable:
        because = {**part.unavailable, "wall": whole.unavailable["wall"]}
        return replace(part, is_noise=True, undecided=None, unavailable=because)
    if whole.has_changed or whole.is_allowed or part.undecided is not None:
        return part
    without_whole = [value / moved for value in new]
    is_one_of_many, moves_along = (
        is_noise(values, baseline, "seconds", limits=limits, least_seconds=least_seconds)
        for values in (new, without_whole)
    )
    if not (is_one_of_many or moves_along):
        return part
    if whole.undecided is not None:
        why = whole.undecided
    elif is_one_of_many:
        why = _why_undecided(part, limits)
    else:
        why = f"the run around it moved by {percent_change(moved - 1)}, too; let the sides take turns"
    return replace(part, is_noise=True, undecided=why)


def _least_seconds_of(name: str) -> float:
    """By how much fewer than five of this figure's times must differ; steps are medians of many."""
    return 0.0 if name.endswith(STEP) else _LEAST_SECONDS_OF_FEW


def _compare_figures(new: Figure, baseline: Figure, seed: int, limits: Limits) -> FigureComparison:
    least_seconds = _least_seconds_of(baseline.name)
    before, now = (median(side.waited) if side.waited else None for side in (baseline, new))
    waited = None if before is None or now is None else (before, now)
    ours, theirs, unavailable = new.values, baseline.values, {}
    differs = not is_noise(ours, theirs, new.unit, limits=limits, least_seconds=least_seconds)
    if waited is not None:
        is_estimate = new.is_estimate or baseline.is_estimate
        is_much = max(waited) > MUCH_WAITED and (differs or not is_estimate)
        if is_much or (differs and _explained_by_waiting(new, baseline)):
            is_by_others = new.is_by_others or baseline.is_by_others
            shares = (baseline.others, new.others) if is_by_others else waited
            is_stopped = (new if waited[1] >= waited[0] else baseline).is_stopped
            unavailable["wall"] = waited_in_words(shares, is_by_others=is_by_others, is_stopped=is_stopped)
            if new.own and baseline.own:
                ours, theirs = new.own, baseline.own
    elif differs and max(before or 0.0, now or 0.0) > MUCH_WAITED:  # the other side's record does not say
        side = baseline if now is None else new
        unavailable["wall"] = waited_in_words((before, now), is_by_others=side.is_by_others)
    compared = compare_values(
        baseline.name, baseline.unit, ours, theirs, seed=seed, limits=limits, least_seconds=least_seconds
    )
    is_certain = not compared.is_noise and "wall" not in unavailable
    left_out = [
        f"{side.untimed} of {side.untimed + len(side.values)} {name} runs"
        for side, name in ((baseline, "baseline"), (new, "new"))
        if side.untimed
    ]
    if left_out:
        unavailable["runs"] = f"{' and '.join(left_out)} left out, because the accelerator did not time them"
    return replace(
        compared,
        unavailable={**compared.unavailable, **unavailable},
        undecided=None if "wall" in unavailable else compared.undecided,
        is_noise=not is_certain,
        is_allowed=compared.is_allowed and "wall" not in unavailable,
        is_noise_on_the_wall=not differs,
        waited=waited,
        is_processor_time=ours is new.own,
    )


def _explained_by_waiting(new: Figure, baseline: Figure) -> bool:
    """Whether much of the difference is time that was waited for a processor.

    A fifth is much: where one of several threads waits, the others wait for it, or spin, and only one is looked at.
    """
    waits = [
        median(value * share for value, share in zip(side.values, side.waited, strict=True))
        for side in (baseline, new)
    ]
    difference = median(new.values) - median(baseline.values)
    return difference != 0 and (waits[1] - waits[0]) / difference >= _MUCH_EXPLAINED


def waited_in_words(
    waited: tuple[float | None, float | None], *, is_by_others: bool, is_stopped: bool = False
) -> str:
    """Such as "the run waited for a processor for 62 % of its time (before: 3 %)".

    Args:
        waited: Shares, the baseline's first; None: not recorded.
        is_by_others: Whether they are what other programs used.
        is_stopped: Whether the processor was waited for since the process was stopped.
    """
    before, now = ("not recorded" if share is None else f"{100 * share:.0f} %" for share in waited)
    when, other = (" before", f"now: {now}") if waited[1] is None else ("", f"before: {before}")
    known = before if waited[1] is None else now
    if is_by_others:
        return f"other programs used {known} of the processor{when} ({other})"
    if is_stopped:
        side, share = (" before", before) if (waited[0] or 0.0) > (waited[1] or 0.0) else ("", now)
        return f"the process{side} was stopped for {share} of its time"
    return f"the run{when} waited for a processor for {known} of its time ({other})"


def compare_values(
    name: str,
    unit: Unit,
    new: Sequence[float],
    baseline: Sequence[float],
    *,
    seed: int = 0,
    limits: Limits = USUAL,
    least_seconds: float = _LEAST_SECONDS_OF_FEW,
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
    own_change = _own_change(new, baseline, limits) if unit == "seconds" else 0.0
    compared = FigureComparison(
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
        is_noise(new, baseline, unit, limits=limits, least_seconds=least_seconds),
        own_change=own_change,
    )
    if ratio is None or not compared.is_noise:
        return compared
    if abs(ratio - 1) > limits.of(unit):
        return replace(compared, undecided=_why_undecided(compared, limits))
    p = min(compared.p_slower, p_of_higher(baseline, new))
    is_known = limits.of(unit) > USUAL.of(unit) and abs(ratio - 1) > own_change and 2 * p < limits.alpha
    return replace(compared, is_allowed=is_known)


def _why_undecided(compared: FigureComparison, limits: Limits) -> str:
    """What keeps a difference above the limit from being told from chance, and what to measure next."""
    alpha = limits.alpha / limits.looks
    if not _can_prove(*compared.runs, alpha):
        return _too_few(compared, alpha)
    p = min(compared.p_slower, 1 - compared.p_slower)
    if 2 * p < alpha:
        moves = f"the runs of one side move by {100 * compared.own_change:.1f} % on their own"
        return f"{moves}; let the sides take turns"
    of_parts = f" in one of {limits.looks} parts" if limits.looks > 1 else ""
    return f"the two sides overlap (p = {p:.2g}{of_parts}); measure as many runs again, in turns"


def _can_prove(before: int, now: int, alpha: float) -> bool:
    """Whether so many runs can give a p, two-sided, below alpha; where they can be tested at all."""
    return can_be_tested(now, before) and 2 / math.comb(before + now, now) < alpha


def _too_few(compared: FigureComparison, alpha: float) -> str:
    before, now = compared.runs
    text = f"{counted(before, 'run')} before and {now} now are too few for p < {alpha:.2g}"
    enough = _fewest_more(before, now, alpha)
    if enough is None:
        return f"{text}; measure many more on each side"
    old, new = enough
    if old == new:
        return f"{text}; measure {old} more on each side"
    sides = [f"{count} more {side}" for count, side in ((old, "before"), (new, "now")) if count]
    return f"{text}; measure {' and '.join(sides)}"


@lru_cache(maxsize=256)
def _fewest_more(before: int, now: int, alpha: float) -> tuple[int, int] | None:
    """How many more runs of each side, before and now, can prove a difference; None: more than anybody measures."""
    more = range(_MOST_MORE)
    enough = [
        (old + new, abs(old - new), old, new)
        for old in more
        for new in more
        if _can_prove(before + old, now + new, alpha)
    ]
    return min(enough)[2:] if enough else None


def compare_pooled_steps(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0, limits: Limits = USUAL
) -> tuple[FigureComparison, ...]:
    """All steps of each stage but every run's first, as one sample a side.

    For too few runs to compare run by run. The intervals then hold for these very runs only: the steps of a run share
    its circumstances, so another run may lie outside. So many steps decide nothing: the runs do.
    """
    figures, _ = compare_run_sets(new, baseline, seed=seed, limits=limits)
    by_runs = {figure.name: figure for figure in figures}
    on_device, limits = timed_on_device(new, baseline), _between(new, baseline, limits)
    ours, theirs = _steps_by_stage(new, on_device), _steps_by_stage(baseline, on_device)
    return tuple(
        _decided_by(
            by_runs[name + STEP],
            compare_values(
                name + STEP, "seconds", ours[name], values, seed=seed, limits=limits, least_seconds=0.0
            ),
        )
        for name, values in theirs.items()
        if name in ours and name + STEP in by_runs
    )


def _decided_by(runs: FigureComparison, pooled: FigureComparison) -> FigureComparison:
    """Pooled values with what is said of the same figure by runs."""
    wall = {} if runs.is_comparable else {"wall": runs.unavailable["wall"]}
    unavailable = {**pooled.unavailable, **wall}
    return replace(pooled, is_noise=runs.is_noise, undecided=runs.undecided, unavailable=unavailable)


def _steps_by_stage(runs: Sequence[Run], on_device: Collection[str]) -> Mapping[str, list[float]]:
    by_stage: dict[str, list[float]] = {}
    for run in in_order(runs):
        for stage in run.walk():
            seconds = warm(timed_steps(stage, on_device))
            if seconds:
                by_stage.setdefault(stage.name, []).extend(seconds)
    return by_stage


def compare_by_step(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0, limits: Limits = USUAL
) -> tuple[FigureComparison, ...]:
    """Each step of each stage by its number, with one value for each run; steps that one side lacks are left out.

    Each is judged beside its stage's median step, as that is beside the whole run. It is one step of each run, and may be late.
    """
    figures, _ = compare_run_sets(new, baseline, seed=seed, limits=limits)
    around = {figure.name: figure for figure in figures}
    whole = compare_wholes(new, baseline, seed=seed, limits=limits)
    on_device, limits = timed_on_device(new, baseline), _between(new, baseline, limits)
    ours, theirs = _steps_by_number(new, on_device), _steps_by_number(baseline, on_device)
    shared = replace(limits, looks=max(1, len(theirs.keys() & ours.keys())))
    compared = []
    for (name, number), values in theirs.items():
        if (name, number) in ours:
            now, step = ours[name, number], f"{name}{STEP} {number}"
            part = compare_values(step, "seconds", now, values, seed=seed, limits=limits, least_seconds=0.0)
            beside = around.get(name + STEP, whole) if whole and whole.is_comparable else whole
            moved = None if beside is None else beside.ratio
            compared.append(_as_part(part, now, values, beside, shared, _LEAST_SECONDS_OF_FEW, moved))
    return tuple(compared)


def _steps_by_number(
    runs: Sequence[Run], on_device: Collection[str]
) -> Mapping[tuple[str, int], list[float]]:
    """By stage and number from 1 on, each run's seconds; a stage passed twice counts on."""
    by_number: dict[tuple[str, int], list[float]] = {}
    for run in in_order(runs):
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
            allowed, which is more than usual; "undecided": by more than allowed, up or down, but there are too few runs, or too much noise, to tell
            it from chance; "lower": by more than noise; "same": none of these.
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

    @property
    def undecided(self) -> tuple[CheckedFigure, ...]:
        """The figures that differ by more than allowed, and nobody can tell whether by chance."""
        return tuple(figure for figure in self.figures if figure.verdict == "undecided")

    @property
    def outcome(self) -> str:
        """Such as "0 figures regressed, 2 undecided"."""
        is_open = f", {len(self.undecided)} undecided" if self.undecided else ""
        return f"{counted(len(self.regressed), 'figure')} regressed{is_open}"

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "regressed": [figure.comparison.name for figure in self.regressed],
            "undecided": [figure.comparison.name for figure in self.undecided],
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
    is_history: bool = False,
) -> RegressionCheck:
    """Check runs against earlier runs of the same work.

    Args:
        new: At least one run, or what has one, such as a `Watch`.
        baseline: The same.
        max_slowdown: How much longer a time may be, as a fraction: 0.05 is 5 %.
        max_growth: The same for peaks of memory.
        alpha: How likely a difference by chance may be, for each figure.
        is_history: Whether the baseline are all runs that were like these, ten at least. Then one or two runs regressed if
            they lie beyond all of them as far as `is_noise` asks, though so few can give no small p.

    Raises:
        ConfigError: No runs on one side, nothing in them that could be compared, or a limit out of range.
    """
    new, baseline = runs_of(new), runs_of(baseline)
    _require(new, baseline, max_slowdown, max_growth, alpha)
    limits = Limits(alpha, max_slowdown, max_growth)
    compared, missing = compare_run_sets(new, baseline, limits=limits)
    if not compared:
        raise ConfigError(
            "The runs and the baseline have no stage, step or peak in common.",
            hint="Check runs of the same pipeline.",
        )
    figures = tuple(_judge(comparison, limits, is_history=is_history) for comparison in compared)
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
    require_alpha(alpha)


def require_alpha(alpha: float) -> None:
    """Refuse what is no probability.

    Raises:
        ConfigError: It is not between 0 and 1.
    """
    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha is {alpha}.", hint="Give a probability between 0 and 1, such as 0.01.")


def _judge(comparison: FigureComparison, limits: Limits, *, is_history: bool = False) -> CheckedFigure:
    """The verdict that follows from what every surface says of the figure: a gate fails by nothing that few runs show."""
    allowed, alpha = limits.of(comparison.unit), limits.alpha
    before, after = comparison.runs
    are_enough = comparison.least_p < alpha or (is_history and before >= FEWEST_OF_HISTORY > after)
    growth = math.inf if comparison.ratio is None else comparison.ratio - 1
    change = comparison.unavailable["ratio"] if comparison.ratio is None else percent_change(growth)
    match comparison.state:
        case "not comparable":
            clock = "processor time" if comparison.is_processor_time else "by the clock"
            why = f"not comparable: {comparison.unavailable['wall']}; {clock} {change}"
            return CheckedFigure(comparison, "undecided", why)
        case "undecided":
            return CheckedFigure(comparison, "undecided", f"{change}, but {comparison.undecided}")
        case "as before":
            if comparison.is_allowed and growth > 0:
                return CheckedFigure(
                    comparison, "higher", f"{change}, no more than the {100 * allowed:.1f} % allowed"
                )
            return CheckedFigure(comparison, "same", change)
    if growth < 0:
        return CheckedFigure(comparison, "lower", change)
    if are_enough:
        why = f"{change}, more than the {100 * allowed:.1f} % allowed (p = {comparison.p_slower:.2g})"
        return CheckedFigure(comparison, "regressed", why)
    why = f"{change}, beyond noise, but {_too_few(comparison, alpha)}"
    return CheckedFigure(comparison, "undecided", why)


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
    were = "was" if count == 1 else "were"
    return {name: f"{count} of {len(runs)} broke off and {were} left out"} if count else {}


def require_pairs(
    new: Sequence[Run], baseline: Sequence[Run], *, named: Path
) -> tuple[dict[str, tuple[list[Run], list[Run]]], dict[str, str]]:
    """`pairs_by_work`, when there must be something to compare.

    Raises:
        RecordError: The two sides have no work in common.
    """
    pairs, missing = pairs_by_work(new, baseline)
    if not pairs:
        are_whole = all(_complete_runs(side) for side in (new, baseline))
        told = missing if are_whole else _left_out("new runs", new) | _left_out("baseline runs", baseline)
        reasons = "; ".join(f"{work or 'runs outside a benchmark'}: {why}" for work, why in told.items())
        raise RecordError(
            named,
            f"has nothing in common with the baseline ({reasons}).",
            hint="Compare whole runs of the same cases."
            if are_whole
            else "Record whole runs. How far these got, sigmascope show says.",
        )
    return pairs, missing


def by_work(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by the case of the benchmark that made them, in the order of the first of each; "" for all others."""
    by_case: dict[str, list[Run]] = {}
    for run in runs:
        by_case.setdefault(work_of(run.facts), []).append(run)
    return by_case
