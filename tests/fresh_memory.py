"""Memory that shows in the resident size of a process that has run hundreds of other tests."""

import ctypes
import gc
import mmap


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Touched memory that the system gave for this alone, and has back as soon as nothing refers to it.

    malloc hands out what earlier tests freed before it asks the system, however large a block is, and keeps what it is
    given back: the resident size then neither rises nor falls.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset((ctypes.c_char * nbytes).from_buffer(memory), 1, nbytes)
    return memory


def give_back() -> None:
    """Give the system what earlier tests left, so that none of it goes, and lowers the resident size, in a test."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(ctypes.c_size_t(0))
