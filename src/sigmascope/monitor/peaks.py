"""Peaks that nest: every open scope knows the highest memory seen while it was open.

An accelerator's allocator keeps one running peak per device and process. A scope that resets it on entering
erases what its outer scopes would have reported. So at every boundary (a scope opens or closes, a step ends,
the sampler looks) the running peak is folded into all scopes that are open, and only then reset: each
stretch of time between two boundaries counts for exactly the scopes that were open in it.

The allocator's counters and the resident memory are the process's, so a scope is given everything that
happened while it was open, by whichever thread or task. Two overlapping scopes both hold a peak that fell
into their overlap.

What reads memory and folds it into the open scopes is `sigmascope.monitor.peak_tracking`.
"""

import os
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sigmascope.probes import AllocatorBytes
from sigmascope.records.memory import AcceleratorPeak, PeakMemory

UNKNOWN = -1
"""Stands for a reading that failed, so that columns and comparisons stay integers."""

LOCK = threading.RLock()
"""Guards all live scopes and columns of the process. Re-entrant: a signal handler may open a scope
while a step ends. Read it as `peaks.LOCK`: a forked child has a new one."""


def _new_lock() -> None:
    global LOCK
    LOCK = threading.RLock()  # another thread may have held the old one when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


class HostMemory(NamedTuple):
    """Bytes that this process has resident and that the whole machine uses; UNKNOWN where not read.

    Attributes:
        largest_rss: The most that this process has had resident so far, as the system counts it.
    """

    rss: int = UNKNOWN
    ram_used: int = UNKNOWN
    largest_rss: int = UNKNOWN


class Highest:
    """A running maximum and the moment (nanoseconds of the recorder's clock) at which it was seen."""

    __slots__ = ("at_ns", "value")

    def __init__(self, value: int = UNKNOWN, at_ns: int = 0) -> None:
        self.value = value
        self.at_ns = at_ns

    def see(self, value: int, at_ns: int) -> None:
        """Take a reading; of equal ones the first stays."""
        if value > self.value:
            self.value = value
            self.at_ns = at_ns

    def since(self, start_ns: int) -> tuple[int | None, float | None]:
        """Return the value and the seconds from `start_ns` to it, or two Nones when nothing was read."""
        if self.value == UNKNOWN:
            return None, None
        return self.value, max(0, self.at_ns - start_ns) / 1e9


class DevicePeak:
    """The two running maxima of one device, and why some of its readings were of the current use only."""

    __slots__ = ("allocated", "not_reset", "reserved")

    def __init__(self) -> None:
        self.allocated = Highest()
        self.reserved = Highest()
        self.not_reset: str | None = None


class Peaks:
    """What is highest in one scope so far (or, in a tracker, since its last scope boundary)."""

    __slots__ = ("devices", "ram_used", "rss")

    def __init__(self) -> None:
        self.ram_used = Highest()
        self.rss = Highest()
        self.devices: dict[str, DevicePeak] = {}

    def see_host(self, memory: HostMemory, at_ns: int) -> None:
        """Take a reading of the host's memory."""
        self.rss.see(memory.rss, at_ns)
        self.ram_used.see(memory.ram_used, at_ns)

    def see_device(
        self, device: str, reading: AllocatorBytes, at_ns: int, not_reset: str | None = None
    ) -> None:
        """Take one device's reading: its running peak, or what is in use where there is no such peak.

        Args:
            device: Its name.
            reading: The allocator's figures.
            at_ns: When they were read.
            not_reset: Why the device's running peak is of no use any more, where that is so.
        """
        peak = self.devices.get(device)
        if peak is None:
            peak = self.devices[device] = DevicePeak()
        peak.allocated.see(_first_known(reading.peak_allocated, reading.allocated), at_ns)
        peak.reserved.see(_first_known(reading.peak_reserved, reading.reserved), at_ns)
        peak.not_reset = peak.not_reset or not_reset

    def fold(self, inner: "Peaks") -> None:
        """Take over what is higher in `inner`."""
        self.rss.see(inner.rss.value, inner.rss.at_ns)
        self.ram_used.see(inner.ram_used.value, inner.ram_used.at_ns)
        for device, peak in inner.devices.items():
            mine = self.devices.setdefault(device, DevicePeak())
            mine.allocated.see(peak.allocated.value, peak.allocated.at_ns)
            mine.reserved.see(peak.reserved.value, peak.reserved.at_ns)
            mine.not_reset = mine.not_reset or peak.not_reset

    def freeze(self, start_ns: int, why: Callable[[str], Mapping[str, str]]) -> PeakMemory:
        """Return the record, with times in seconds since `start_ns`.

        Args:
            start_ns: When the scope began.
            why: Given a device, tells why a figure of its allocator is missing (see
                `Accelerator.unavailable`).
        """
        rss, rss_at = self.rss.since(start_ns)
        ram_used, ram_used_at = self.ram_used.since(start_ns)
        devices = tuple(
            _freeze_device(name, peak, start_ns, why(name)) for name, peak in sorted(self.devices.items())
        )
        return PeakMemory(
            rss_bytes=rss,
            rss_at_seconds=rss_at,
            accelerators=devices,
            ram_used_bytes=ram_used,
            ram_used_at_seconds=ram_used_at,
        )


def _first_known(running_peak: int | None, in_use: int | None) -> int:
    if running_peak is not None:
        return running_peak
    return UNKNOWN if in_use is None else in_use


def _freeze_device(name: str, peak: DevicePeak, start_ns: int, reasons: Mapping[str, str]) -> AcceleratorPeak:
    allocated, allocated_at = peak.allocated.since(start_ns)
    reserved, reserved_at = peak.reserved.since(start_ns)
    unavailable = {}
    for figure, value in (("allocated", allocated), ("reserved", reserved)):
        reason = reasons.get(f"peak_{figure}") or peak.not_reset
        if value is None:
            unavailable[f"{figure}_bytes"] = reason or "no reading succeeded"
        elif reason is not None:
            unavailable[f"{figure}_running_peak"] = f"seen at boundaries only: {reason}"
    return AcceleratorPeak(name, allocated, allocated_at, reserved, reserved_at, unavailable)
