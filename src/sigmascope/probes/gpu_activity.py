"""How busy an NVIDIA device is, how warm, and whether it holds itself back; read again and again.

NVML's own figure of business is a mean over its last sample period, between a sixth of a second and a second. So it
is asked no more than five times a second (see `MAX_HZ`), by everybody in this process together.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sigmascope.probes.nvml import handle_of, library
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, describe

MAX_HZ: Final = 5.0
SHORTEST_PERIOD_SECONDS: Final = 1 / 6
"""The shortest time that a figure of business is a mean of."""

# Bits of NVML's clocks event reasons (nvml.h): heat, seen by software or hardware; the limit on power.
_HEAT: Final = 0x20 | 0x40
_POWER_CAP: Final = 0x04
_WITH: Final = {"busy_percent": ("memory_busy_percent",), "slowed_by_heat": ("held_by_power_cap",)}
"""Figures that come in one reading with another."""
_ACTIVITY_FIELDS: Final = (
    "busy_percent", "memory_busy_percent", "temperature_celsius", "power_watts",
    "slowed_by_heat", "held_by_power_cap",
)  # fmt: skip
_REASONS: Final = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


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


class GpuGauge:
    """Reads one device. What it does not support is asked for once.

    Args:
        nvml: The initialised library.
        device: As torch names it.
    """

    def __init__(self, nvml: Any, device: str) -> None:
        self.device = device
        self._nvml = nvml
        self._handle: Any = None
        self._unsupported: dict[str, str] = {}

    def read(self) -> GpuActivity:
        """All figures now; never raises."""
        nvml = self._nvml
        if self._handle is None:  # asked for again: before CUDA is initialised it may be ambiguous
            found = attempt(lambda: handle_of(nvml, self.device), nvml.NVMLError)
            if found.value is None:
                return GpuActivity(
                    self.device, unavailable=dict.fromkeys(_ACTIVITY_FIELDS, found.reason or "unknown")
                )
            self._handle = found.value
        readings = {name: self._get(name, read) for name, read in self._reads().items()}
        rates, reasons = readings["busy_percent"].value, readings["slowed_by_heat"].value
        warmth, milliwatts = readings["temperature_celsius"].value, readings["power_watts"].value
        missing = {name: one.reason for name, one in readings.items() if one.reason is not None}
        return GpuActivity(
            self.device,
            None if rates is None else float(rates.gpu),
            None if rates is None else float(rates.memory),
            None if warmth is None else float(warmth),
            None if milliwatts is None else milliwatts / 1e3,
            None if reasons is None else bool(reasons & _HEAT),
            None if reasons is None else bool(reasons & _POWER_CAP),
            {name: reason for first, reason in missing.items() for name in (first, *_WITH.get(first, ()))},
        )

    def _reads(self) -> dict[str, Callable[[Any], Any]]:
        nvml = self._nvml
        return {
            "busy_percent": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu),
            "temperature_celsius": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_watts": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu),
            "slowed_by_heat": self._clock_reasons,
        }

    def _get(self, name: str, read: Callable[[Any], Any]) -> Reading[Any]:
        known = self._unsupported.get(name)
        if known is not None:
            return Reading(None, known)
        try:
            return Reading(read(self._handle))
        except (AttributeError, getattr(self._nvml, "NVMLError_NotSupported", AttributeError)) as error:
            self._unsupported[name] = reason = describe(error)
        except (*PROBE_ERRORS, self._nvml.NVMLError) as error:  # it may answer the next time
            reason = describe(error)
        return Reading(None, reason)

    def _clock_reasons(self, gpu: Any) -> int:
        """By the name of today, or that of older libraries."""
        for name in _REASONS:
            if hasattr(self._nvml, name):
                return int(getattr(self._nvml, name)(gpu))
        raise AttributeError(f"this pynvml has no {_REASONS[0]}")


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
        """Be as new: for a forked child, whose library is not initialised."""
        self._lock = threading.Lock()
        self._gauges: dict[str, GpuGauge] = {}
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
            for device in devices:
                self._gauges.setdefault(device, GpuGauge(opened.value, device))
            number = 1 if self._last is None else self._last.number + 1
            self._last = ActivityReading(number, tuple(gauge.read() for gauge in self._gauges.values()))
            self._read_at = now
            return Reading(self._last)


GPU_ACTIVITY: Final = GpuActivitySource()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=GPU_ACTIVITY.forget)
