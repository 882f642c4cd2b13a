"""Read facts about the host, accelerators, tensors and models. A failure gives a reason instead of an error."""

from sigmascope.probes.accelerators import (
    Accelerator,
    AcceleratorEvent,
    AllocatorBytes,
    NullAccelerator,
    detect_accelerator,
)
from sigmascope.probes.host import (
    heap_in_use,
    host_facts,
    memory_snapshot,
    process_peak_rss_bytes,
    process_rss,
    process_rss_bytes,
    system_memory,
)
from sigmascope.probes.models import module_facts
from sigmascope.probes.nvml import NvmlFacts, read_nvml
from sigmascope.probes.reading import Reading
from sigmascope.probes.tensors import tensor_facts

__all__ = [
    "Accelerator",
    "AcceleratorEvent",
    "AllocatorBytes",
    "NullAccelerator",
    "NvmlFacts",
    "Reading",
    "detect_accelerator",
    "heap_in_use",
    "host_facts",
    "memory_snapshot",
    "module_facts",
    "process_peak_rss_bytes",
    "process_rss",
    "process_rss_bytes",
    "read_nvml",
    "system_memory",
    "tensor_facts",
]
