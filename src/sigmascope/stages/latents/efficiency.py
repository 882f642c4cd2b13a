"""What an encoding did to the device's memory, and how well its allocator came out of it."""

from collections.abc import Mapping

from sigmascope.records.arithmetic import change, mib
from sigmascope.records.snapshot import AcceleratorMemory, MemoryImpact
from sigmascope.stages.latents.memory import figure_of
from sigmascope.stages.latents.typed import GpuChanges, MemoryEfficiency
from sigmascope.stages.memory_now import cleanup_effectiveness

_NO_ACCELERATOR = "no accelerator was found"
_NO_BASELINE = "there is no baseline"
_CHANGES = ("allocated_change_mb", "reserved_change_mb")


def gpu_changes(given: object, impact: MemoryImpact | None) -> GpuChanges:
    """`immediate_gpu_changes`: the caller's own measurement, else what the analysis reads now.

    Args:
        given: A mapping with `allocated_change` and `reserved_change`, in MB; a stage's `MemoryImpact`; or None.
        impact: Memory before the encoding and now.
    """
    by = "analysis"
    if isinstance(given, MemoryImpact):
        by, impact = "stage", given
    if isinstance(given, Mapping):
        found = (mib(figure_of(given, "allocated_change")), mib(figure_of(given, "reserved_change")))
        return _changes(found, "caller", "the caller's measurement lacks it")
    device = None if impact is None else impact.current.device_in_use()
    if impact is None or device is None:
        return _changes((None, None), by, _NO_BASELINE if impact is None else _NO_ACCELERATOR)
    before, after = impact.baseline.accelerator(device), impact.current.accelerator(device)
    found = (
        mib(change(before.allocated_bytes, after.allocated_bytes)),
        mib(change(before.reserved_bytes, after.reserved_bytes)),
    )
    return _changes(found, by, "the device does not tell")


def _changes(found: tuple[float | None, float | None], by: str, reason: str) -> GpuChanges:
    missing = [name for name, figure in zip(_CHANGES, found, strict=True) if figure is None]
    return {
        "allocated_change_mb": found[0],
        "reserved_change_mb": found[1],
        "measured_by": by,
        "unavailable": dict.fromkeys(missing, reason),
    }


def memory_efficiency(impact: MemoryImpact | None, peak: object) -> MemoryEfficiency:
    """How the device's allocator stands after the encoding, and the share of the growth that was given back.

    Args:
        impact: Memory before and after.
        peak: The `PeakMemory` in between.
    """
    device = None if impact is None else impact.current.device_in_use()
    before = after = AcceleratorMemory("")
    if impact is not None and device is not None:
        before, after = impact.baseline.accelerator(device), impact.current.accelerator(device)
    cleanup, why_no_cleanup = cleanup_effectiveness(peak, impact)
    found: MemoryEfficiency = {
        "allocated_reserved_ratio": after.allocated_ratio(),
        "fragmentation": after.fragmentation(),
        "free_vram_change_mb": mib(change(before.free_bytes, after.free_bytes)),
        "cleanup_effectiveness": cleanup,
        "unavailable": {},
    }
    reason = _NO_BASELINE if impact is None else "the device does not tell" if device else _NO_ACCELERATOR
    missing = [name for name, figure in found.items() if figure is None]
    found["unavailable"] = dict.fromkeys(missing, reason)
    if cleanup is None:
        found["unavailable"]["cleanup_effectiveness"] = why_no_cleanup or "unknown"
    return found
