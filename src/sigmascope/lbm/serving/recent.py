"""Values kept in memory, the longest unused forgotten first."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """A mapping of bounded size that several threads may use.

    The newest value is always kept, whatever its size: what was just made must be there to be fetched.

    Args:
        limit_bytes: Of all values together.

    Examples:
        >>> kept = Recent[str](limit_bytes=2)
        >>> for key in "abc":
        ...     kept.put(key, key.upper(), size_bytes=1)
        >>> kept.get("a"), kept.get("c")
        (None, 'C')
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._values: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._total_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: Value, size_bytes: int) -> None:
        """Keep a value under a key, in place of the one that was there."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = (value, size_bytes)
            self._total_bytes += size_bytes - before
            while self._total_bytes > self._limit_bytes and len(self._values) > 1:
                _, (_, freed) = self._values.popitem(last=False)
                self._total_bytes -= freed

    def get(self, key: str) -> Value | None:
        """The value, now the most recently used; None if it is not kept or no longer."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def __len__(self) -> int:
        return len(self._values)
