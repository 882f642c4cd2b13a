"""Peaks that nest: every open scope knows the highest memory seen while it was open.

An accelerator's allocator keeps one running peak per device and process. A scope that resets it on entering
erases what its outer scopes would have reported. So wherever a scope opens or closes, the running peak is folded into
all scopes that are open, and only then reset: each stretch of time between two such boundaries counts for exactly the
scopes that were open in it. Where a step ends or the sampler looks, it is read and goes on.

The allocator's counters and the resident memory are the process's, so a scope is given everything that
happened while it was open, by whichever thread or task. Two overlapping scopes both hold a peak that fell
into their overlap.

A `PeakTracker` holds the open scopes of one recorder. All recorders of a process that watch one accelerator
share a `DeviceReader`: what one of them reads and resets is told to the others.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from sigmascope.monitor.guard import Guard
from sigmascope.probes import Accelerator, AllocatorBytes
from sigmascope.records.memory import AcceleratorPeak, PeakMemory

UNKNOWN = -1
"""Stands for a reading that failed, so that columns and comparisons stay integers."""

LOCK = threading.RLock()
"""Guards all live scopes and columns of the process. Re-entrant: a signal handler may open a scope
while a step ends. Read it as `peaks.LOCK`: a forked child has a new one."""

ACCELERATOR_PEAK = "accelerator_peak"
"""What a recorder's guard calls the reading of devices."""


class HostMemory(NamedTuple):
    """Bytes that this process has resident and that the whole machine uses; UNKNOWN where not read.

    Attributes:
        largest_rss: The most that this process has had resident so far, as the system counts it.
    """

    rss: int = UNKNOWN
    ram_used: int = UNKNOWN
    largest_rss: int = UNKNOWN


class Peaks:
    """The highest readings of one scope so far (or, in a tracker, since its last scope boundary)."""

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
        """Take one device's reading: its running peak, or what is in use where there is no such peak."""
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

    def freeze(
        self,
        start_ns: int,
        why: Callable[[str], Mapping[str, str]],
        missing: Callable[[int | None, int | None, bool], Mapping[str, str]] = lambda *_: {},
    ) -> PeakMemory:
        """Return the record, with times in seconds since `start_ns`.

        Args:
            start_ns: On the recorder's clock.
            why: Of a device, why figures of its allocator are missing.
            missing: Given the process's and the machine's peaks, and whether there are devices, why what is missing is.
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
            unavailable=missing(rss, ram_used, bool(devices)),
            ram_used_bytes=ram_used,
            ram_used_at_seconds=ram_used_at,
        )


def _first_known(running_peak: int | None, in_use: int | None) -> int:
    if running_peak is not None:
        return running_peak
    return UNKNOWN if in_use is None else in_use


class DevicePeak:
    """The two running maxima of one device, and why some of its readings were of the current use only."""

    __slots__ = ("allocated", "not_reset", "reserved")

    def __init__(self) -> None:
        self.allocated = Highest()
        self.reserved = Highest()
        self.not_reset: str | None = None


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


class DeviceReader:
    """Reads and restarts one accelerator's running peaks, and tells every listening tracker what was read.

    They are the host's too (`torch.cuda.max_memory_allocated`), so they are restarted only where a scope opens or closes.

    Where the accelerator keeps no running peak (MPS), what is in use at the boundaries stands in for it.
    The same holds for a device from the first time that its running peak cannot be reset: that peak still covers the
    time before the scope opened.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.listeners: list[PeakTracker] = []
        self._not_reset: dict[str, str] = {}

    def read(self, at_ns: int, devices: Sequence[str], *, restart: bool = False) -> dict[str, AllocatorBytes]:
        """Read these devices now, with LOCK held.

        Args:
            at_ns: Now.
            devices: By name.
            restart: Whether each one's running peak starts anew.
        """
        readings = {}
        for device in devices:
            reading = self.accelerator.allocated_and_peak(device)
            not_reset = self._not_reset.get(device)
            if not_reset is None:
                if restart:
                    self._reset(device)  # if it fails, this reading is still right: the last reset was done
            else:
                reading = reading._replace(peak_allocated=None, peak_reserved=None)
            readings[device] = reading
            for tracker in self.listeners:
                tracker.pending.see_device(device, reading, at_ns, not_reset)
        return readings

    def _reset(self, device: str) -> None:
        reason = self.accelerator.reset_peak(device)
        if reason is not None:
            self._not_reset[device] = f"the running peak could not be reset: {reason}"


class PeakTracker:
    """The open scopes of one recorder and their peaks.

    Between two scope boundaries readings go into `pending` alone, so that a step costs the same however
    deep the scopes are nested.
    """

    def __init__(self, reader: DeviceReader | None, guard: Guard) -> None:
        self._reader = reader
        self._guard = guard
        self._open: list[Peaks] = []
        self._largest_rss = UNKNOWN
        self._largest_is_of = os.getpid()
        self.pending = Peaks()

    def open(self, memory: HostMemory, at_ns: int) -> Peaks:
        """Open a scope; its peaks begin with what is in use now."""
        scope = Peaks()
        with LOCK:
            if self._reader is not None and self not in self._reader.listeners:
                self._reader.listeners.append(self)
            for device, reading in self._boundary(memory, at_ns).items():
                in_use = AllocatorBytes(reading.allocated, reading.reserved, None, None)
                scope.see_device(device, in_use, at_ns)
            scope.see_host(memory, at_ns)
            self._open.append(scope)
        return scope

    def close(self, scope: Peaks, memory: HostMemory, at_ns: int) -> None:
        """Close a scope; afterwards its peaks change no more."""
        with LOCK:
            try:
                self._boundary(memory, at_ns)
            finally:  # also when Ctrl-C comes just now
                if scope in self._open:
                    self._open.remove(scope)
                if not self._open:
                    self._listen_no_more()

    def let_go(self) -> None:
        """Close what is open, without a last reading."""
        with LOCK:
            self._open.clear()
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        if self._reader is not None and self in self._reader.listeners:
            self._reader.listeners.remove(self)

    def step(self, rss: int, at_ns: int, device: str | None) -> int:
        """Take the readings at a step's end, with LOCK held; return the device's allocated bytes."""
        highest = self.pending.rss
        if rss > highest.value:
            highest.see(rss, at_ns)
        if device is None:
            return UNKNOWN
        reading = self._read_devices(at_ns, (device,)).get(device)
        return UNKNOWN if reading is None or reading.allocated is None else reading.allocated

    def look(self, memory: HostMemory, at_ns: int) -> dict[str, AllocatorBytes]:
        """Bring all open scopes up to date, between their boundaries; return what devices said."""
        with LOCK:
            return self._boundary(memory, at_ns, restart=False) if self._open else {}

    def _boundary(self, memory: HostMemory, at_ns: int, *, restart: bool = True) -> dict[str, AllocatorBytes]:
        """Add what was seen since the last boundary to every open scope.

        Where one opens or closes, the devices' running peaks start anew: it sees only its own.
        """
        readings = self._read_devices(at_ns, None, restart=restart)
        self.pending.see_host(memory, at_ns)
        self._see_largest(memory.largest_rss, at_ns)
        for scope in self._open:
            scope.fold(self.pending)
        self.pending = Peaks()
        return readings

    def _see_largest(self, nbytes: int, at_ns: int) -> None:
        """Take the system's own running peak: where it has risen, it was reached since the last boundary."""
        if self._largest_is_of != os.getpid():  # a forked child's begins anew, below its parent's
            self._largest_is_of, self._largest_rss = os.getpid(), UNKNOWN
        before = self._largest_rss
        if nbytes > before:
            self._largest_rss = nbytes
            if before != UNKNOWN:
                self.pending.rss.see(nbytes, at_ns)

    def _read_devices(
        self, at_ns: int, devices: Sequence[str] | None, *, restart: bool = False
    ) -> dict[str, AllocatorBytes]:
        """Read these devices, or all (None); nothing once the accelerator has failed."""
        reader = self._reader
        if reader is None or not self._guard.works(ACCELERATOR_PEAK):
            return {}
        try:
            names = reader.accelerator.devices() if devices is None else devices
            return reader.read(at_ns, names, restart=restart)
        except Exception as failure:  # noqa: BLE001 - a probe's failure must not reach the host
            self._guard.switch_off(ACCELERATOR_PEAK, failure)
            return {}


_readers: WeakValueDictionary[int, DeviceReader] = WeakValueDictionary()


def reader_for(accelerator: Accelerator) -> DeviceReader | None:
    """Return the one reader of this accelerator object, or None when there is no accelerator."""
    if accelerator.absence is not None:
        return None
    with LOCK:
        reader = _readers.get(id(accelerator))
        if reader is None:
            reader = _readers[id(accelerator)] = DeviceReader(accelerator)
    return reader


def _new_lock() -> None:
    global LOCK
    LOCK = threading.RLock()  # another thread may have held the old one when this process was forked off


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)
