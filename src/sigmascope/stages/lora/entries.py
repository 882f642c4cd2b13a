"""Entries of dicts that the host hands over, which may be anything."""

from collections.abc import Mapping
from typing import Any

from sigmascope.stages.host_reading import read_host


def entry_of(thing: object, name: str) -> Any:
    """The entry of that name; None if there is none, it is no mapping, or reading it raises."""
    return read_host(lambda: thing.get(name) if isinstance(thing, Mapping) else None).value
