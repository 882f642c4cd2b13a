"""A mapping whose values are read when they are asked for."""

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LazyMapping(Mapping[str, Value], Generic[Key, Value]):
    """Values made anew at each access; iterating, counting and asking for a name make none.

    Args:
        sources: What each value is made from.
        read: Makes it.
    """

    def __init__(self, sources: Mapping[str, Key], read: Callable[[Key], Value]) -> None:
        self._sources = sources
        self._read = read

    def __getitem__(self, name: str) -> Value:
        return self._read(self._sources[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources
