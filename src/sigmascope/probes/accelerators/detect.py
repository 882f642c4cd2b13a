"""Find this machine's accelerator without waking it."""

import torch

from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.probes.accelerators.mps import MpsAccelerator
from sigmascope.probes.accelerators.null import NullAccelerator
from sigmascope.probes.accelerators.protocol import Accelerator
from sigmascope.probes.accelerators.xpu import XpuAccelerator
from sigmascope.probes.reading import attempt


def detect_accelerator() -> Accelerator:
    """The accelerator that torch would use, or a `NullAccelerator` that says why there is none.

    Decided from what torch was built for and from counts that need no initialisation, because a process
    that has initialised CUDA can no longer fork children that use it. So a machine may turn out to have
    a CUDA build and no device only when the host tries; then there are simply no devices to report.
    """
    kind = _built_for()
    if kind is None:
        return NullAccelerator("no accelerator: this torch is built for the CPU alone")
    if kind == "mps":
        usable = attempt(torch.backends.mps.is_available).value
        return MpsAccelerator() if usable else NullAccelerator("no accelerator: Metal is not usable here")
    if kind == "cuda":
        cuda = CudaAccelerator()
        return NullAccelerator("no accelerator: CUDA sees no device") if cuda.is_absent() else cuda
    if kind == "xpu":
        xpu = XpuAccelerator()
        return NullAccelerator("no accelerator: XPU sees no device") if xpu.is_absent() else xpu
    return NullAccelerator(f"no accelerator that can be read: {kind} is not supported yet")


def _built_for() -> str | None:
    if hasattr(torch, "accelerator"):
        device = attempt(torch.accelerator.current_accelerator).value
        return None if device is None else device.type
    return "cuda" if torch.version.cuda or torch.version.hip else None
