"""What CUDA (with HIP) and XPU have in common: PyTorch's caching allocator and its statistics."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from sigmascope.probes.accelerators.events import TimingEvent
from sigmascope.probes.accelerators.protocol import AcceleratorEvent, AllocatorBytes
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, describe
from sigmascope.records.memory import AcceleratorMemory

NOTHING = AllocatorBytes(0, 0, 0, 0)
UNKNOWN = AllocatorBytes(None, None, None, None)


class CachingAccelerator:
    """Base of the accelerators that keep allocator statistics.

    A process that has not initialised the device has allocated nothing there: those figures are 0, and
    that is known. The driver's figures stay unknown then, since asking would initialise the device,
    which takes memory and makes later forks of the host fail.

    Args:
        kind: torch's device type.
        backend: Its module in torch, such as `torch.cuda`.
        raw_statistics: Name in `torch._C` of the function that gives the nested statistics of a device;
            the public function is several times slower or goes through it anyway.
    """

    absence: str | None = None

    def __init__(self, kind: str, backend: ModuleType, raw_statistics: str) -> None:
        self.kind = kind
        self._backend: Any = backend
        self._statistics: Callable[[int], Mapping[str, Any]] = getattr(
            torch._C, raw_statistics, backend.memory_stats_as_nested_dict
        )
        # Asked at each event, so without a detour; an older torch has no graphs on XPU.
        self._capturing: Callable[[], bool] = getattr(backend, "is_current_stream_capturing", lambda: False)

    def is_initialized(self) -> bool:
        """Whether the host has used the device in this process."""
        return bool(attempt(self._backend.is_initialized).value)

    def device_count(self) -> int:
        """Devices visible to this process; 0 also when that cannot be known without initialising."""
        return max(0, self._count() or 0)

    def is_absent(self) -> bool:
        """Whether it is certain that no device is there."""
        return self._count() == 0

    def devices(self) -> list[str]:
        """Names such as "cuda:0"."""
        return [f"{self.kind}:{index}" for index in range(self.device_count())]

    def current_device(self) -> str | None:
        """The device that work goes to by default: the first, until the host has chosen."""
        if not self.is_initialized():
            return f"{self.kind}:0" if self.device_count() else None
        index = attempt(self._backend.current_device).value
        return None if index is None else f"{self.kind}:{index}"

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """The allocator's figures, read once; all 0 while the host has not used the device."""
        try:
            if not (self._backend.is_initialized() and self._has_context(device_index(device))):
                return NOTHING
            return consistent(_bytes_of(self._statistics(device_index(device))))
        except PROBE_ERRORS:
            return UNKNOWN

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None."""
        missing = [n for n, value in self.allocated_and_peak(device)._asdict().items() if value is None]
        return dict.fromkeys(missing, self._why_no_statistics(device)) if missing else {}

    def memory(self, device: str) -> AcceleratorMemory:
        """The allocator's and the driver's view of `device`, in bytes."""
        figures = self.allocated_and_peak(device)
        gaps = self.unavailable(device)
        names = {"allocated": "allocated_bytes", "reserved": "reserved_bytes"}
        unavailable = {names[name]: reason for name, reason in gaps.items() if name in names}
        driver = self._free_and_total(device)
        if driver.value is None:
            fields = ("total_bytes", "free_bytes", "driver_used_bytes")
            unavailable |= dict.fromkeys(fields, driver.reason or "unknown")
            return AcceleratorMemory(device, figures.allocated, figures.reserved, unavailable=unavailable)
        free, total = driver.value
        return AcceleratorMemory(
            device, figures.allocated, figures.reserved, total, free, total - free, unavailable=unavailable
        )

    def reset_peak(self, device: str) -> str | None:
        """Start the allocator's peaks anew. The host's own `max_memory_allocated` starts anew with them."""
        try:
            if self._backend.is_initialized() and self._has_context(device_index(device)):
                self._backend.reset_peak_memory_stats(device_index(device))
        except PROBE_ERRORS as error:
            return describe(error)
        return None

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """A timing mark on the stream that the host works on; None before the host used the device."""
        device = self.current_device() if device is None else device
        if device is None or not self._is_used(device):  # recording would create a context
            return None
        index = device_index(device)
        event = attempt(lambda: self._backend.Event(enable_timing=True)).value
        if event is None:
            return None
        return TimingEvent(event, lambda e: e.record(self._backend.current_stream(index)), self._capturing)

    def _free_and_total(self, device: str) -> Reading[tuple[int, int]]:
        if not self.is_initialized():
            return Reading(None, f"{self.kind} is not initialised in this process")
        if not self._has_context(device_index(device)):
            return Reading(None, f"this process does not use {device}")
        return attempt(lambda: _int_pair(self._backend.mem_get_info(device_index(device))))

    def _count(self) -> int | None:
        """Number of devices; negative or None when that is not known yet."""
        count = self._backend.device_count if self.is_initialized() else self._count_without_initialising
        return attempt(lambda: int(count()), Warning).value  # which a host may have made errors

    def _count_without_initialising(self) -> int:
        return int(self._backend.device_count())

    def _is_used(self, device: str) -> bool:
        return self.is_initialized() and bool(attempt(lambda: self._has_context(device_index(device))).value)

    def _has_context(self, index: int) -> bool:
        """Whether asking the driver about this device would not create a context on it."""
        return True

    def _why_no_statistics(self, device: str) -> str:
        reading = attempt(lambda: _bytes_of(self._statistics(device_index(device))))
        return reading.reason or "the allocator reports a figure that contradicts another"


def device_index(device: str) -> int:
    """The index in a name such as "cuda:1"; 0 where there is none."""
    return int(device.partition(":")[2] or 0)


def consistent(figures: AllocatorBytes) -> AllocatorBytes:
    """Drop figures that cannot be true.

    An allocator that does not keep a statistic (cudaMallocAsync, some of them) reports 0. A peak below
    the current use, or a reservation below the allocation, gives that away.
    """
    allocated, reserved, peak_allocated, peak_reserved = figures
    if allocated is not None and reserved is not None and reserved < allocated:
        reserved = None
    if allocated is not None and peak_allocated is not None and peak_allocated < allocated:
        peak_allocated = None
    floor = max((value for value in (reserved, peak_allocated, allocated) if value is not None), default=0)
    if peak_reserved is not None and peak_reserved < floor:
        peak_reserved = None
    return AllocatorBytes(allocated, reserved, peak_allocated, peak_reserved)


def _bytes_of(statistics: Mapping[str, Any]) -> AllocatorBytes:
    allocated = statistics["allocated_bytes"]["all"]
    reserved = statistics["reserved_bytes"]["all"]
    return AllocatorBytes(allocated["current"], reserved["current"], allocated["peak"], reserved["peak"])


def _int_pair(pair: tuple[int, int]) -> tuple[int, int]:
    free, total = pair
    return int(free), int(total)
