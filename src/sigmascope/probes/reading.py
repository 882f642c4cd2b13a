"""A fact or the reason why it could not be read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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


def describe(error: BaseException) -> str:
    """One line for an error: its type, and its message's first line if there is one."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def reasons(readings: Mapping[str, Reading[T]]) -> dict[str, str]:
    """The reasons among named readings, by name, as the records' `unavailable` wants them."""
    return {name: reading.reason for name, reading in readings.items() if reading.reason is not None}
