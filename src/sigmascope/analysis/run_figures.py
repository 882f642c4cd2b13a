"""What of a run can be compared with other runs: seconds, steps and peaks, each by name."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sigmascope.analysis.step_times import is_timed_on_device, step_seconds, warm
from sigmascope.records.run import Run, Stage
from sigmascope.records.stage_seconds import device_seconds, is_duration, stage_seconds

Unit = Literal["seconds", "bytes"]
_ONLY_STAGE = "generation"
"""Of a run that a `PerformanceMonitor` made."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run. More is worse.

    Attributes:
        name: Such as "denoising", "denoising step", "cuda:0 peak".
        unit: Of the values.
        values: One a run, in the order of the runs; fewer where a run has none.
    """

    name: str
    unit: Unit
    values: tuple[float, ...]


def timed_on_device(runs: Sequence[Run]) -> frozenset[str]:
    """Names of the stages, and of their steps, whose time on the accelerator is known wherever they appear in these runs.

    A host that only queues work is done with a stage long before the device is. So the device's clock is the one to
    compare by, if all have it: two clocks are not comparable. A generation's own time is what somebody waits for.

    Args:
        runs: Of both sides.
    """
    known: set[str] = set()
    unknown = {_ONLY_STAGE}
    for run in runs:
        for stage in run.walk():
            (unknown if device_seconds(stage) is None else known).add(stage.name)
            if len(stage.steps):
                (known if is_timed_on_device(stage) else unknown).add(step_name(stage))
    return frozenset(known - unknown)


def step_name(stage: Stage) -> str:
    """What the figure of a stage's steps is called."""
    return f"{stage.name} step"


def figures_of(runs: Sequence[Run], on_device: Collection[str] = ()) -> dict[str, Figure]:
    """The figures of several runs of the same work, by name.

    One value a run: a run's steps are summarised by their median, since they are not independent of each other; the
    first step of several is left out. A stage that a run passes repeatedly counts with the sum of its times. A total is
    that of runs with several stages: of a single generation it would add no more than what the monitor itself took.
    What cannot be a time is left out, and a stage with such a time in it: see `impossible_times`.

    Args:
        runs: Any number, in order.
        on_device: Stages and steps whose time is that of the accelerator's clock (see `timed_on_device`); others the host's.
    """
    values: dict[tuple[str, Unit], list[float]] = {}
    for run in runs:
        for name, unit, value in _of_run(run, on_device):
            if unit == "bytes" or is_duration(value):
                values.setdefault((name, unit), []).append(value)
    return {name: Figure(name, unit, tuple(found)) for (name, unit), found in values.items()}


def _of_run(run: Run, on_device: Collection[str]) -> Iterable[tuple[str, Unit, float]]:
    if [stage.name for stage in run.stages] != [_ONLY_STAGE]:
        yield "total", "seconds", run.seconds
    for name, stages in _by_name(run).items():
        clock = stage_seconds if name in on_device else _host_seconds
        times = [clock(stage) for stage in stages]
        yield name, "seconds", sum(times) if all(map(is_duration, times)) else math.nan
        steps = [
            seconds
            for stage in stages
            # compiling, autotuning and lazy loading fall into the first; it is in the stage's time all the same
            for seconds in warm(step_seconds(stage, on_device=step_name(stage) in on_device))
        ]
        if steps:
            yield f"{name} step", "seconds", median(steps)
    peak = run.peak()
    if peak.rss_bytes is not None:
        yield "process peak", "bytes", float(peak.rss_bytes)
    for device in peak.accelerators:
        if device.allocated_bytes is not None:
            yield f"{device.device} peak", "bytes", float(device.allocated_bytes)


def _host_seconds(stage: Stage) -> float:
    return stage.seconds


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
