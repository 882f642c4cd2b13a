"""The dict structures that SPEC section 2 names. MB are MiB, percentages 0-100, None is unknown."""

from typing import TypedDict


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
