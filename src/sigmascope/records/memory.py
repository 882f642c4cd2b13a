"""Memory at one moment, between two moments, and at its highest.

Bytes inside; MiB only at the border, in the dicts of the `as_dict` methods. These call MiB "mb", percentages
there are 0-100, and None is unknown. What is computed from an unknown is unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

MIB = 1024 * 1024


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
        memories = (memory for memory in self.accelerators if memory.device == device)
        return next(memories, AcceleratorMemory(device))

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


class RamImpact(TypedDict):
    """RAM of the whole machine before and after a stage."""

    baseline_used_mb: float | None
    baseline_available_mb: float | None
    baseline_percent_used: float | None
    current_used_mb: float | None
    current_available_mb: float | None
    current_total_mb: float | None
    current_percent_used: float | None
    used_change_mb: float | None
    available_change_mb: float | None


class ProcessImpact(TypedDict):
    """Resident set of this process before and after a stage."""

    baseline_rss_mb: float | None
    current_rss_mb: float | None
    rss_change_mb: float | None
    rss_change_pct: float | None


class GpuImpact(TypedDict):
    """PyTorch's allocator on one device before and after a stage."""

    baseline_allocated_mb: float | None
    baseline_reserved_mb: float | None
    baseline_total_mb: float | None
    current_allocated_mb: float | None
    current_reserved_mb: float | None
    current_total_mb: float | None
    allocated_change_mb: float | None
    reserved_change_mb: float | None
    allocated_change_pct: float | None
    reserved_change_pct: float | None


class MemoryImpactDict(TypedDict):
    """`memory_impact`: `gpu` is the device in use, `gpus` every device by name."""

    ram: RamImpact
    process: ProcessImpact
    gpu: GpuImpact
    gpus: dict[str, GpuImpact]


@dataclass(frozen=True, slots=True)
class MemoryImpact:
    """Memory before and after a stage."""

    baseline: MemorySnapshot
    current: MemorySnapshot

    def as_dict(self) -> MemoryImpactDict:
        """The structure `memory_impact`: MiB, percentages 0-100, None where unknown."""
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


@dataclass(frozen=True, slots=True)
class AcceleratorPeak:
    """Highest memory seen on one device, with seconds since the stage began.

    What is allocated is also reserved. A reserved peak below the allocated one can only mean that it was
    read at another moment; it is raised to the allocated peak, with that one's time.
    """

    device: str
    allocated_bytes: int | None = None
    allocated_at_seconds: float | None = None
    reserved_bytes: int | None = None
    reserved_at_seconds: float | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return
        if self.reserved_bytes < self.allocated_bytes:
            object.__setattr__(self, "reserved_bytes", self.allocated_bytes)
            object.__setattr__(self, "reserved_at_seconds", self.allocated_at_seconds)


class RamPeak(TypedDict):
    """Highest use of the machine's RAM."""

    peak_used_mb: float | None
    peak_used_at_seconds: float | None


class ProcessPeak(TypedDict):
    """Highest resident set of this process."""

    peak_rss_mb: float | None
    peak_rss_at_seconds: float | None


class GpuPeak(TypedDict):
    """Highest figures of PyTorch's allocator on one device."""

    peak_allocated_mb: float | None
    peak_allocated_at_seconds: float | None
    peak_reserved_mb: float | None
    peak_reserved_at_seconds: float | None


class PeakMemoryDict(TypedDict):
    """`peak_memory`: `gpu` is the device with the highest peak, `gpus` every device by name."""

    ram: RamPeak
    process: ProcessPeak
    gpu: GpuPeak
    gpus: dict[str, GpuPeak]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Highest memory seen while a stage was open, with seconds since the stage began.

    `rss` is this process, `ram_used` the whole machine.
    """

    rss_bytes: int | None = None
    rss_at_seconds: float | None = None
    accelerators: tuple[AcceleratorPeak, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    ram_used_bytes: int | None = None
    ram_used_at_seconds: float | None = None

    def accelerator(self, device: str) -> AcceleratorPeak:
        """The peak of `device`; all unknown if it is not held here."""
        return next((peak for peak in self.accelerators if peak.device == device), AcceleratorPeak(device))

    def busiest_device(self) -> str | None:
        """The device with the highest allocated peak; None without devices."""
        highest = max(self.accelerators, key=lambda peak: peak.allocated_bytes or 0, default=None)
        return None if highest is None else highest.device

    def rss_cleanup_effectiveness(self, impact: MemoryImpact) -> float | None:
        """(peak - current) / (peak - baseline) of this process's resident set, 0 to 1."""
        before, after = impact.baseline.process_rss_bytes, impact.current.process_rss_bytes
        return share_given_back(before, self.rss_bytes, after)

    def cleanup_effectiveness(self, impact: MemoryImpact, device: str) -> float | None:
        """(peak - current) / (peak - baseline) of the bytes allocated on `device`, 0 to 1.

        The share of a stage's growth to its peak that was given back by its end. None if a figure is
        unknown or nothing grew.
        """
        before = impact.baseline.accelerator(device).allocated_bytes
        after = impact.current.accelerator(device).allocated_bytes
        return share_given_back(before, self.accelerator(device).allocated_bytes, after)

    def as_dict(self) -> PeakMemoryDict:
        """The structure `peak_memory`: MiB and seconds since the stage began, None where unknown."""
        busiest = self.busiest_device()
        return {
            "ram": {
                "peak_used_mb": mib(self.ram_used_bytes),
                "peak_used_at_seconds": self.ram_used_at_seconds,
            },
            "process": {"peak_rss_mb": mib(self.rss_bytes), "peak_rss_at_seconds": self.rss_at_seconds},
            "gpu": _gpu_peak(self.accelerator(busiest or "")),
            "gpus": {peak.device: _gpu_peak(peak) for peak in self.accelerators},
        }


def _gpu_peak(peak: AcceleratorPeak) -> GpuPeak:
    return {
        "peak_allocated_mb": mib(peak.allocated_bytes),
        "peak_allocated_at_seconds": peak.allocated_at_seconds,
        "peak_reserved_mb": mib(peak.reserved_bytes),
        "peak_reserved_at_seconds": peak.reserved_at_seconds,
    }


def highest(peaks: Iterable[tuple[float, PeakMemory]]) -> PeakMemory:
    """The highest of several peaks, on a common clock.

    Args:
        peaks: Pairs of the seconds at which a peak's own clock began, and the peak.

    Returns:
        The peak over all, its times counted on the common clock. Unknown where every one is, with a
        reason if one of them has it.
    """
    known = list(peaks)
    devices = dict.fromkeys(peak.device for _, memory in known for peak in memory.accelerators)
    rss = _first_high((start, peak.rss_bytes, peak.rss_at_seconds) for start, peak in known)
    ram = _first_high((start, peak.ram_used_bytes, peak.ram_used_at_seconds) for start, peak in known)
    accelerators = tuple(
        _highest_on(device, [(start, peak.accelerator(device)) for start, peak in known])
        for device in devices
    )
    values = {"rss_bytes": rss[0], "ram_used_bytes": ram[0], "accelerators": accelerators or None}
    return PeakMemory(
        *rss,
        accelerators=accelerators,
        unavailable=_gaps(values, (peak.unavailable for _, peak in known)),
        ram_used_bytes=ram[0],
        ram_used_at_seconds=ram[1],
    )


def _first_high(
    readings: Iterable[tuple[float, int | None, float | None]],
) -> tuple[int | None, float | None]:
    """The highest value and when it was first seen, over (start, value, seconds since start)."""
    best: tuple[int | None, float | None] = (None, None)
    for start, value, at_seconds in readings:
        if value is not None and (best[0] is None or value > best[0]):
            best = (value, None if at_seconds is None else start + at_seconds)
    return best


def _highest_on(device: str, peaks: list[tuple[float, AcceleratorPeak]]) -> AcceleratorPeak:
    allocated = _first_high((start, p.allocated_bytes, p.allocated_at_seconds) for start, p in peaks)
    reserved = _first_high((start, p.reserved_bytes, p.reserved_at_seconds) for start, p in peaks)
    values = {"allocated_bytes": allocated[0], "reserved_bytes": reserved[0]}
    gaps = _gaps(values, (peak.unavailable for _, peak in peaks))
    return AcceleratorPeak(device, *allocated, *reserved, unavailable=gaps)


def _gaps(values: Mapping[str, object], reasons: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The reasons for what is still unknown, the last one of each."""
    merged = {name: reason for named in reasons for name, reason in named.items()}
    return {name: reason for name, reason in merged.items() if values.get(name) is None}


def mib(nbytes: int | None) -> float | None:
    """Bytes in MiB (1024² bytes), which the dicts of `as_dict` call MB."""
    return None if nbytes is None else nbytes / MIB


def change(before: int | None, after: int | None) -> int | None:
    """The difference after - before."""
    return None if before is None or after is None else after - before


def percent_change(before: int | None, after: int | None) -> float | None:
    """100 · (after - before) / before; None also when `before` is 0, since no percentage says that."""
    difference = change(before, after)
    return None if difference is None or not before else 100.0 * difference / before


def share_given_back(baseline: int | None, peak: int | None, current: int | None) -> float | None:
    """(peak - current) / (peak - baseline), limited to 0 to 1: cleanup effectiveness.

    1 means that everything taken on the way to the peak was given back, 0 that nothing was.
    None if a figure is unknown or nothing was taken.
    """
    if baseline is None or peak is None or current is None or peak <= baseline:
        return None
    return min(1.0, max(0.0, (peak - current) / (peak - baseline)))
