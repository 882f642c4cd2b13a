"""Memory over time: every reading that a run holds, as points of counters."""

from collections.abc import Iterator
from dataclasses import dataclass

from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.run import Run, Stage
from sigmascope.reports.tracing.slices import nanoseconds

PROCESS = "Process memory (MiB)"
SYSTEM = "System memory used (MiB)"
SOME_DEVICE = "accelerator"
"""Steps say how much was allocated on the device in use; where no snapshot names it, this does."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One point of a counter."""

    counter: str
    at_ns: int
    nbytes: int


def readings_of(run: Run, offset_ns: int = 0) -> list[Reading]:
    """All readings of memory in a run, in order; of several at one moment the highest.

    They come from the beginnings and ends of stages, the ends of steps, and the peaks with their times.

    Args:
        run: The record.
        offset_ns: Where the trace's clock stands when the run begins.
    """
    highest: dict[tuple[str, int], int] = {}
    for stage in run.walk():
        for reading in _stage_readings(stage, offset_ns + nanoseconds(stage.started_seconds)):
            key = (reading.counter, reading.at_ns)
            highest[key] = max(reading.nbytes, highest.get(key, 0))
    found = [Reading(counter, at_ns, nbytes) for (counter, at_ns), nbytes in highest.items()]
    return sorted(found, key=lambda reading: (reading.at_ns, reading.counter))


def _stage_readings(stage: Stage, started_ns: int) -> Iterator[Reading]:
    for counter, at_seconds, nbytes in (*_edges(stage), *_steps(stage), *_peaks(stage)):
        if nbytes is not None and at_seconds is not None:
            yield Reading(counter, started_ns + nanoseconds(at_seconds), nbytes)


Point = tuple[str, float | None, int | None]


def _edges(stage: Stage) -> Iterator[Point]:
    if stage.memory is not None:
        yield from _snapshot(stage.memory.baseline, 0.0)
        yield from _snapshot(stage.memory.current, stage.seconds)


def _snapshot(memory: MemorySnapshot, at_seconds: float) -> Iterator[Point]:
    yield PROCESS, at_seconds, memory.process_rss_bytes
    yield SYSTEM, at_seconds, memory.ram_used_bytes
    for device in memory.accelerators:
        yield _allocated(device.device), at_seconds, device.allocated_bytes
        yield _reserved(device.device), at_seconds, device.reserved_bytes


def _steps(stage: Stage) -> Iterator[Point]:
    steps = stage.steps
    device = None if stage.memory is None else stage.memory.current.device_in_use()
    ends = [started + seconds for started, seconds in zip(steps.started, steps.seconds, strict=True)]
    # A column that could not be measured is empty.
    for at_seconds, nbytes in zip(ends, steps.rss_bytes, strict=False):
        yield PROCESS, at_seconds, nbytes
    for at_seconds, nbytes in zip(ends, steps.allocated_bytes, strict=False):
        yield _allocated(device or SOME_DEVICE), at_seconds, nbytes


def _peaks(stage: Stage) -> Iterator[Point]:
    peak = stage.peak
    if peak is None:
        return
    yield PROCESS, peak.rss_at_seconds, peak.rss_bytes
    yield SYSTEM, peak.ram_used_at_seconds, peak.ram_used_bytes
    for device in peak.accelerators:
        yield _allocated(device.device), device.allocated_at_seconds, device.allocated_bytes
        yield _reserved(device.device), device.reserved_at_seconds, device.reserved_bytes


def _allocated(device: str) -> str:
    return f"{device} allocated (MiB)"


def _reserved(device: str) -> str:
    return f"{device} reserved (MiB)"
