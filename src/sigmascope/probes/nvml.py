"""NVIDIA's management library: facts that need no CUDA context.

NVML counts every device of the machine by PCI order; CUDA counts the visible ones, fastest first unless
told otherwise. So a CUDA device is found by its UUID, and by number only where that cannot be wrong.
"""

import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from sigmascope.probes.reading import Reading, attempt

_sessions: dict[int, ModuleType] = {}  # process id -> initialised library: a forked child needs its own


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """One NVIDIA device now. `utilization_percent` is NVML's own mean over its last sample period."""

    device: str
    name: str | None = None
    uuid: str | None = None
    driver_version: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_celsius: float | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


_FIELDS = (
    "name",
    "uuid",
    "driver_version",
    "total_bytes",
    "used_bytes",
    "free_bytes",
    "utilization_percent",
    "temperature_celsius",
)


def read_nvml(device: str = "cuda:0") -> NvmlFacts:
    """Everything that NVML knows of one CUDA device; each gap with its reason. Never raises.

    Args:
        device: A name as torch gives it, counted among the devices visible to this process.
    """
    opened = library()
    if opened.value is None:
        return NvmlFacts(device, unavailable=dict.fromkeys(_FIELDS, opened.reason or "unknown"))
    nvml: Any = opened.value
    handle = _attempt(nvml, lambda: handle_of(nvml, device))
    if handle.value is None:
        return NvmlFacts(device, unavailable=dict.fromkeys(_FIELDS, handle.reason or "unknown"))
    gpu = handle.value
    memory = _attempt(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    readings: dict[str, Reading[Any]] = {
        "name": _attempt(nvml, lambda: _text(nvml.nvmlDeviceGetName(gpu))),
        "uuid": _attempt(nvml, lambda: _text(nvml.nvmlDeviceGetUUID(gpu))),
        "driver_version": _attempt(nvml, lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        "utilization_percent": _attempt(nvml, lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
        "temperature_celsius": _attempt(
            nvml, lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        ),
    }
    for name in ("total", "used", "free"):
        value = None if memory.value is None else int(getattr(memory.value, name))
        readings[f"{name}_bytes"] = Reading(value, memory.reason)
    return NvmlFacts(
        device,
        **{name: reading.value for name, reading in readings.items()},
        unavailable={n: reading.reason for n, reading in readings.items() if reading.reason is not None},
    )


def nvml_memory(device: str) -> Reading[tuple[int, int]]:
    """Free and total bytes of one CUDA device alone: the other facts take milliseconds to read. Never raises.

    Args:
        device: As in `read_nvml`.
    """
    opened = library()
    if opened.value is None:
        return Reading(None, opened.reason)
    nvml: Any = opened.value
    memory = _attempt(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle_of(nvml, device)))
    return memory if memory.value is None else Reading((int(memory.value.free), int(memory.value.total)))


def library() -> Reading[ModuleType]:
    """The initialised library of this process. It stays open: starting it takes tens of milliseconds."""
    open_library = _sessions.get(os.getpid())
    if open_library is not None:
        return Reading(open_library)
    if torch.version.hip:
        return Reading(None, "NVML knows NVIDIA devices only")
    try:
        import pynvml
    except ImportError:
        return Reading(None, "the package nvidia-ml-py is not installed")
    started = _attempt(pynvml, pynvml.nvmlInit)
    if started.reason is not None:
        return Reading(None, started.reason)
    _sessions[os.getpid()] = pynvml
    return Reading(pynvml)


def _attempt(nvml: Any, read: Any) -> Reading[Any]:
    return attempt(read, nvml.NVMLError)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def handle_of(nvml: Any, device: str) -> Any:
    """NVML's handle of a CUDA device such as "cuda:1".

    Args:
        nvml: The initialised library.
        device: A name as torch gives it.

    Raises:
        LookupError: It cannot be told yet which device that is.
        nvml.NVMLError: NVML does not know it.
    """
    index = int(device.partition(":")[2] or 0)
    initialized: Any = torch.cuda.is_initialized
    if initialized():
        uuid = attempt(lambda: str(torch.cuda.get_device_properties(index).uuid)).value
        if uuid is not None:
            return _handle_by_whole_uuid(nvml, uuid.removeprefix("GPU-").removeprefix("MIG-"))
    return _handle_from_environment(nvml, index)


def _handle_from_environment(nvml: Any, index: int) -> Any:
    """The same before CUDA is initialised, from `CUDA_VISIBLE_DEVICES` (numbers, or starts of UUIDs)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _handle_by_number(nvml, index)
    entries = [entry.strip() for entry in visible.split(",")]
    if index >= len(entries) or not entries[index]:
        raise LookupError(f"CUDA_VISIBLE_DEVICES={visible} shows no device {index}")
    entry = entries[index]
    if entry.startswith("MIG-"):  # such a part of a device is in no list of devices
        return nvml.nvmlDeviceGetHandleByUUID(entry.encode())
    return _handle_by_number(nvml, int(entry)) if entry.isdigit() else _handle_by_uuid(nvml, entry)


def _handle_by_whole_uuid(nvml: Any, bare: str) -> Any:
    """CUDA does not tell whether a UUID is that of a device or of a MIG part of one."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}".encode())
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}".encode())


def _handle_by_uuid(nvml: Any, start: str) -> Any:
    for handle in _all_handles(nvml):
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(start):
            return handle
    raise LookupError(f"no device has a UUID that starts with {start}")


def _handle_by_number(nvml: Any, number: int) -> Any:
    """By number only if CUDA's order must be PCI order: asked for, or all devices are of one model."""
    handles = _all_handles(nvml)
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_pci and len({_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}) > 1:
        raise LookupError("with devices of several models CUDA's order is unknown until it is initialised")
    handle = handles[number]
    mode = _attempt(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)).value  # most devices have no such mode
    if mode is not None and mode[0]:
        raise LookupError(
            f"device {number} is in MIG parts; which one CUDA takes is unknown until it is initialised"
        )
    return handle


def _all_handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
