"""The open scopes of recorders, and what reads the memory that is folded into their peaks.

All recorders of a process that watch one accelerator share a `DeviceReader`: what one of them reads and
resets is told to the others.
"""

import os
from collections.abc import Sequence
from weakref import WeakValueDictionary

from sigmascope.monitor import peaks
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peaks import UNKNOWN, HostMemory, Peaks
from sigmascope.probes import Accelerator, AllocatorBytes

ACCELERATOR_PEAK = "accelerator_peak"


class DeviceReader:
    """Reads and resets one accelerator's running peaks, and tells every listening tracker what was read.

    Where the accelerator keeps no running peak (MPS), what is in use at the boundaries stands in for it.
    So it does on a device whose running peak could not be reset once: that peak goes on telling of what was
    before a scope opened.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.listeners: list[PeakTracker] = []
        self._not_reset: dict[str, str] = {}

    def read(self, at_ns: int, devices: Sequence[str]) -> dict[str, AllocatorBytes]:
        """Read these devices now, with LOCK held; each one's running peak starts anew."""
        readings = {}
        for device in devices:
            reading = self.accelerator.allocated_and_peak(device)
            not_reset = self._not_reset.get(device)
            if not_reset is None:
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


_readers: WeakValueDictionary[int, DeviceReader] = WeakValueDictionary()


def reader_for(accelerator: Accelerator) -> DeviceReader | None:
    """Return the one reader of this accelerator object, or None when there is no accelerator."""
    if accelerator.absence is not None:
        return None
    with peaks.LOCK:
        reader = _readers.get(id(accelerator))
        if reader is None:
            reader = _readers[id(accelerator)] = DeviceReader(accelerator)
    return reader


class PeakTracker:
    """The open scopes of one recorder and their peaks.

    Between two scope boundaries readings go into `pending` alone, so that a step costs the same however
    deep the scopes are nested.

    Args:
        reader: The accelerator's; None without an accelerator.
        guard: Told when a reading fails.
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
        with peaks.LOCK:
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
        with peaks.LOCK:
            try:
                self._boundary(memory, at_ns)
            finally:  # also when Ctrl-C comes just now
                if scope in self._open:
                    self._open.remove(scope)
                if not self._open and self._reader is not None and self in self._reader.listeners:
                    self._reader.listeners.remove(self)

    def step(self, rss: int, at_ns: int, device: str | None) -> int:
        """Take the readings at a step's end, with LOCK held; return the device's allocated bytes."""
        self.pending.rss.see(rss, at_ns)
        if device is None:
            return UNKNOWN
        reading = self._read_devices(at_ns, (device,)).get(device)
        return UNKNOWN if reading is None or reading.allocated is None else reading.allocated

    def look(self, memory: HostMemory, at_ns: int) -> dict[str, AllocatorBytes]:
        """Bring all open scopes up to date, between their boundaries; return what devices said."""
        with peaks.LOCK:
            return self._boundary(memory, at_ns) if self._open else {}

    def _boundary(self, memory: HostMemory, at_ns: int) -> dict[str, AllocatorBytes]:
        readings = self._read_devices(at_ns, None)
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

    def _read_devices(self, at_ns: int, devices: Sequence[str] | None) -> dict[str, AllocatorBytes]:
        """Read these devices, or all (None); nothing once the accelerator has failed."""
        reader = self._reader
        if reader is None or not self._guard.works(ACCELERATOR_PEAK):
            return {}
        try:
            return reader.read(at_ns, reader.accelerator.devices() if devices is None else devices)
        except Exception as failure:  # noqa: BLE001 - a probe's failure must not reach the host
            self._guard.switch_off(ACCELERATOR_PEAK, failure)
            return {}
