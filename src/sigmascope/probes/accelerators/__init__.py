"""Accelerators behind one small interface."""

from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.probes.accelerators.detect import detect_accelerator
from sigmascope.probes.accelerators.mps import MpsAccelerator
from sigmascope.probes.accelerators.null import NullAccelerator
from sigmascope.probes.accelerators.protocol import (
    Accelerator,
    AcceleratorEvent,
    AllocatorBytes,
    why_no_devices,
)
from sigmascope.probes.accelerators.xpu import XpuAccelerator

__all__ = [
    "Accelerator",
    "AcceleratorEvent",
    "AllocatorBytes",
    "CudaAccelerator",
    "MpsAccelerator",
    "NullAccelerator",
    "XpuAccelerator",
    "detect_accelerator",
    "why_no_devices",
]
