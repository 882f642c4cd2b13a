"""Accelerators behind one small interface: memory, peaks, timing events and facts of each device.

`detect_accelerator` gives the one that torch would use, or a `NullAccelerator` that says why there is none. No method
raises, waits for a device or initialises it. What PyTorch or the driver does not tell is None, with a reason.
"""

from sigmascope.probes.accelerators.accelerator import (
    CAPTURED,
    Accelerator,
    AcceleratorEvent,
    AllocatorBytes,
    CachingAccelerator,
    NullAccelerator,
    is_capturing,
)
from sigmascope.probes.accelerators.detection import (
    detect_accelerator,
    has_float64,
    has_streams,
    why_no_devices,
)

__all__ = [
    "CAPTURED",
    "Accelerator",
    "AcceleratorEvent",
    "AllocatorBytes",
    "CachingAccelerator",
    "NullAccelerator",
    "detect_accelerator",
    "has_float64",
    "has_streams",
    "is_capturing",
    "why_no_devices",
]
