"""Memory over time, and how busy devices were: every reading that a run holds, as points of counters."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from sigmascope.records.arithmetic import mib
from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.memory_over_time import PROCESS, SYSTEM, readable_curves
from sigmascope.records.merge import is_rank
from sigmascope.records.run import Run, Stage
from sigmascope.records.utilization import readable_utilization
from sigmascope.reports.tracing.slices import nanoseconds

PROCESS_COUNTER = "Process memory (MiB)"
SYSTEM_COUNTER = "System memory used (MiB)"
_COUNTERS: Final = {PROCESS: PROCESS_COUNTER, SYSTEM: SYSTEM_COUNTER}
SOME_DEVICE = "accelerator"
"""Steps say how much was allocated on the device in use; where no snapshot names it, this does."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One point of a counter, in MiB or per cent."""

    counter: str
    at_ns: int
    value: float
    unit: Literal["MiB", "%"] = "MiB"


def readings_of(run: Run, offset_ns: int = 0) -> list[Reading]:
    """All readings in a run, in order; of several of one counter at one moment the highest.

    Memory is read at the beginnings and ends of stages, at the peaks, where it was asked for at the ends of steps, and
    by the sampler. What the sampler read lies in the outermost stages: memory over time and how busy a device was.

    Of a merged run each rank is a process of its own, and a system of its own where the ranks ran on several.

    Args:
        run: The record.
        offset_ns: Where the trace's clock stands when the run begins.
    """
    of_each_rank = (PROCESS_COUNTER,) if run.host is not None else (PROCESS_COUNTER, SYSTEM_COUNTER)
    found: list[Reading] = []
    for stage in run.stages:
        if not is_rank(stage):
            found += _all_in((stage,), offset_ns)
            continue
        for reading in (*_memory_counters(stage, offset_ns), *_all_in(stage.children, offset_ns)):
            own = f"{stage.name}: {reading.counter}" if reading.counter in of_each_rank else reading.counter
            found.append(replace(reading, counter=own))
    highest: dict[tuple[str, int], Reading] = {}
    for reading in found:
        key = (reading.counter, reading.at_ns)
        highest[key] = max(reading, highest.get(key, reading), key=lambda one: one.value)
    return sorted(highest.values(), key=lambda reading: (reading.at_ns, reading.counter))


def _all_in(outermost: Sequence[Stage], offset_ns: int) -> Iterator[Reading]:
    """All readings of one process, by its outermost stages."""
    for stage in outermost:
        for one in stage.walk():
            yield from _memory_counters(one, offset_ns)
        yield from _curves(stage, offset_ns)
        yield from _business(stage, offset_ns)


def _memory_counters(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for counter, at_seconds, nbytes in (*_edges(stage), *_steps(stage), *_peaks(stage)):
        size = mib(nbytes)
        if size is not None and at_seconds is not None:
            yield Reading(counter, started_ns + nanoseconds(at_seconds), size)


def _curves(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for name, curve in readable_curves(stage).items():
        counter = _COUNTERS.get(name) or _allocated(name)
        for at_seconds, nbytes in zip(curve.at_seconds, curve.nbytes, strict=True):
            size = mib(nbytes)
            if size is not None and math.isfinite(at_seconds):
                yield Reading(counter, started_ns + nanoseconds(at_seconds), size)


def _business(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for device in readable_utilization(stage):
        for at_seconds, percent in zip(device.at_seconds, device.busy_series, strict=False):
            if math.isfinite(at_seconds) and math.isfinite(percent):
                yield Reading(f"{device.device} busy (%)", started_ns + nanoseconds(at_seconds), percent, "%")


Point = tuple[str, float | None, int | None]


def _edges(stage: Stage) -> Iterator[Point]:
    if stage.memory is not None:
        yield from _snapshot(stage.memory.baseline, 0.0)
        yield from _snapshot(stage.memory.current, stage.seconds)


def _snapshot(memory: MemorySnapshot, at_seconds: float) -> Iterator[Point]:
    yield PROCESS_COUNTER, at_seconds, memory.process_rss_bytes
    yield SYSTEM_COUNTER, at_seconds, memory.ram_used_bytes
    for device in memory.accelerators:
        yield _allocated(device.device), at_seconds, device.allocated_bytes
        yield _reserved(device.device), at_seconds, device.reserved_bytes


def _steps(stage: Stage) -> Iterator[Point]:
    steps = stage.steps
    device = None if stage.memory is None else stage.memory.current.device_in_use()
    ends = [started + seconds for started, seconds in zip(steps.started, steps.seconds, strict=True)]
    # A column that could not be measured is empty.
    for at_seconds, nbytes in zip(ends, steps.rss_bytes, strict=False):
        yield PROCESS_COUNTER, at_seconds, nbytes
    for at_seconds, nbytes in zip(ends, steps.allocated_bytes, strict=False):
        yield _allocated(device or SOME_DEVICE), at_seconds, nbytes


def _peaks(stage: Stage) -> Iterator[Point]:
    peak = stage.peak
    if peak is None:
        return
    yield PROCESS_COUNTER, peak.rss_at_seconds, peak.rss_bytes
    yield SYSTEM_COUNTER, peak.ram_used_at_seconds, peak.ram_used_bytes
    for device in peak.accelerators:
        yield _allocated(device.device), device.allocated_at_seconds, device.allocated_bytes
        yield _reserved(device.device), device.reserved_at_seconds, device.reserved_bytes


def _allocated(device: str) -> str:
    return f"{device} allocated (MiB)"


def _reserved(device: str) -> str:
    return f"{device} reserved (MiB)"
