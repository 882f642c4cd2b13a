"""Memory before and after an encoding, from snapshots or from the dicts that callers hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sigmascope.records.arithmetic import MIB
from sigmascope.records.snapshot import AcceleratorMemory, MemoryImpact, MemorySnapshot
from sigmascope.records.typed import MemoryImpactDict

_UNITS = {"_mb": MIB, "_gb": 1024 * MIB, "_bytes": 1, "": MIB}


def memory_change(before: MemorySnapshot, ram: object, gpu: object, now: MemorySnapshot) -> MemoryImpactDict:
    """`memory_impact` of SPEC section 2.

    Args:
        before: The baseline's memory.
        ram: RAM at the end: a mapping of `used`, `available` and `total` with `_mb` (also if nothing is said),
            `_gb` or `_bytes` behind them; psutil's `virtual_memory()`, in bytes; None: as `now` has it.
        gpu: The device at the end: a mapping of `allocated`, `reserved` and `total` likewise; None: as `now` has it.
        now: Memory at the end, for all that is not given.
    """
    total, used, available = (now.ram_total_bytes, now.ram_used_bytes, now.ram_available_bytes)
    if ram is not None:
        total, used, available = (figure_of(ram, name) for name in ("total", "used", "available"))
    devices = now.accelerators if gpu is None else _with_device(before, now, gpu)
    after = MemorySnapshot(
        before.ram_total_bytes if total is None else total,
        used,
        available,
        now.process_rss_bytes,
        devices,
        current_device=devices[0].device if gpu is not None and devices else now.current_device,
    )
    return MemoryImpact(before, after).as_dict()


def _with_device(before: MemorySnapshot, now: MemorySnapshot, gpu: object) -> tuple[AcceleratorMemory, ...]:
    device = now.device_in_use() or before.device_in_use() or "gpu"
    memory = _device(device, gpu)
    if memory == AcceleratorMemory(device):
        return ()
    if memory.total_bytes is None:
        memory = replace(memory, total_bytes=before.accelerator(device).total_bytes)
    return (memory, *(other for other in now.accelerators if other.device != device))


def _device(name: str, given: object) -> AcceleratorMemory:
    return AcceleratorMemory(
        name,
        figure_of(given, "allocated"),
        figure_of(given, "reserved"),
        figure_of(given, "total"),
        figure_of(given, "free"),
        figure_of(given, "driver_used"),
    )


def figure_of(given: object, name: str) -> int | None:
    """A figure in bytes, whatever unit its key names; an object's attributes are bytes, as psutil's are."""
    if not isinstance(given, Mapping):
        value = getattr(given, name, getattr(given, f"{name}_bytes", None))
        return value if isinstance(value, int) else None
    for suffix, unit in _UNITS.items():
        value = given.get(f"{name}{suffix}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return round(value * unit)
    return None


def snapshot_of(memory: Mapping[str, Any]) -> MemorySnapshot:
    """The snapshot that a `MemoryNow` was made of, as far as it tells."""
    ram, gpus = memory.get("ram") or {}, memory.get("gpus") or {}
    return MemorySnapshot(
        figure_of(ram, "total"),
        figure_of(ram, "used"),
        figure_of(ram, "available"),
        figure_of(memory, "process_rss"),
        tuple(_device(name, gpu) for name, gpu in gpus.items()),
    )
