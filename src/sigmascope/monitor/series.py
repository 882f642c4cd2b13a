"""Values over time in a bounded number of entries."""

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from statistics import fmean
from typing import Final, Generic, Literal, TypeVar

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
    """Values over time, 16 bytes each: when its 256 entries are full, neighbours become one.

    Args:
        one_of: What several entries become.
        typecode: Of an `array` of values: "q" for integers, "d" for floats.
    """

    __slots__ = ("_at_ns", "_each", "_one_of", "_pending", "_typecode", "_values")

    def __init__(
        self, one_of: Callable[[Sequence[tuple[int, Value]]], tuple[int, Value]], typecode: Literal["q", "d"]
    ) -> None:
        self._one_of = one_of
        self._typecode = typecode
        self._pending: list[tuple[int, Value]] = []
        self._each = 1
        self._clear()

    def add(self, at_ns: int, value: Value) -> None:
        """Append a value."""
        self._pending.append((at_ns, value))
        if len(self._pending) == self._each:
            self._append(self._pending)
            self._pending = []
        if len(self._at_ns) == LONGEST_SERIES:
            entries = list(zip(self._at_ns, self._values, strict=True))
            self._clear()
            for pair in zip(entries[::2], entries[1::2], strict=True):
                self._append(pair)
            self._each *= 2

    def freeze(self, start_ns: int) -> tuple[tuple[float, ...], tuple[Value, ...]]:
        """Return seconds since `start_ns`, and the values. The last entry may be of fewer samples than the others."""
        last = [self._one_of(self._pending)] if self._pending else []
        at_ns, values = (
            (*self._at_ns, *(at for at, _ in last)),
            (*self._values, *(value for _, value in last)),
        )
        return tuple(max(0, at - start_ns) / 1e9 for at in at_ns), values

    def _append(self, entries: Sequence[tuple[int, Value]]) -> None:
        at_ns, value = self._one_of(entries)
        self._at_ns.append(at_ns)
        self._values.append(value)

    def _clear(self) -> None:
        self._at_ns: MutableSequence[int] = array("q")
        self._values: MutableSequence[Value] = array(self._typecode)  # type: ignore[assignment]
