"""NVIDIA's management library (NVML): facts about a GPU that need no CUDA context, and how busy it is.

NVML counts every device of the machine by PCI order. CUDA counts the visible ones, fastest first unless told
otherwise. So a CUDA device is found by its UUID, and by number only where that cannot be wrong (`handle_of`).

NVML's utilisation is a mean over its last sample period, between a sixth of a second and a second. So `GPU_ACTIVITY`
asks for it no more than five times a second (`MAX_HZ`), for everybody in this process together.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Final

import torch

from sigmascope.probes.reading import Reading, attempt, reasons
from sigmascope.threads import has_hands_off

_sessions: dict[int, ModuleType] = {}  # process id -> initialised library: a forked child needs its own
_UUIDS: dict[int, str] = {}
"""Of the CUDA devices that this process uses, by index."""
MAX_HZ: Final = 5.0
SHORTEST_PERIOD_SECONDS: Final = 1 / 6
"""NVML's utilisation is a mean over this long at least."""
# Bits of NVML's clocks event reasons (nvml.h): heat, seen by software or hardware; the limit on power.
_HEAT: Final = 0x20 | 0x40
_POWER_CAP: Final = 0x04
_CLOCK_REASON_FUNCTIONS: Final = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


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


def read_nvml(device: str = "cuda:0") -> NvmlFacts:
    """All NVML facts about one CUDA device, with a reason for each gap. Never raises.

    Args:
        device: A name as torch gives it, counted among the devices visible to this process.
    """
    opened = library()
    nvml: Any = opened.value
    handle = opened if nvml is None else attempt(lambda: handle_of(nvml, device))
    if handle.value is None:
        return NvmlFacts(device, unavailable=_all_missing(NvmlFacts, handle.reason))
    gpu = handle.value
    memory = attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    readings: dict[str, Reading[Any]] = {
        "name": attempt(lambda: _as_text(nvml.nvmlDeviceGetName(gpu))),
        "uuid": attempt(lambda: _as_text(nvml.nvmlDeviceGetUUID(gpu))),
        "driver_version": attempt(lambda: _as_text(nvml.nvmlSystemGetDriverVersion())),
        "utilization_percent": attempt(lambda: float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
        "temperature_celsius": attempt(
            lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        ),
    }
    for name in ("total", "used", "free"):
        value = None if memory.value is None else int(getattr(memory.value, name))
        readings[f"{name}_bytes"] = Reading(value, memory.reason)
    facts = {name: reading.value for name, reading in readings.items()}
    return NvmlFacts(device, **facts, unavailable=reasons(readings))


def _all_missing(kind: type[NvmlFacts] | type["GpuActivity"], reason: str | None) -> dict[str, str]:
    """The one reason, for every figure."""
    figures = [field.name for field in fields(kind) if field.name not in ("device", "unavailable")]
    return dict.fromkeys(figures, reason or "unknown")


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def nvml_memory(device: str) -> Reading[tuple[int, int]]:
    """Free and total bytes of one CUDA device alone: the other facts take milliseconds to read. Never raises."""
    opened = library()
    if opened.value is None:
        return Reading(None, opened.reason)
    nvml: Any = opened.value
    memory = attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(handle_of(nvml, device)))
    return _part(memory, lambda memory: (int(memory.free), int(memory.total)))


def library() -> Reading[ModuleType]:
    """The initialised library of this process. It stays open: starting it takes tens of milliseconds."""
    open_library = _sessions.get(os.getpid())
    if open_library is not None:
        return Reading(open_library)
    if torch.version.hip:
        return Reading(None, "NVML supports only NVIDIA devices")
    try:
        import pynvml
    except ImportError:
        return Reading(None, "the package nvidia-ml-py is not installed")
    started = attempt(pynvml.nvmlInit)
    if started.reason is not None:
        return Reading(None, started.reason)
    _sessions[os.getpid()] = pynvml
    return Reading(pynvml)


def handle_of(nvml: Any, device: str) -> Any:
    """NVML's handle of a CUDA device such as "cuda:1".

    Raises:
        LookupError: The device cannot be identified yet.
        nvml.NVMLError: NVML does not know it.
    """
    index = int(device.partition(":")[2] or 0)
    initialized: Any = torch.cuda.is_initialized
    if initialized():
        if not has_hands_off():
            attempt(lambda: identify(index))
        uuid = _UUIDS.get(index)
        if uuid is not None:
            return _handle_by_whole_uuid(nvml, uuid.removeprefix("GPU-").removeprefix("MIG-"))
    return _handle_from_environment(nvml, index)


def identify(index: int) -> None:
    """Remember the UUID of a CUDA device that this process uses, for threads that may not ask CUDA."""
    _UUIDS[index] = str(torch.cuda.get_device_properties(index).uuid)


def _handle_by_whole_uuid(nvml: Any, bare: str) -> Any:
    """CUDA does not tell whether a UUID is that of a device or of a MIG part of one."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}".encode())
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}".encode())


def _handle_from_environment(nvml: Any, index: int) -> Any:
    """The handle before CUDA is initialised, from `CUDA_VISIBLE_DEVICES` (numbers, or starts of UUIDs)."""
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


def _handle_by_number(nvml: Any, number: int) -> Any:
    """By number only if CUDA's order must be PCI order: asked for, or all devices are of one model."""
    handles = _all_handles(nvml)
    by_pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_pci and len({_as_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}) > 1:
        raise LookupError("with several GPU models, CUDA's device order is unknown until CUDA is initialised")
    handle = handles[number]
    mode = attempt(lambda: nvml.nvmlDeviceGetMigMode(handle)).value  # most devices have no such mode
    if mode is not None and mode[0]:
        raise LookupError(
            f"device {number} is split by MIG; which instance CUDA uses is unknown until CUDA is initialised"
        )
    return handle


def _all_handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]


def _handle_by_uuid(nvml: Any, start: str) -> Any:
    for handle in _all_handles(nvml):
        if _as_text(nvml.nvmlDeviceGetUUID(handle)).startswith(start):
            return handle
    raise LookupError(f"no device has a UUID that starts with {start}")


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """One device at one moment.

    Attributes:
        device: As torch names it.
        busy_percent: Share of the last sample period in which a kernel ran.
        memory_busy_percent: Share of it in which device memory was read or written.
        temperature_celsius: Of the chip.
        power_watts: Of the board.
        slowed_by_heat: Whether its clocks are lowered because it is too hot.
        held_by_power_cap: Whether they are lowered to stay below the limit on power.
        unavailable: Why a figure is None.
    """

    device: str
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    slowed_by_heat: bool | None = None
    held_by_power_cap: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def gpu_activity(nvml: Any, device: str, handle: Reading[Any]) -> GpuActivity:
    """All figures of one device now; never raises."""
    if handle.value is None:
        return GpuActivity(device, unavailable=_all_missing(GpuActivity, handle.reason))
    gpu = handle.value
    rates = attempt(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu))
    slowed_by = attempt(lambda: _clock_reasons(nvml, gpu))
    readings: dict[str, Reading[Any]] = {
        "busy_percent": _part(rates, lambda rates: float(rates.gpu)),
        "memory_busy_percent": _part(rates, lambda rates: float(rates.memory)),
        "temperature_celsius": attempt(
            lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        ),
        "power_watts": attempt(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
        "slowed_by_heat": _part(slowed_by, lambda bits: bool(bits & _HEAT)),
        "held_by_power_cap": _part(slowed_by, lambda bits: bool(bits & _POWER_CAP)),
    }
    figures = {name: reading.value for name, reading in readings.items()}
    return GpuActivity(device, **figures, unavailable=reasons(readings))


def _part(reading: Reading[Any], of: Callable[[Any], Any]) -> Reading[Any]:
    return reading if reading.value is None else Reading(of(reading.value))


def _clock_reasons(nvml: Any, gpu: Any) -> int:
    """By the name of today, or that of older libraries."""
    for name in _CLOCK_REASON_FUNCTIONS:
        if hasattr(nvml, name):
            return int(getattr(nvml, name)(gpu))
    raise AttributeError(f"this pynvml has no {_CLOCK_REASON_FUNCTIONS[0]}")


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """All devices at one moment; `number` counts the readings."""

    number: int
    activities: tuple[GpuActivity, ...]


class GpuActivitySource:
    """The readings of this process, no more than five a second whoever asks.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child, whose NVML is not initialised."""
        self._lock = threading.Lock()
        self._handles: dict[str, Reading[Any]] = {}
        self._last: ActivityReading | None = None
        self._read_at = 0.0

    def read(self, devices: Sequence[str]) -> Reading[ActivityReading]:
        """The last reading if it is young enough, else a new one; or why there is none.

        Args:
            devices: As torch names them; those asked for first are in all readings.
        """
        with self._lock:
            now = self._clock()
            if self._last is not None and now - self._read_at < 1 / MAX_HZ:
                return Reading(self._last)
            opened = library()
            if opened.value is None:
                return Reading(None, opened.reason)
            nvml = opened.value
            for device in (*self._handles, *devices):
                if (
                    self._handles.get(device, Reading(None)).value is None
                ):  # before CUDA is initialised it may be ambiguous
                    self._handles[device] = attempt(lambda device=device: handle_of(nvml, device))  # type: ignore[misc]
            number = 1 if self._last is None else self._last.number + 1
            activities = (gpu_activity(nvml, device, handle) for device, handle in self._handles.items())
            self._last = ActivityReading(number, tuple(activities))
            self._read_at = now
            return Reading(self._last)


GPU_ACTIVITY: Final = GpuActivitySource()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=GPU_ACTIVITY.forget)
