"""Runs as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's trace event format in its JSON object form: a run is a process, its stages and steps are
nested slices, memory and how busy devices were are counters, findings and errors are instants. Times are
microseconds since the first run began. A click on a slice shows its arguments: flat names with scalars.

A viewer draws what lies inside what on one track by time alone. So a track may hold only slices that nest, and
those of other threads, which overlap, get tracks of their own.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError
from sigmascope.records.memory import MemorySnapshot, mib
from sigmascope.records.merge import is_rank
from sigmascope.records.performance import (
    MEMORY_OVER_TIME,
    PROCESS,
    SYSTEM,
    UTILIZATION,
    readable_curves,
    readable_utilization,
)
from sigmascope.records.prompts import OWN_NAME, PromptPrivacy, cleaner, without_texts
from sigmascope.records.recorded import Recorded
from sigmascope.records.run import (
    Finding,
    ModuleFacts,
    Run,
    Stage,
    Steps,
    TensorFacts,
    folded_in_words,
    impossible_times,
)
from sigmascope.records.serialization import dumps, to_plain
from sigmascope.reports.surfaces import Surface
from sigmascope.units import printable

Event = dict[str, Any]

UNNAMED = "unnamed"

# Of the arguments: characters of a text, facts, and levels of nesting.
LONGEST_TEXT = 300
MOST_FACTS = 100
_DEEPEST = 3

PROCESS_COUNTER = "Process memory (MiB)"
SYSTEM_COUNTER = "System memory used (MiB)"
_COUNTERS: Final = {PROCESS: PROCESS_COUNTER, SYSTEM: SYSTEM_COUNTER}
SOME_DEVICE = "accelerator"
"""Steps say how much was allocated on the device in use; where no snapshot names it, this does."""

_NAMED_BY_HOSTS: Final = ("stage", "error")
"""Kinds of events that are called by the name of a stage."""

Point = tuple[str, float | None, int | None]
"""The name of a counter, seconds since the stage began, and bytes."""


def write_trace(
    runs: Recorded | Iterable[Recorded], path: str | os.PathLike[str], *, prompts: PromptPrivacy = "hash"
) -> None:
    """Write runs as one trace, whole or not at all, for its owner alone to read (mode 0600).

    Args:
        runs: Each becomes a process, at the time at which it began; or one alone, or what has one, such as a `Watch`.
        path: The file; viewers expect the ending .json.
        prompts: What the trace says of prompts that the runs hold as text. Unless it is "full", errors of stages have
            only their type and place.

    Raises:
        ConfigError: A run holds what cannot be a time; the message says where.
        WriteError: The file cannot be written. What was there before stays.
        TypeError: A fact is of a type that JSON lacks.
    """
    SURFACE.write(runs, path, prompts)


def trace_of(runs: Sequence[Run], *, prompts: PromptPrivacy = "hash") -> dict[str, Any]:
    """Runs as the document that a trace file holds.

    Args:
        runs: Each becomes a process, at the time at which it began.
        prompts: What the trace says of prompts that the runs hold as text. Unless it is "full", errors of stages have
            only their type and place.

    Raises:
        ConfigError: A run holds what cannot be a time; the message says where.
    """
    _require_times(runs)
    beginnings = [_microseconds(run) for run in runs]
    first = min(beginnings, default=0)
    events: list[Event] = []
    for number, (run, begun) in enumerate(zip(runs, beginnings, strict=True), start=1):
        clean = cleaner(run, prompts)
        run_events = _run_events(without_texts(run, prompts), number, (begun - first) * 1000)
        # The rest of an event is ours, whatever a prompt says. A text that is cut is no longer recognised.
        for event in run_events:
            name = event["name"]
            is_ours = event.get("cat") not in _NAMED_BY_HOSTS or OWN_NAME.fullmatch(name)
            shown = {"name": name if is_ours else clean(name), "args": _cut(clean(event["args"]))}
            events.append(_readable({**event, **shown}))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"Sigmascope {__version__}", "runs": [run.id for run in runs]},
    }


SURFACE: Final = Surface(
    "trace",
    "Write a trace that Perfetto (ui.perfetto.dev) opens.",
    lambda runs, prompts: dumps(trace_of(runs, prompts=prompts)) + "\n",
    noun="trace",
    is_private=True,
)


def _require_times(runs: Sequence[Run]) -> None:
    for run in runs:
        for wrong in impossible_times(run):
            raise ConfigError(
                f"The run {printable(run.id)} has no place on an axis of time: {wrong}.",
                hint="Mend the file that it was loaded from, or record the run again.",
            )


def _microseconds(run: Run) -> int:
    """When the run began, in microseconds of the world's clock."""
    begun = datetime.fromisoformat(run.started_at)
    return round((begun if begun.tzinfo else begun.replace(tzinfo=UTC)).timestamp() * 1e6)


def _run_events(run: Run, pid: int, offset_ns: int) -> list[Event]:
    slices = slices_of(run, offset_ns)
    tracks = tracks_of(slices)
    end_ns = offset_ns + nanoseconds(run.seconds)
    return [
        *_process(run, pid),
        *(event for track in sorted({0, *tracks.values()}) for event in _thread(pid, track)),
        *(_slice(part, pid, tracks[part]) for part in slices),
        *(event for part in slices for event in _instants(part, pid, tracks[part])),
        *(_finding(finding, pid, 0, end_ns, "p") for finding in run.findings),
        *_folded(run, pid, offset_ns),
        *_counters(run, pid, offset_ns),
    ]


def _process(run: Run, pid: int) -> Iterator[Event]:
    label = run.id if run.complete else f"{run.id}, not complete"
    facts = {**flat_facts(run.facts), "id": run.id, "started_at": run.started_at, "complete": run.complete}
    yield _metadata("process_name", pid, 0, {"name": run.name or "run"})
    yield _metadata("process_labels", pid, 0, {"labels": label})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    yield _metadata("sigmascope_run", pid, 0, facts)


def _metadata(name: str, pid: int, tid: int, arguments: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments}


def _thread(pid: int, track: int) -> Iterator[Event]:
    name = "stages and steps" if track == 0 else f"stages and steps, at the same time ({track + 1})"
    yield _metadata("thread_name", pid, track, {"name": name})
    yield _metadata("thread_sort_index", pid, track, {"sort_index": track})


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """A stretch of time with a name. `parent` is the stage in which it was recorded."""

    name: str
    kind: Literal["stage", "step"]
    started_ns: int
    ended_ns: int
    parent: "Slice | None" = None
    stage: Stage | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def lies_in(self, other: "Slice") -> bool:
        """Whether `other` is a stage around this one, or a step of such a stage."""
        around = self.parent
        while around is not None:
            if other is around or other.parent is around:
                return True
            around = around.parent
        return False


def _slice(part: Slice, pid: int, track: int) -> Event:
    return {
        "ph": "X",
        "name": part.name,
        "cat": part.kind,
        "ts": part.started_ns / 1e3,
        "dur": (part.ended_ns - part.started_ns) / 1e3,
        "pid": pid,
        "tid": track,
        "args": part.arguments,
    }


def _instants(part: Slice, pid: int, track: int) -> Iterator[Event]:
    if part.stage is None:
        return
    if part.stage.error is not None:
        arguments: Event = {"error": part.stage.error}
        yield _instant(f"{part.name} failed", "error", pid, track, part.ended_ns, arguments)
    for finding in part.stage.findings:
        yield _finding(finding, pid, track, part.ended_ns, "t")


def _instant(
    name: str, kind: str, pid: int, tid: int, at_ns: int, arguments: Event, scope: str = "t"
) -> Event:
    return {
        "ph": "i",
        "name": name,
        "cat": kind,
        "ts": at_ns / 1e3,
        "pid": pid,
        "tid": tid,
        "s": scope,
        "args": arguments,
    }


def _finding(finding: Finding, pid: int, track: int, at_ns: int, scope: str) -> Event:
    return _instant(finding.id, "finding", pid, track, at_ns, finding_arguments(finding), scope)


def _folded(run: Run, pid: int, offset_ns: int) -> Iterator[Event]:
    """Where stages that are no longer in the record ended, with their sums."""
    if run.folded is not None:
        at_ns = offset_ns + nanoseconds(run.folded.last_at_seconds)
        arguments = flat_facts(to_plain(run.folded))
        yield _instant(folded_in_words(run.folded), "folded", pid, 0, at_ns, arguments, "p")


def _counters(run: Run, pid: int, offset_ns: int) -> Iterator[Event]:
    for reading in readings_of(run, offset_ns):
        yield {
            "ph": "C",
            "name": reading.counter,
            "cat": "reading",
            "ts": reading.at_ns / 1e3,
            "pid": pid,
            "tid": 0,
            "args": {reading.unit: reading.value},
        }


def _readable(event: Event) -> Event:
    """The event with what viewers refuse mended: a name that is empty, and halves of surrogate pairs."""
    return {**_whole_characters(event), "name": _whole_characters(event["name"]) or UNNAMED}


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return [_whole_characters(item) for item in value] if isinstance(value, list) else value


def slices_of(run: Run, offset_ns: int = 0) -> list[Slice]:
    """Every stage and step of a run, by their beginning, outer ones first."""
    slices = [part for stage in run.stages for part in _slices_in(stage, None, offset_ns)]
    return sorted(slices, key=lambda part: (part.started_ns, -part.ended_ns))


def _slices_in(stage: Stage, parent: Slice | None, offset_ns: int) -> Iterator[Slice]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    ended_ns = started_ns + nanoseconds(stage.seconds)
    own = Slice(stage.name, "stage", started_ns, ended_ns, parent, stage, stage_arguments(stage))
    yield own
    for index, (started, seconds) in enumerate(zip(stage.steps.started, stage.steps.seconds, strict=True)):
        step_ns = started_ns + nanoseconds(started)
        arguments = step_arguments(stage.steps, index)
        yield Slice(
            f"step {index + 1}", "step", step_ns, step_ns + nanoseconds(seconds), own, None, arguments
        )
    for child in stage.children:
        yield from _slices_in(child, own, offset_ns)


def tracks_of(slices: Sequence[Slice]) -> dict[Slice, int]:
    """A track for each slice: that of its stage where it nests there, else the first where it does, from 0."""
    chosen: dict[Slice, int] = {}
    open_on: list[list[Slice]] = []
    for part in slices:
        for track in open_on:
            while track and track[-1].ended_ns <= part.started_ns:
                track.pop()
        first = chosen.get(part.parent, 0) if part.parent is not None else 0
        order = sorted(range(len(open_on)), key=lambda index: (index != first, index))
        place = next((index for index in order if _fits(part, open_on[index])), len(open_on))
        if place == len(open_on):
            open_on.append([])
        open_on[place].append(part)
        chosen[part] = place
    return chosen


def _fits(part: Slice, open_slices: Sequence[Slice]) -> bool:
    if not open_slices:
        return True
    innermost = open_slices[-1]
    return part.ended_ns <= innermost.ended_ns and part.lies_in(innermost)


def nanoseconds(seconds: float) -> int:
    """Seconds as the nanoseconds that they were computed from, so that edges which met still meet."""
    return round(seconds * 1e9)


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
    """
    of_each_rank = (PROCESS_COUNTER,) if run.host is not None else (PROCESS_COUNTER, SYSTEM_COUNTER)
    readings: list[Reading] = []
    for stage in run.stages:
        if not is_rank(stage):
            readings += _all_in((stage,), offset_ns)
            continue
        for reading in (*_memory_counters(stage, offset_ns), *_all_in(stage.children, offset_ns)):
            own = f"{stage.name}: {reading.counter}" if reading.counter in of_each_rank else reading.counter
            readings.append(replace(reading, counter=own))
    highest: dict[tuple[str, int], Reading] = {}
    for reading in readings:
        key = (reading.counter, reading.at_ns)
        highest[key] = max(reading, highest.get(key, reading), key=lambda reading: reading.value)
    return sorted(highest.values(), key=lambda reading: (reading.at_ns, reading.counter))


def _all_in(outermost: Sequence[Stage], offset_ns: int) -> Iterator[Reading]:
    """All readings of one process, by its outermost stages."""
    for stage in outermost:
        for inner in stage.walk():
            yield from _memory_counters(inner, offset_ns)
        yield from _curve_readings(stage, offset_ns)
        yield from _busy_readings(stage, offset_ns)


def _memory_counters(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for counter, at_seconds, nbytes in (*_edge_points(stage), *_step_points(stage), *_peak_points(stage)):
        size = mib(nbytes)
        if size is not None and at_seconds is not None:
            yield Reading(counter, started_ns + nanoseconds(at_seconds), size)


def _edge_points(stage: Stage) -> Iterator[Point]:
    if stage.memory is not None:
        yield from _snapshot_points(stage.memory.baseline, 0.0)
        yield from _snapshot_points(stage.memory.current, stage.seconds)


def _snapshot_points(memory: MemorySnapshot, at_seconds: float) -> Iterator[Point]:
    yield PROCESS_COUNTER, at_seconds, memory.process_rss_bytes
    yield SYSTEM_COUNTER, at_seconds, memory.ram_used_bytes
    for device in memory.accelerators:
        yield _allocated(device.device), at_seconds, device.allocated_bytes
        yield _reserved(device.device), at_seconds, device.reserved_bytes


def _allocated(device: str) -> str:
    return f"{device} allocated (MiB)"


def _reserved(device: str) -> str:
    return f"{device} reserved (MiB)"


def _step_points(stage: Stage) -> Iterator[Point]:
    steps = stage.steps
    device = None if stage.memory is None else stage.memory.current.device_in_use()
    ends = [started + seconds for started, seconds in zip(steps.started, steps.seconds, strict=True)]
    # A column that could not be measured is empty.
    for at_seconds, nbytes in zip(ends, steps.rss_bytes, strict=False):
        yield PROCESS_COUNTER, at_seconds, nbytes
    for at_seconds, nbytes in zip(ends, steps.allocated_bytes, strict=False):
        yield _allocated(device or SOME_DEVICE), at_seconds, nbytes


def _peak_points(stage: Stage) -> Iterator[Point]:
    peak = stage.peak
    if peak is None:
        return
    yield PROCESS_COUNTER, peak.rss_at_seconds, peak.rss_bytes
    yield SYSTEM_COUNTER, peak.ram_used_at_seconds, peak.ram_used_bytes
    for device in peak.accelerators:
        yield _allocated(device.device), device.allocated_at_seconds, device.allocated_bytes
        yield _reserved(device.device), device.reserved_at_seconds, device.reserved_bytes


def _curve_readings(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for name, curve in readable_curves(stage).items():
        counter = _COUNTERS.get(name) or _allocated(name)
        for at_seconds, nbytes in zip(curve.at_seconds, curve.nbytes, strict=True):
            size = mib(nbytes)
            if size is not None and math.isfinite(at_seconds):
                yield Reading(counter, started_ns + nanoseconds(at_seconds), size)


def _busy_readings(stage: Stage, offset_ns: int) -> Iterator[Reading]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    for device in readable_utilization(stage):
        for at_seconds, percent in zip(device.at_seconds, device.busy_series, strict=False):
            if math.isfinite(at_seconds) and math.isfinite(percent):
                yield Reading(f"{device.device} busy (%)", started_ns + nanoseconds(at_seconds), percent, "%")


def stage_arguments(stage: Stage) -> dict[str, Any]:
    """What is known of a stage beside its time. What is unknown is left out; memory is in MiB."""
    devices, curves = readable_utilization(stage), readable_curves(stage)
    # As counters; a caller's own fact of such a name is told as it is.
    drawn = {name for name, is_drawn in ((UTILIZATION, devices), (MEMORY_OVER_TIME, curves)) if is_drawn}
    known = {
        "error": stage.error,
        **_memory_figures(stage),
        **{
            f"{device.device}_busy_percent": device.busy_percent.mean
            for device in devices
            if device.busy_percent
        },
        **{f"module.{name}": _module_text(facts) for name, facts in stage.modules.items()},
        **{f"tensor.{name}": _tensor_text(facts) for name, facts in stage.tensors.items()},
        **flat_facts({name: fact for name, fact in stage.facts.items() if name not in drawn}),
        **{f"unavailable.{name}": reason for name, reason in stage.unavailable.items()},
    }
    return {name: value for name, value in known.items() if value is not None}


def _memory_figures(stage: Stage) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if stage.memory is not None:
        figures["process_change_mib"] = stage.memory.as_dict()["process"]["rss_change_mb"]
    if stage.peak is not None:
        figures["process_peak_mib"] = mib(stage.peak.rss_bytes)
        for device in stage.peak.accelerators:
            figures[f"{device.device}_peak_allocated_mib"] = mib(device.allocated_bytes)
            figures[f"{device.device}_peak_reserved_mib"] = mib(device.reserved_bytes)
    return figures


def _module_text(facts: ModuleFacts) -> str:
    count = "" if facts.parameters is None else f", {facts.parameters:,} parameters"
    return f"{facts.class_name}{count}"


def _tensor_text(facts: TensorFacts) -> str:
    shape = "×".join(map(str, facts.shape)) or "scalar"
    return f"{shape} {facts.dtype.removeprefix('torch.')} on {facts.device}"


def _cut(arguments: Event) -> Event:
    return {
        name: f"{value[:LONGEST_TEXT]}…" if isinstance(value, str) and len(value) > LONGEST_TEXT else value
        for name, value in arguments.items()
    }


def step_arguments(steps: Steps, index: int) -> dict[str, Any]:
    """One row of the columns. A reading that failed is left out."""
    row = {
        "gpu_ms": None if (seconds := _at(steps.gpu_seconds, index)) is None else seconds * 1e3,
        "process_mib": mib(_at(steps.rss_bytes, index)),
        "allocated_mib": mib(_at(steps.allocated_bytes, index)),
    }
    return {name: value for name, value in row.items() if value is not None}


def _at(column: Sequence[Any], index: int) -> Any:
    return column[index] if column else None


def finding_arguments(finding: Finding) -> dict[str, Any]:
    """A finding's words and its evidence."""
    words = {"severity": finding.severity, "message": finding.message, "what_to_do": finding.advice}
    evidence = {f"evidence.{name}": value for name, value in finding.evidence.items()}
    return {name: value for name, value in {**words, **evidence}.items() if value is not None}


def flat_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars and their lists, nested names joined by dots; how many there are more, beyond the first 100."""
    flat = dict(_flat(facts, "", 1))
    shown = dict(list(flat.items())[:MOST_FACTS])
    if len(flat) > len(shown):
        shown["facts_left_out"] = len(flat) - len(shown)
    return shown


def _flat(facts: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                yield from _flat(value, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not any(isinstance(item, Mapping) for item in value):
                yield f"{prefix}{key}", ", ".join(map(str, value))
        elif value is not None:
            yield f"{prefix}{key}", value
