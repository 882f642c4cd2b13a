"""A snapshot of memory as the dict that baselines and analyses hold."""

from sigmascope.records.arithmetic import mib
from sigmascope.records.snapshot import AcceleratorMemory, MemorySnapshot
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


def _gpu(memory: AcceleratorMemory) -> GpuNow:
    return {
        "allocated_mb": mib(memory.allocated_bytes),
        "reserved_mb": mib(memory.reserved_bytes),
        "total_mb": mib(memory.total_bytes),
        "free_mb": mib(memory.free_bytes),
        "driver_used_mb": mib(memory.driver_used_bytes),
        "fragmentation": memory.fragmentation(),
    }
