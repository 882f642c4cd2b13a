"""Memory at its highest, with the time at which that was."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sigmascope.records.arithmetic import mib, share_given_back
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.records.typed import GpuPeak, PeakMemoryDict


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
        """(peak - current) / (peak - baseline) of this process's resident set, 0 to 1.

        Args:
            impact: The memory before and after the same stage.
        """
        before, after = impact.baseline.process_rss_bytes, impact.current.process_rss_bytes
        return share_given_back(before, self.rss_bytes, after)

    def cleanup_effectiveness(self, impact: MemoryImpact, device: str) -> float | None:
        """(peak - current) / (peak - baseline) of the bytes allocated on `device`, 0 to 1.

        The share of a stage's growth to its peak that was given back by its end. None if a figure is
        unknown or nothing grew.

        Args:
            impact: The memory before and after the same stage.
            device: A name such as "cuda:0".
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


def _highest_on(device: str, peaks: list[tuple[float, AcceleratorPeak]]) -> AcceleratorPeak:
    allocated = _first_high((start, p.allocated_bytes, p.allocated_at_seconds) for start, p in peaks)
    reserved = _first_high((start, p.reserved_bytes, p.reserved_at_seconds) for start, p in peaks)
    values = {"allocated_bytes": allocated[0], "reserved_bytes": reserved[0]}
    gaps = _gaps(values, (peak.unavailable for _, peak in peaks))
    return AcceleratorPeak(device, *allocated, *reserved, unavailable=gaps)


def _gaps(values: Mapping[str, object], reasons: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The reasons for what is still unknown, the last one of each."""
    merged = {name: reason for one in reasons for name, reason in one.items()}
    return {name: reason for name, reason in merged.items() if values.get(name) is None}


def _first_high(
    readings: Iterable[tuple[float, int | None, float | None]],
) -> tuple[int | None, float | None]:
    """The highest value and when it was first seen, over (start, value, seconds since start)."""
    best: tuple[int | None, float | None] = (None, None)
    for start, value, at_seconds in readings:
        if value is not None and (best[0] is None or value > best[0]):
            best = (value, None if at_seconds is None else start + at_seconds)
    return best
