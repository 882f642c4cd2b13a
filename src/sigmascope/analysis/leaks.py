"""Memory that grows from call to call: a robust slope with its confidence bounds, and what it means.

What is looked at is the memory that stages of one name, or the steps in a stage, leave in use: in the process
and on each device. The slope is that of Theil and Sen: the median of the slopes between all pairs of
readings. Single jumps and outliers, which a difference between first and last takes for growth, do not move
it. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sigmascope.analysis.run_figures import MOST_READINGS, Number, Slope, theil_sen
from sigmascope.records.memory import mib
from sigmascope.records.performance import PROCESS
from sigmascope.records.run import Finding, Run, Stage

FEWEST_CALLS = 8
TOLERANCE_BYTES: Number = 64 * 1024
"""What a process may grow by in each call: records, logs and allocators take some. Device counters are exact."""
_RISING_SHARE = 0.5  # of all calls, by which the resident set must rise
_MOST_WARM_UP = 5  # calls
_STILL_GROWING = 0.25  # of the whole slope, which the later half must have
HEAP = "heap_in_use_bytes"
"""The fact of a stage that holds what malloc had given out, `{"before": …, "after": …}`."""
HEAP_OF_PROCESS = "the process's heap"
Measure = tuple[str, list[int], list[int]]


def find_leaks(run: Run, *, tolerance_bytes: Number = TOLERANCE_BYTES) -> tuple[Finding, ...]:
    """A finding for each kind of stage that leaves more memory in use each time it runs.

    Looked at are stages of one name that ran at least 8 times after warming up, and the steps inside each stage;
    of each the process and every device. The process's heap is looked at where it was noted, beside its resident set.

    Args:
        run: The record.
        tolerance_bytes: What the process may grow by in each call.
    """
    by_name: dict[str, list[Stage]] = {}
    for stage in run.walk():
        by_name.setdefault(stage.name, []).append(stage)
    outermost = {stage.name for stage in run.stages}
    findings: list[Finding] = []
    for name, stages in by_name.items():
        for measures in after_each(stages):
            for where, readings, inside in measures:
                leaks = list(_leak_findings(name, "time it ran", where, readings, tolerance_bytes))
                if leaks and (name in outermost or _grows_inside(inside, leaks)):
                    findings += leaks
                    break
        for stage in stages:
            for where, readings in _after_each_step(stage):
                findings += _leak_findings(name, "step", where, readings, tolerance_bytes)
    return tuple(findings)


def _leak_findings(
    stage: str, period: str, where: str, readings: Sequence[int], tolerance_bytes: Number
) -> Iterator[Finding]:
    of_process = where in (PROCESS, HEAP_OF_PROCESS)
    grown = growth(
        readings,
        tolerance_bytes=tolerance_bytes if of_process else 0,
        rising=_RISING_SHARE if where == PROCESS else 0.0,
    )
    if grown is None or not grown.is_leak:
        return
    slope = grown.slope
    yield Finding(
        id="memory_leak",
        severity="warning",
        message=f"Memory of {where} grows by {slope.value / 2**20:.3g} MB each {period}, over {grown.calls} of them.",
        evidence={
            "where": where,
            "calls": grown.calls,
            "mb_per_call": slope.value / 2**20,
            "mb_per_call_lower": slope.lower / 2**20,
            "mb_per_call_upper": slope.upper / 2**20,
            "grown_mb": mib(round(grown.total_bytes)),
        },
        advice="Look for tensors, outputs or graphs that are kept between calls (missing no_grad, growing lists).",
        stage=stage,
    )


def _grows_inside(changes: Sequence[int], findings: Sequence[Finding]) -> bool:
    """Whether an inner stage itself makes the growth that is seen at its end."""
    if not findings:
        return False
    per_call = findings[0].evidence["mb_per_call"]
    return isinstance(per_call, float) and (mib(round(median(changes))) or 0.0) > per_call / 2


def _after_each_step(stage: Stage) -> Iterator[tuple[str, list[int]]]:
    columns = {PROCESS: stage.steps.rss_bytes, "the device in use": stage.steps.allocated_bytes}
    for where, column in columns.items():
        yield where, [figure for figure in column if figure is not None]


@dataclass(frozen=True, slots=True)
class Growth:
    """How memory grew over `calls` calls; `warm_up` calls before them were not looked at."""

    calls: int
    warm_up: int
    slope: Slope
    total_bytes: Number
    is_leak: bool


def growth(
    readings: Sequence[Number],
    *,
    warm_up: int | None = None,
    confidence: float = 0.99,
    tolerance_bytes: Number = TOLERANCE_BYTES,
    rising: float = 0.0,
) -> Growth | None:
    """Whether memory grows steadily from call to call.

    It does when, with this confidence, each call adds more than the tolerance, and the later half of the calls adds as
    well: caches that fill up and lazy initialisation grow at first and then stop.

    Args:
        readings: Bytes in use after each call, in order.
        warm_up: How many calls at the beginning to leave out; None: a quarter of them, at most 5.
        confidence: Of the bounds on the slope.
        tolerance_bytes: Growth by call that is no leak.
        rising: The share of calls, 0 to 1, that must add something. The resident set jumps with the largest call so
            far and stays there, which other calls do not add to.

    Returns:
        The growth; None when fewer than 8 calls are left.
    """
    skipped = min(_MOST_WARM_UP, len(readings) // 4) if warm_up is None else warm_up
    calls = readings[skipped:]
    if len(calls) < FEWEST_CALLS:
        return None
    slope = theil_sen(calls, confidence)
    later = theil_sen(calls[len(calls) // 2 :], confidence).value
    grows = slope.lower > tolerance_bytes and later > max(tolerance_bytes, _STILL_GROWING * slope.value)
    thinned = calls[:: math.ceil(len(calls) / MOST_READINGS)]
    steps = [after > before for before, after in pairwise(thinned)]
    return Growth(
        len(calls), skipped, slope, calls[-1] - calls[0], grows and sum(steps) >= rising * len(steps)
    )


def after_each(stages: Sequence[Stage]) -> Iterator[list[Measure]]:
    """Of the process, then of every device: where, bytes in use at the end of each stage, and how much each added.

    The process has two measures, the better one first.
    """
    impacts = [stage.memory for stage in stages if stage.memory is not None]
    heap = [_heap(stage) for stage in stages]
    process = [(i.baseline.process_rss_bytes, i.current.process_rss_bytes) for i in impacts]
    yield [(HEAP_OF_PROCESS, *_ends_and_changes(heap)), (PROCESS, *_ends_and_changes(process))]
    for device in dict.fromkeys(memory.device for i in impacts for memory in i.current.accelerators):
        pairs = [
            (i.baseline.accelerator(device).allocated_bytes, i.current.accelerator(device).allocated_bytes)
            for i in impacts
        ]
        yield [(device, *_ends_and_changes(pairs))]


def _heap(stage: Stage) -> tuple[int | None, int | None]:
    noted = stage.facts.get(HEAP)
    before, after = (noted.get(name) if isinstance(noted, Mapping) else None for name in ("before", "after"))
    return before if isinstance(before, int) else None, after if isinstance(after, int) else None


def _ends_and_changes(pairs: Sequence[tuple[int | None, int | None]]) -> tuple[list[int], list[int]]:
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    return [after for _, after in known], [after - before for before, after in known]
