"""What of a run can be compared with other runs: seconds, steps and peaks, each by name, and by whose clock."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from sigmascope.records.run import Run, Stage, device_seconds, is_duration

Unit = Literal["seconds", "bytes"]
_ONLY_STAGE = "generation"
"""Of a run that a `PerformanceMonitor` made."""
_FEWEST_LEFT: Final = 5
"""Fewer on each side cannot give p < 0.01 by Mann and Whitney's test."""
_SHARE_LEFT: Final = 0.8


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run. More is worse.

    Attributes:
        name: Such as "denoising", "denoising step", "cuda:0 peak".
        unit: Of the values.
        values: One a run, in the order of the runs; fewer where a run has none.
        untimed: How many runs are left out since the accelerator's clock, which the others go by, did not time them.
    """

    name: str
    unit: Unit
    values: tuple[float, ...]
    untimed: int = 0


def figures_of(runs: Sequence[Run], on_device: Collection[str] = ()) -> dict[str, Figure]:
    """The figures of several runs of the same work, by name.

    One value a run: a run's steps are summarised by their median, since they are not independent of each other; the
    first step of several is left out. A stage that a run passes repeatedly counts with the sum of its times, those that are
    folded included; steps are those in full. A total is
    that of runs with several stages: of a single generation it would add no more than what the monitor itself took.
    What cannot be a time is left out, and a stage with such a time in it: see `impossible_times`.

    Args:
        runs: Any number, in order.
        on_device: Stages and steps whose time is that of the accelerator's clock (see `timed_on_device`), without the runs
            that it did not time; others the host's.
    """
    values: dict[tuple[str, Unit], list[float]] = {}
    untimed: Counter[str] = Counter()
    for run in runs:
        for name, unit, value in _figures_of_run(run, on_device):
            if unit == "bytes" or is_duration(value):
                values.setdefault((name, unit), []).append(value)
            elif name in on_device:
                untimed[name] += 1
    return {name: Figure(name, unit, tuple(found), untimed[name]) for (name, unit), found in values.items()}


def _figures_of_run(run: Run, on_device: Collection[str]) -> Iterable[tuple[str, Unit, float]]:
    if [stage.name for stage in run.stages] != [_ONLY_STAGE]:
        yield "total", "seconds", run.seconds
    for name, stages in _by_name(run).items():
        times = [device_seconds(stage) if name in on_device else stage.seconds for stage in stages]
        seconds = [one for one in times if one is not None and is_duration(one)]
        is_whole = len(seconds) == len(times)
        yield name, "seconds", sum(seconds) + _folded_seconds(run, name, on_device) if is_whole else math.nan
        columns = [timed_steps(stage, on_device) for stage in stages if len(stage.steps)]
        # compiling, autotuning and lazy loading fall into the first; it is in the stage's time all the same
        steps = [one for column in columns for one in warm(column)]
        if columns:
            yield (
                step_name(stages[0]),
                "seconds",
                median(steps) if steps and all(map(known, columns)) else math.nan,
            )
    peak = run.peak()
    if peak.rss_bytes is not None:
        yield "process peak", "bytes", float(peak.rss_bytes)
    for device in peak.accelerators:
        if device.allocated_bytes is not None:
            yield f"{device.device} peak", "bytes", float(device.allocated_bytes)


def _folded_seconds(run: Run, name: str, on_device: Collection[str]) -> float:
    """What folded stages of a name took together; NaN where the accelerator was to time them and did not time all."""
    found = 0.0
    for path, sums in {} if run.folded is None else run.folded.stages.items():
        *around, last = path.split("/")
        if last == name and name not in around:
            if name in on_device and sums.timed_on_device < sums.count:
                return math.nan
            found += sums.device_seconds if name in on_device else sums.seconds
    return found


def _by_name(run: Run) -> Mapping[str, list[Stage]]:
    """Stages by name; one inside another of the same name is part of that one."""
    found: dict[str, list[Stage]] = {}

    def visit(stage: Stage, around: frozenset[str]) -> None:
        if stage.name not in around:
            found.setdefault(stage.name, []).append(stage)
        for child in stage.children:
            visit(child, around | {stage.name})

    for stage in run.stages:
        visit(stage, frozenset())
    return found


def timed_on_device(*sides: Sequence[Run]) -> frozenset[str]:
    """Names of the stages, and of their steps, to be compared by the accelerator's clock.

    A host that only queues work is done with a stage long before the device is. So the device's clock is the one to
    compare by, where enough runs have it: two clocks are not comparable, so that the others are left out. Enough is all
    of a side that passed the stage; or most, if as many are left as a check takes to tell a change from chance. What is
    missing may be missing because it took long, so that it must be few. A generation's own time is what somebody waits for.

    Args:
        sides: Runs of the same work, such as a baseline's and the new ones; each has to have enough.
    """
    counted = [_count_timed(side) for side in sides]
    names = {name for found in counted for name in found} - {_ONLY_STAGE}
    return frozenset(
        name for name in names if all(_are_enough(*found[name]) for found in counted if name in found)
    )


def _count_timed(runs: Sequence[Run]) -> Mapping[str, tuple[int, int]]:
    """By name of stages and of their steps: how many runs the device timed throughout, of how many that have them."""
    found: dict[str, tuple[int, int]] = {}
    for run in runs:
        of_run: dict[str, bool] = {}
        for stage in run.walk():
            of_run[stage.name] = of_run.get(stage.name, True) and device_seconds(stage) is not None
            if len(stage.steps):
                name = step_name(stage)
                of_run[name] = of_run.get(name, True) and is_timed_on_device(stage)
        for name, is_timed in of_run.items():
            timed, count = found.get(name, (0, 0))
            found[name] = (timed + is_timed, count + 1)
    return found


def _are_enough(timed: int, runs: int) -> bool:
    return timed == runs or (timed >= _FEWEST_LEFT and timed >= _SHARE_LEFT * runs)


def timed_steps(stage: Stage, on_device: Collection[str]) -> tuple[float | None, ...]:
    """Of a stage's steps, one entry each, by one clock: None for what that one did not time.

    Args:
        stage: With steps or without.
        on_device: Stages and steps that go by the accelerator's clock (see `timed_on_device`).
    """
    by_device = step_name(stage) in on_device
    if by_device and not is_timed_on_device(stage):
        return (None,) * len(stage.steps)
    return step_seconds(stage, on_device=by_device)


def step_seconds(stage: Stage, *, on_device: bool = True) -> tuple[float | None, ...]:
    """Of a stage's steps, one entry each: by the accelerator's clock where it timed any of them, else by the host's.

    The two are never mixed, since the host's may only tell how long a step took to queue: a step that the accelerator
    was not seen to finish is None. So is what cannot be a time: less than 0, infinite, NaN.

    Args:
        stage: With steps or without.
        on_device: Whether the accelerator's clock may be taken.
    """
    column = stage.steps.gpu_seconds if on_device and is_timed_on_device(stage) else stage.steps.seconds
    return tuple(one if is_duration(one) else None for one in column)


def seconds_in_steps(stage: Stage) -> float:
    """What a stage's steps took together, without what lies between them.

    By the accelerator's clock where it timed them all: a sum of some would be too small.
    """
    seconds = step_seconds(stage)
    return sum(known(seconds if None not in seconds else step_seconds(stage, on_device=False)), 0.0)


def is_timed_on_device(stage: Stage) -> bool:
    """Whether the accelerator's clock timed any of a stage's steps."""
    return any(map(is_duration, stage.steps.gpu_seconds))


def step_name(stage: Stage) -> str:
    """What the figure of a stage's steps is called."""
    return f"{stage.name} step"


def known(seconds: Iterable[float | None]) -> list[float]:
    """Those that were measured."""
    return [one for one in seconds if one is not None]


def warm(seconds: tuple[float | None, ...]) -> list[float]:
    """Those that were measured of all but the first, into which compiling falls; of a single step that one."""
    return known(seconds[1:] if len(seconds) > 1 else seconds)
