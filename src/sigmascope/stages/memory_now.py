"""A snapshot of memory as the dict that baselines and analyses hold; and a duration that can be trusted."""

import math

from sigmascope.records.arithmetic import mib
from sigmascope.records.peak import PeakMemory
from sigmascope.records.snapshot import AcceleratorMemory, MemoryImpact, MemorySnapshot
from sigmascope.stages.typed import GpuNow, MemoryNow


def memory_now(snapshot: MemorySnapshot) -> MemoryNow:
    """The snapshot in MiB and percentages; `gpu` is the device in use."""
    in_use = snapshot.device_in_use()
    return {
        "ram": {
            "used_mb": mib(snapshot.ram_used_bytes),
            "available_mb": mib(snapshot.ram_available_bytes),
            "total_mb": mib(snapshot.ram_total_bytes),
            "percent_used": snapshot.ram_percent_used(),
        },
        "process_rss_mb": mib(snapshot.process_rss_bytes),
        "gpu": _gpu(snapshot.accelerator(in_use or "")),
        "gpus": {memory.device: _gpu(memory) for memory in snapshot.accelerators},
        "unavailable": dict(snapshot.unavailable),
    }


def cleanup_effectiveness(peak: object, impact: MemoryImpact | None) -> tuple[float | None, str | None]:
    """The share of the growth to the peak that was given back, or None and why it is not known.

    Of the device in use where there is one, else of this process.

    Args:
        peak: A stage's `PeakMemory`.
        impact: Memory before and after.
    """
    if impact is None or not isinstance(peak, PeakMemory):
        return None, "it takes a baseline and the peak of a stage"
    device = impact.current.device_in_use()
    share = (
        peak.rss_cleanup_effectiveness(impact)
        if device is None
        else peak.cleanup_effectiveness(impact, device)
    )
    return share, "memory did not grow" if share is None else None


def checked_seconds(seconds: object) -> tuple[float | None, str | None]:
    """A duration, or None and what is wrong with it."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None, "no time was given" if seconds is None else f"{type(seconds).__name__} is no time"
    if not math.isfinite(seconds) or seconds < 0:
        return None, f"{seconds} s is no duration"
    return float(seconds), None


def _gpu(memory: AcceleratorMemory) -> GpuNow:
    return {
        "allocated_mb": mib(memory.allocated_bytes),
        "reserved_mb": mib(memory.reserved_bytes),
        "total_mb": mib(memory.total_bytes),
        "free_mb": mib(memory.free_bytes),
        "driver_used_mb": mib(memory.driver_used_bytes),
        "fragmentation": memory.fragmentation(),
        "allocated_reserved_ratio": memory.allocated_ratio(),
    }
