"""What the C library's allocator has given out and not got back: PyTorch's CPU tensors among it.

The resident set tells little of this. Freed memory stays resident and is given out again, so that a leak hides in it at
first, and one large call raises it for good.
"""

import ctypes
from collections.abc import Callable
from functools import cache

from sigmascope.probes.reading import Reading, attempt

_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h, since 2.33)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def heap_in_use() -> Reading[int]:
    """Bytes that malloc has given out, with those of its own mappings; or why it cannot be asked.

    It takes about 0.1 ms, so it is nothing for hot paths. Memory of another allocator is not in it.
    """
    return attempt(_in_use)


def _in_use() -> int:
    found = _mallinfo2()()
    return int(found.uordblks) + int(found.hblkhd)


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    """The function of the running process's C library; other systems than Linux with glibc have none."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    function.argtypes = ()
    found: Callable[[], _Mallinfo2] = function
    return found
