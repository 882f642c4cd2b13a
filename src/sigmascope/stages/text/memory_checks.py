"""Whether memory after a stage keeps to the caller's limits."""

from collections.abc import Iterator

from sigmascope.records.arithmetic import change, mib
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.stages.text.thresholds import TextEncodingThresholds
from sigmascope.stages.typed import Check


def check_memory(memory: MemoryImpact | None, limits: TextEncodingThresholds) -> Check:
    """Use of RAM and device now, and growth since the baseline, against the limits."""
    if memory is None:
        return {"passed": None, "messages": []}
    messages = list(_memory_problems(memory, limits))
    known = memory.current.ram_percent_used() is not None
    return {"passed": False if messages else True if known else None, "messages": messages}


def _memory_problems(memory: MemoryImpact, limits: TextEncodingThresholds) -> Iterator[str]:
    before, after = memory.baseline, memory.current
    device = after.device_in_use()
    gpu_before, gpu_after = before.accelerator(device or ""), after.accelerator(device or "")
    rss_growth = mib(change(before.process_rss_bytes, after.process_rss_bytes))
    gpu_growth = mib(change(gpu_before.allocated_bytes, gpu_after.allocated_bytes))
    figures = (
        ("RAM in use", after.ram_percent_used(), limits.max_ram_percent, "%"),
        (f"memory of {device} in use", gpu_after.used_percent(), limits.max_gpu_percent, "%"),
        ("growth of the process", rss_growth, limits.max_rss_growth_mb, "MB"),
        (f"growth on {device}", gpu_growth, limits.max_gpu_growth_mb, "MB"),
    )
    for what, found, allowed, unit in figures:
        if found is not None and allowed is not None and found > allowed:
            yield f"{what}: {found:.1f} {unit}, allowed are {allowed:.1f} {unit}"
