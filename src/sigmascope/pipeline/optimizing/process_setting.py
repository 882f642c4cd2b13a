"""A setting of the whole process that choices on several pipelines hold at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sigmascope.pipeline.optimizing.kind import Undo

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Hold(Generic[T]):
    before: T


class ProcessSetting(Generic[T]):
    """Put back as it was once nobody holds it any more, in whatever order they let go.

    Args:
        read: Gives the setting as it is.
        write: Makes it what was read.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None]) -> None:
        self._read = read
        self._write = write
        self._holds: list[_Hold[T]] = []

    def hold(self) -> Undo:
        """Note the setting before it is changed. What is returned lets go; the last to let go puts it back."""
        hold = _Hold(self._read())
        self._holds.append(hold)
        return lambda: self._let_go(hold)

    def _let_go(self, hold: _Hold[T]) -> None:
        place = self._holds.index(hold)
        later = self._holds[place + 1 :]
        self._holds.remove(hold)
        if later:
            later[0].before = hold.before
        else:
            self._write(hold.before)
