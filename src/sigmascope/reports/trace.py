"""Runs as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's trace event format in its JSON object form: a run is a process, its stages and steps are
nested slices, memory is counters, findings and errors are instants. Times are microseconds since the first run
began.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError
from sigmascope.printable import printable
from sigmascope.records import plain_json
from sigmascope.records.atomic import atomic_path
from sigmascope.records.finding import Finding
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run
from sigmascope.records.times import impossible_times
from sigmascope.reports.tracing.arguments import finding_arguments, flat_facts
from sigmascope.reports.tracing.counters import readings_of
from sigmascope.reports.tracing.private import without_prompts
from sigmascope.reports.tracing.slices import Slice, nanoseconds, slices_of, tracks_of

Event = dict[str, Any]

UNNAMED = "unnamed"


def write_trace(
    runs: Sequence[Run], path: str | os.PathLike[str], *, prompts: PromptPrivacy = "hash"
) -> None:
    """Write runs as one trace, whole or not at all.

    Args:
        runs: Each becomes a process, at the time at which it began.
        path: The file; viewers expect the ending .json.
        prompts: What the trace says of prompts that the runs hold as text.

    Raises:
        ConfigError: A run holds what cannot be a time; the message says where.
        WriteError: The file cannot be written. What was there before stays.
        TypeError: A fact is of a type that JSON lacks.
    """
    text = plain_json.dumps(trace_of(runs, prompts=prompts))
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def trace_of(runs: Sequence[Run], *, prompts: PromptPrivacy = "hash") -> dict[str, Any]:
    """Runs as the document that a trace file holds.

    Args:
        runs: Each becomes a process, at the time at which it began.
        prompts: What the trace says of prompts that the runs hold as text.

    Raises:
        ConfigError: A run holds what cannot be a time; the message says where.
    """
    _require_times(runs)
    beginnings = [_microseconds(run) for run in runs]
    first = min(beginnings, default=0)
    events: list[Event] = []
    for number, (run, begun) in enumerate(zip(runs, beginnings, strict=True), start=1):
        clean = without_prompts(run, prompts)
        found = _run_events(run, number, (begun - first) * 1000)
        # The rest of an event is ours, whatever a prompt says.
        events += (_readable({**event, "args": clean(event["args"])}) for event in found)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"Sigmascope {__version__}", "runs": [run.id for run in runs]},
    }


def _require_times(runs: Sequence[Run]) -> None:
    for run in runs:
        for wrong in impossible_times(run):
            raise ConfigError(
                f"The run {printable(run.id)} has no place on an axis of time: {wrong}.",
                hint="Mend the file that it was loaded from, or record the run again.",
            )


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
        *_counters(run, pid, offset_ns),
    ]


def _process(run: Run, pid: int) -> Iterator[Event]:
    label = run.id if run.complete else f"{run.id}, not complete"
    facts = {**flat_facts(run.facts), "id": run.id, "started_at": run.started_at, "complete": run.complete}
    yield _metadata("process_name", pid, 0, {"name": run.name or "run"})
    yield _metadata("process_labels", pid, 0, {"labels": label})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    yield _metadata("sigmascope_run", pid, 0, facts)


def _thread(pid: int, track: int) -> Iterator[Event]:
    name = "stages and steps" if track == 0 else f"stages and steps, at the same time ({track + 1})"
    yield _metadata("thread_name", pid, track, {"name": name})
    yield _metadata("thread_sort_index", pid, track, {"sort_index": track})


def _metadata(name: str, pid: int, tid: int, arguments: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": arguments}


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


def _finding(finding: Finding, pid: int, track: int, at_ns: int, scope: str) -> Event:
    return _instant(finding.id, "finding", pid, track, at_ns, finding_arguments(finding), scope)


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
