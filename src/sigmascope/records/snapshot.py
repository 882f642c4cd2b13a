"""What is known of memory at one moment and between two moments.

Bytes inside; MiB only at the border (the `as_dict` methods, SPEC section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sigmascope.records.arithmetic import change, mib, percent_change
from sigmascope.records.typed import GpuImpact, MemoryImpactDict, ProcessImpact, RamImpact


@dataclass(frozen=True, slots=True)
class AcceleratorMemory:
    """One accelerator device at one moment. `None` facts have their reason in `unavailable`.

    `allocated` and `reserved` are PyTorch's allocator's; `driver_used` is everybody's use of the device.
    """

    device: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver_used_bytes: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def fragmentation(self) -> float | None:
        """(reserved - allocated) / reserved, 0 to 1; None if either is unknown or nothing is reserved."""
        ratio = self.allocated_ratio()
        return None if ratio is None else 1.0 - ratio

    def allocated_ratio(self) -> float | None:
        """Allocated / reserved, 0 to 1; None if either is unknown or nothing is reserved."""
        if self.allocated_bytes is None or not self.reserved_bytes:
            return None
        return self.allocated_bytes / self.reserved_bytes

    def used_percent(self) -> float | None:
        """100 · driver_used / total; None if either is unknown."""
        if self.driver_used_bytes is None or not self.total_bytes:
            return None
        return 100.0 * self.driver_used_bytes / self.total_bytes


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """System RAM, this process, and every accelerator at one moment.

    `current_device` is the accelerator that work went to by default.
    """

    ram_total_bytes: int | None = None
    ram_used_bytes: int | None = None
    ram_available_bytes: int | None = None
    process_rss_bytes: int | None = None
    accelerators: tuple[AcceleratorMemory, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    current_device: str | None = None

    def accelerator(self, device: str) -> AcceleratorMemory:
        """The memory of `device`; all unknown if the snapshot does not hold it."""
        found = (memory for memory in self.accelerators if memory.device == device)
        return next(found, AcceleratorMemory(device))

    def device_in_use(self) -> str | None:
        """The device that holds the work: the current one, unless only others hold allocations.

        Pipelines put on "cuda:1" often leave "cuda:0" the current device; then the device with most
        allocated bytes is meant. None without devices.
        """
        if not self.accelerators:
            return None
        allocated = {memory.device: memory.allocated_bytes or 0 for memory in self.accelerators}
        current = self.current_device if self.current_device in allocated else None
        busiest = max(allocated, key=lambda device: allocated[device])
        if current is not None and (allocated[current] or not allocated[busiest]):
            return current
        return busiest

    def ram_percent_used(self) -> float | None:
        """100 · (total - available) / total, as psutil defines it; None if either is unknown."""
        if self.ram_available_bytes is None or not self.ram_total_bytes:
            return None
        return 100.0 * (self.ram_total_bytes - self.ram_available_bytes) / self.ram_total_bytes


@dataclass(frozen=True, slots=True)
class MemoryImpact:
    """Memory before and after a stage."""

    baseline: MemorySnapshot
    current: MemorySnapshot

    def as_dict(self) -> MemoryImpactDict:
        """The structure `memory_impact` of SPEC section 2: MiB, percentages 0-100, None where unknown."""
        devices = [memory.device for memory in self.current.accelerators]
        in_use = self.current.device_in_use()
        nowhere = AcceleratorMemory("")
        return {
            "ram": self._ram(),
            "process": self._process(),
            "gpu": _gpu_impact(nowhere, nowhere) if in_use is None else self._gpu(in_use),
            "gpus": {device: self._gpu(device) for device in devices},
        }

    def _ram(self) -> RamImpact:
        before, after = self.baseline, self.current
        return {
            "baseline_used_mb": mib(before.ram_used_bytes),
            "baseline_available_mb": mib(before.ram_available_bytes),
            "baseline_percent_used": before.ram_percent_used(),
            "current_used_mb": mib(after.ram_used_bytes),
            "current_available_mb": mib(after.ram_available_bytes),
            "current_total_mb": mib(after.ram_total_bytes),
            "current_percent_used": after.ram_percent_used(),
            "used_change_mb": mib(change(before.ram_used_bytes, after.ram_used_bytes)),
            "available_change_mb": mib(change(before.ram_available_bytes, after.ram_available_bytes)),
        }

    def _process(self) -> ProcessImpact:
        before, after = self.baseline.process_rss_bytes, self.current.process_rss_bytes
        return {
            "baseline_rss_mb": mib(before),
            "current_rss_mb": mib(after),
            "rss_change_mb": mib(change(before, after)),
            "rss_change_pct": percent_change(before, after),
        }

    def _gpu(self, device: str) -> GpuImpact:
        return _gpu_impact(self.baseline.accelerator(device), self.current.accelerator(device))


def _gpu_impact(before: AcceleratorMemory, after: AcceleratorMemory) -> GpuImpact:
    return {
        "baseline_allocated_mb": mib(before.allocated_bytes),
        "baseline_reserved_mb": mib(before.reserved_bytes),
        "baseline_total_mb": mib(before.total_bytes),
        "current_allocated_mb": mib(after.allocated_bytes),
        "current_reserved_mb": mib(after.reserved_bytes),
        "current_total_mb": mib(after.total_bytes),
        "allocated_change_mb": mib(change(before.allocated_bytes, after.allocated_bytes)),
        "reserved_change_mb": mib(change(before.reserved_bytes, after.reserved_bytes)),
        "allocated_change_pct": percent_change(before.allocated_bytes, after.allocated_bytes),
        "reserved_change_pct": percent_change(before.reserved_bytes, after.reserved_bytes),
    }
