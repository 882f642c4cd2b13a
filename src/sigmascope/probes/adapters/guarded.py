"""Reading the host's objects, whose attributes may be missing, of another type, or raise."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sigmascope.probes.reading import PROBE_ERRORS


def attribute(thing: object, name: str) -> Any:
    """The attribute, or None if there is none, or reading it or its class raises anything."""
    try:
        held = getattr(thing, name, None)
        _ = held.__class__  # what asks for its type later must not be the first to
    except Exception:  # noqa: BLE001 - a property of the host's
        return None
    return held


def has(thing: object, name: str) -> bool:
    """Whether there is such an attribute, be it None."""
    try:
        return hasattr(thing, name)
    except Exception:  # noqa: BLE001 - a property of the host's
        return False


def lookup(held: object, key: object) -> Any:
    """What a mapping has under a key; None if it has nothing there, is no mapping, or raises."""
    try:
        return held.get(key) if isinstance(held, Mapping) else None
    except Exception:  # noqa: BLE001 - a mapping of the host's
        return None


def mapping(thing: object, name: str) -> dict[Any, Any]:
    """A copy of the mapping that an attribute holds; empty if it holds none."""
    held = attribute(thing, name)
    try:
        return dict(held) if isinstance(held, Mapping) else {}
    except Exception:  # noqa: BLE001 - a mapping of the host's
        return {}


def sequence(thing: object) -> tuple[Any, ...]:
    """The items of a list or tuple; empty for anything else."""
    return tuple(thing) if isinstance(thing, Sequence) and not isinstance(thing, str) else ()


def number(value: object) -> float | None:
    """A number, or a tensor of one, as float; None for anything else."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except PROBE_ERRORS:
        return None
