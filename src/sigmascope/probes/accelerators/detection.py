"""Which accelerator torch would use."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final

import torch

from sigmascope.probes.accelerators.accelerator import Accelerator, DetectedAccelerator, NullAccelerator
from sigmascope.probes.reading import attempt

_FILES: Final = (
    "cuda",
    "mps",
    "xpu",
)
"""Of this folder, each named as torch names the device type."""


def detect_accelerator() -> Accelerator:
    """The accelerator that torch would use, or a `NullAccelerator` that says why there is none.

    Decided from what torch was built for and from counts that need no initialisation, because a process
    that has initialised CUDA can no longer fork children that use it. So a machine may turn out to have
    a CUDA build and no device only when the host tries; then there are simply no devices to report.
    """
    kind = _built_for()
    if kind is None:
        return NullAccelerator("no accelerator: this PyTorch build is CPU-only")
    file = _file_of(kind)
    if file is None:
        return NullAccelerator(f"no accelerator that can be read: {kind} is not supported yet")
    accelerator: DetectedAccelerator = file.ACCELERATOR()
    absence = accelerator.why_absent()
    return accelerator if absence is None else NullAccelerator(absence)


@cache
def _file_of(kind: str) -> ModuleType | None:
    """The file with the `ACCELERATOR` of a device type; None for the CPU, and for what is not supported yet."""
    return import_module(f"sigmascope.probes.accelerators.{kind}") if kind in _FILES else None


def has_float64(device: torch.device) -> bool:
    """Whether a device type computes in float64; an unknown one is assumed to."""
    file = _file_of(device.type)
    return file is None or bool(file.ACCELERATOR.has_float64)


def has_streams(kind: str) -> bool:
    """Whether weights can be copied to a device of this type while it computes; an unknown one is assumed not to."""
    file = _file_of(kind)
    return file is not None and bool(file.ACCELERATOR.has_streams)


def _built_for() -> str | None:
    if hasattr(torch, "accelerator"):
        device = attempt(torch.accelerator.current_accelerator).value
        return None if device is None else device.type
    return "cuda" if torch.version.cuda or torch.version.hip else None


def why_no_devices(accelerator: Accelerator) -> str:
    """The reason to record when `accelerator.devices()` is empty."""
    waiting = f"no accelerator in use: the devices of {accelerator.kind} cannot be counted before this process uses one"
    return accelerator.absence or waiting
