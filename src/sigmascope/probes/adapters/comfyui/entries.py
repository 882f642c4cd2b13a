"""One entry of a patcher's list of patches, apart from what it changes the weight by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sigmascope.probes.adapters.guarded import number


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """How one change is to be applied, and the change itself as the host keeps it.

    Attributes:
        strength: What the change is multiplied with; None if it is no number.
        value: The adapter, tuple or list that says what the change is.
        strength_model: What the weight is multiplied with before; None if it is no number.
        offset: (dimension, start, length) of the part of the weight that is changed.
        unavailable: What could not be read, with the reason.
    """

    strength: float | None
    value: Any
    strength_model: float | None = 1.0
    offset: tuple[int, int, int] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


def read_entry(kept: object) -> Entry:
    """Take an entry apart.

    Until June 2024 it was (strength, value, strength_model), since then (strength, value, strength_model,
    offset, function), and in some forks the same five with names.

    Raises:
        TypeError: It is no tuple, or is shorter.
    """
    if not isinstance(kept, Sequence) or isinstance(kept, str) or len(kept) < 2:
        raise TypeError(f"an entry of a patcher is a tuple of strength and value, not {type(kept).__name__}")
    parts = [*kept, *[None] * (5 - len(kept))]
    strength_model = 1.0 if len(kept) < 3 else parts[2]
    unavailable: dict[str, str] = {}
    return Entry(
        _number("strength", parts[0], unavailable),
        parts[1],
        _number("strength_model", strength_model, unavailable),
        _offset(parts[3], unavailable),
        _noting_function(parts[4], unavailable),
    )


def _number(name: str, value: object, unavailable: dict[str, str]) -> float | None:
    read = number(value)
    if read is None:
        unavailable[name] = f"is {type(value).__name__}, not a number"
    return read


def _offset(value: Any, unavailable: dict[str, str]) -> tuple[int, int, int] | None:
    if value is None:
        return None
    try:
        dimension, start, length = (int(part) for part in value)
    except (TypeError, ValueError):
        unavailable["offset"] = f"is {type(value).__name__}, not (dimension, start, length)"
        return None
    return dimension, start, length


def _noting_function(function: object, unavailable: dict[str, str]) -> dict[str, str]:
    """The fifth part rearranges a change before it is added, as for two layers of SD3 and FLUX."""
    if function is not None:
        name = getattr(function, "__qualname__", type(function).__name__)
        unavailable["function"] = f"the host passes the change through {name} before it adds it"
    return unavailable
