"""How a run of an older schema becomes one of the current schema.

A schema is the shape of the `run` object in the file. Each step is a pure function on plain dicts from
one version to the next, so that a run of any age passes through all of them. Whoever changes a type in
`records` in a way that shows in the file raises `CURRENT_SCHEMA` and adds the step.

* Schema 1: the columns of `steps` were `started_ms`, `step_ms` and `gpu_ms`, in milliseconds.
* Schema 2: they are `started`, `seconds` and `gpu_seconds`, in seconds, as all other times are.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

CURRENT_SCHEMA = 2

Plain = dict[str, Any]


def migrate(run: Plain, schema: int) -> Plain:
    """The run in the current schema.

    Args:
        run: The `run` object of a file; stays as it is.
        schema: The version that the file says.

    Raises:
        KeyError: There is no way from that version.
        TypeError, ValueError, AttributeError: The run is not of the shape its version says.
    """
    for version in range(schema, CURRENT_SCHEMA):
        run = MIGRATIONS[version](run)
    return run


def seconds_for_milliseconds(run: Plain) -> Plain:
    """From schema 1 to 2: step columns in seconds, under the names they have since."""
    return {**run, "stages": [_stage_in_seconds(stage) for stage in _objects(run, "stages")]}


def _stage_in_seconds(stage: Plain) -> Plain:
    children = [_stage_in_seconds(child) for child in _objects(stage, "children")]
    return {**stage, "children": children, "steps": _steps_in_seconds(stage.get("steps", {}))}


def _objects(parent: Plain, name: str) -> list[Plain]:
    """The objects in a list of the file, which may be damaged."""
    found = parent.get(name, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise TypeError(f"{name} is not a list of objects")
    return found


_COLUMNS = {"started_ms": "started", "step_ms": "seconds", "gpu_ms": "gpu_seconds"}


def _steps_in_seconds(steps: object) -> Plain:
    if not isinstance(steps, dict):
        raise TypeError("steps is not an object")
    others = {name: column for name, column in steps.items() if name not in _COLUMNS}
    renamed = {
        new: [None if value is None else value / 1e3 for value in steps[old]]
        for old, new in _COLUMNS.items()
        if old in steps
    }
    reasons = {_COLUMNS.get(name, name): reason for name, reason in steps.get("unavailable", {}).items()}
    return {**others, **renamed, "unavailable": reasons}


MIGRATIONS: Mapping[int, Callable[[Plain], Plain]] = MappingProxyType({1: seconds_for_milliseconds})
"""The step from each older schema to the next."""
