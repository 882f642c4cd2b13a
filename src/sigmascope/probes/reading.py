"""A fact or the reason why it could not be read, and how to read objects that may raise.

`attempt` turns into a reason what torch, the system and libraries are known to raise; `read_host` takes whatever the
host's own objects raise. The functions below them read attributes and mappings of the host, which may be missing, of
another type, or raise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
PROBE_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,  # torch built without CUDA answers so
    AttributeError,  # a function that this version or build lacks
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a read of the system, of torch or of somebody's object may raise; each becomes a reason."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """A value, or `None` with the reason."""

    value: T | None
    reason: str | None = None


def attempt(read: Callable[[], T], *errors: type[Exception]) -> Reading[T]:
    """Call `read`; an error that a probe must expect becomes the reason.

    Args:
        read: Takes nothing, gives the fact.
        errors: Further exception types to take as a reason, such as a library's own.
    """
    try:
        return Reading(read())
    except PROBE_ERRORS + errors as error:
        return Reading(None, describe(error))


def read_host(read: Callable[[], T]) -> Reading[T]:
    """What `read` gives, or None and why it failed.

    `attempt` knows what torch and the system raise. The objects that a stage looks at are the host's, whose
    properties, tokenizers and wrappers may raise anything.
    """
    try:
        return Reading(read())
    except Exception as error:  # noqa: BLE001 - see above
        return Reading(None, describe(error))


def describe(error: BaseException) -> str:
    """One line for an error: its type, and its message's first line if there is one."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def reasons(readings: Mapping[str, Reading[T]]) -> dict[str, str]:
    """The reasons among named readings, by name, as the records' `unavailable` wants them."""
    return {name: reading.reason for name, reading in readings.items() if reading.reason is not None}


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
