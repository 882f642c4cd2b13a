"""Runs written by hand, and what a viewer would read from their traces."""

from collections.abc import Mapping
from typing import Any

from sigmascope.records.run import Run, Stage
from sigmascope.reports.trace import trace_of

MIB = 1024**2
Event = Mapping[str, Any]


def run_of(*stages: Stage, **kwargs: Any) -> Run:
    told: dict[str, Any] = {
        "id": "1",
        "name": "demo",
        "started_at": "2026-01-02T03:04:05+00:00",
        "seconds": 4.0,
    }
    return Run(**{**told, "stages": stages, **kwargs})


def events_of(*runs: Run, phase: str = "", name: str = "", **kwargs: Any) -> list[Event]:
    """The events of that phase and name."""
    events: list[Event] = trace_of(runs, **kwargs)["traceEvents"]
    return [event for event in events if phase in ("", event["ph"]) and name in ("", event["name"])]


def only(events: list[Event]) -> Event:
    [event] = events
    return event


def arguments_of(stage: Stage, **kwargs: Any) -> Mapping[str, Any]:
    """What a click on the stage's slice shows."""
    arguments: Mapping[str, Any] = only(events_of(run_of(stage), phase="X", name=stage.name, **kwargs))[
        "args"
    ]
    return arguments
