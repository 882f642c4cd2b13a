"""Which accelerators a run used, and a run without the others or with other names for them."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from sigmascope.records.memory_over_time import MEMORY_OVER_TIME, PROCESS, SYSTEM, readable_curves
from sigmascope.records.run import Run, Stage
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.records.structure import run_from_plain, run_to_plain
from sigmascope.records.utilization import UTILIZATION, readable_utilization


def devices_in_use(run: Run) -> list[str]:
    """The devices on which something was allocated, or may have been; without any, the current one.

    Args:
        run: Of one process. PyTorch's allocator counts for the process alone, so that a device that others use has
            0 bytes here.
    """
    allocated: dict[str, bool] = {}
    sampled: dict[str, bool] = {}
    current: str | None = None
    for stage in run.walk():
        for snapshot in _snapshots(stage):
            current = snapshot.current_device or current
            for memory in snapshot.accelerators:
                allocated[memory.device] = allocated.get(memory.device, False) or memory.allocated_bytes != 0
        for peak in () if stage.peak is None else stage.peak.accelerators:
            allocated[peak.device] = allocated.get(peak.device, False) or peak.allocated_bytes != 0
        sampled |= dict.fromkeys((one.device for one in readable_utilization(stage)), True)
    allocated = {**sampled, **allocated}
    in_use = [device for device, is_used in allocated.items() if is_used]
    return in_use or [device for device in allocated if device == current]


def on_devices(run: Run, devices: Mapping[str, str]) -> Run:
    """The run with these devices alone.

    Args:
        run: Of one process.
        devices: New names by old ones; what is not among them is left out of memory, peaks and utilization.
    """
    kept = replace(run, stages=tuple(_without_others(stage, devices) for stage in run.stages))
    return renamed(kept, {old: new for old, new in devices.items() if old != new})


def renamed(run: Run, devices: Mapping[str, str]) -> Run:
    """The run with other names for devices wherever they stand alone, as keys or values, also in facts."""
    return run_from_plain(_renamed(run_to_plain(run), devices)) if devices else run


def _renamed(plain: Any, devices: Mapping[str, str]) -> Any:
    if isinstance(plain, str):
        return devices.get(plain, plain)
    if isinstance(plain, dict):
        return {devices.get(key, key): _renamed(value, devices) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_renamed(value, devices) for value in plain]
    return plain


def _without_others(stage: Stage, devices: Mapping[str, str]) -> Stage:
    memory, peak = stage.memory, stage.peak
    if memory is not None:
        baseline, current = (_only(one, devices) for one in (memory.baseline, memory.current))
        memory = replace(memory, baseline=baseline, current=current)
    if peak is not None:
        peak = replace(peak, accelerators=tuple(one for one in peak.accelerators if one.device in devices))
    facts = dict(stage.facts)
    if readable_utilization(stage):  # and no caller's own fact of that name
        facts[UTILIZATION] = _only_of(facts[UTILIZATION], devices)
    if readable_curves(stage):
        facts[MEMORY_OVER_TIME] = _only_of(facts[MEMORY_OVER_TIME], (PROCESS, SYSTEM, *devices))
    children = tuple(_without_others(child, devices) for child in stage.children)
    return replace(stage, memory=memory, peak=peak, facts=facts, children=children)


def _only_of(fact: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: one for name, one in fact.items() if name in names}


def _only(snapshot: MemorySnapshot, devices: Mapping[str, str]) -> MemorySnapshot:
    kept = tuple(one for one in snapshot.accelerators if one.device in devices)
    current = snapshot.current_device if snapshot.current_device in devices else None
    return replace(snapshot, accelerators=kept, current_device=current)


def _snapshots(stage: Stage) -> tuple[MemorySnapshot, ...]:
    return () if stage.memory is None else (stage.memory.baseline, stage.memory.current)
