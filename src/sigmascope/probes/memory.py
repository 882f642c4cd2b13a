"""Memory of this process and of the machine.

The resident set is read with one `pread` on a descriptor of `/proc/self/statm` that stays open: about 1.3 µs, where
opening it each time or psutil takes about 9 µs. Other systems go through psutil.

For leaks, `heap_in_use` asks the C library's allocator what it has given out and not got back, PyTorch's CPU tensors
among it. The resident set tells little of this: freed memory stays resident and is given out again, so that a leak
hides in it at first, and one large call raises it for good.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

import psutil

from sigmascope.probes.accelerators import Accelerator, detect_accelerator, why_no_devices
from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.memory import MemorySnapshot

try:
    import resource
except ImportError:  # Windows, and builds of Python without it
    _HAS_RESOURCE = False
else:
    _HAS_RESOURCE = True

_STATM = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
_HAS_STATM = sys.platform.startswith("linux")
_descriptor: list[int] = []  # the one that is kept; empty: none is open in this process
_opening = threading.Lock()


def _forget_descriptor_of_parent() -> None:
    global _opening
    _descriptor.clear()  # it goes on showing the parent
    _opening = threading.Lock()  # another thread may have held it when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_descriptor_of_parent)


def process_rss_bytes() -> int | None:
    """Resident set size of this process in bytes; None where `process_rss` would give a reason.

    Made for hot paths. Linux counts pages per thread in batches, so the figure may lag by some pages.
    """
    return process_rss().value


def process_rss() -> Reading[int]:
    """Resident set size of this process in bytes, or the reason why it cannot be read."""
    for read in (_rss_from_kept_descriptor, _rss_from_new_descriptor) if _HAS_STATM else ():
        try:
            return Reading(read())
        except (OSError, ValueError, IndexError):
            pass  # not opened yet, or closed by somebody, or a system without /proc: psutil says more
    return attempt(lambda: int(psutil.Process().memory_info().rss))


def _rss_from_kept_descriptor() -> int:
    return int(os.pread(_descriptor[0], 128, 0).split()[1]) * _PAGE_BYTES


def _rss_from_new_descriptor() -> int:
    with _opening:
        try:
            return _rss_from_kept_descriptor()  # another thread was first
        except (OSError, ValueError, IndexError):
            _close_kept_descriptor()
        _descriptor.append(os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC))
        try:
            return _rss_from_kept_descriptor()
        except Exception:
            _close_kept_descriptor()  # else each failure would leave one open
            raise


def _close_kept_descriptor() -> None:
    """Close it, unless its number belongs to another file by now."""
    for number in _descriptor:
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == f"/proc/{os.getpid()}/statm":  # noqa: PTH115
                os.close(number)
    _descriptor.clear()


def process_peak_rss_bytes() -> int | None:
    """The largest resident set that this process has had so far, in bytes; None where the system does not tell.

    At first it may be too large, since Linux counts what the process was before it executed this program. What it
    grows by is true: then the process has just been as large as that.
    """
    if sys.platform == "win32" or not _HAS_RESOURCE:
        peak = getattr(psutil.Process().memory_info(), "peak_wset", None)
        return None if peak is None else int(peak)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) or None


def system_memory() -> MemorySnapshot:
    """RAM of the machine (total, used, available in bytes); the other fields stay empty."""
    reading = attempt(psutil.virtual_memory)
    memory = reading.value
    if memory is None:
        names = ("ram_total_bytes", "ram_used_bytes", "ram_available_bytes")
        return MemorySnapshot(unavailable=dict.fromkeys(names, reading.reason or "unknown"))
    return MemorySnapshot(
        ram_total_bytes=int(memory.total),
        ram_used_bytes=int(memory.used),
        ram_available_bytes=int(memory.available),
    )


def memory_snapshot(accelerator: Accelerator | None = None) -> MemorySnapshot:
    """Memory of the machine, of this process and of every accelerator device, now.

    Args:
        accelerator: What to ask about devices; None finds out (`detect_accelerator`).
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    system = system_memory()
    rss = process_rss()
    unavailable = dict(system.unavailable)
    if rss.reason is not None:
        unavailable["process_rss_bytes"] = rss.reason
    devices = accelerator.devices()
    if not devices:
        unavailable["accelerators"] = why_no_devices(accelerator)
    return replace(
        system,
        process_rss_bytes=rss.value,
        accelerators=tuple(accelerator.memory(device) for device in devices),
        current_device=accelerator.current_device(),
        unavailable=unavailable,
    )


_MALLINFO_FIELDS = (
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

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


def heap_in_use() -> Reading[int]:
    """Bytes that malloc has given out, with those of its own mappings; or why it cannot be asked.

    It takes about 0.1 ms, so it is nothing for hot paths. Memory of another allocator is not in it.
    """
    return attempt(_heap_bytes)


def _heap_bytes() -> int:
    information = _mallinfo2()()
    return int(information.uordblks) + int(information.hblkhd)


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    """The function of the running process's C library; other systems than Linux with glibc have none."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    function.argtypes = ()
    found: Callable[[], _Mallinfo2] = function
    return found
