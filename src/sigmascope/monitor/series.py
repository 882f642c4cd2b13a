"""Values over time in a bounded number of entries."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final, Generic, TypeVar

LONGEST_SERIES: Final = 256

Value = TypeVar("Value")
"""It stands beside the nanoseconds of the recorder's clock at which it was read."""


def mean_of(entries: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Their mean, from when the first began."""
    return entries[0][0], fmean(value for _, value in entries)


def highest_of(entries: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The highest, when it was; of equal ones the first."""
    return max(entries, key=lambda entry: entry[1])


class Series(Generic[Value]):
    """Values over time: when its 256 entries are full, neighbours become one.

    Args:
        one_of: What several entries become.
    """

    __slots__ = ("_each", "_entries", "_one_of", "_pending")

    def __init__(self, one_of: Callable[[Sequence[tuple[int, Value]]], tuple[int, Value]]) -> None:
        self._one_of = one_of
        self._entries: list[tuple[int, Value]] = []
        self._pending: list[tuple[int, Value]] = []
        self._each = 1

    def add(self, at_ns: int, value: Value) -> None:
        """Append a value."""
        self._pending.append((at_ns, value))
        if len(self._pending) == self._each:
            self._entries.append(self._one_of(self._pending))
            self._pending.clear()
        if len(self._entries) == LONGEST_SERIES:
            pairs = zip(self._entries[::2], self._entries[1::2], strict=True)
            self._entries = [self._one_of(pair) for pair in pairs]
            self._each *= 2

    def freeze(self, start_ns: int) -> tuple[tuple[float, ...], tuple[Value, ...]]:
        """Return seconds since `start_ns`, and the values. The last entry may be of fewer samples than the others."""
        entries: list[tuple[int, Value]] = [
            *self._entries,
            *([self._one_of(self._pending)] if self._pending else []),
        ]
        return tuple((at_ns - start_ns) / 1e9 for at_ns, _ in entries), tuple(value for _, value in entries)
