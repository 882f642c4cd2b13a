"""The accelerators' business while scopes are open, from samples of the sampler's thread."""

from collections.abc import Callable
from typing import Final

from sigmascope.monitor import peaks
from sigmascope.monitor.utilization_tracks import DeviceTrack
from sigmascope.probes import Accelerator, Reading
from sigmascope.probes.gpu_activity import (
    GPU_ACTIVITY,
    MAX_HZ,
    SHORTEST_PERIOD_SECONDS,
    ActivityReading,
)
from sigmascope.records.utilization import DeviceUtilization

NOT_SAMPLED: Final = "sampling is switched off (sample_hz)"
TOO_SHORT: Final = f"the stage was over before its first sample; there are {MAX_HZ:.0f} a second"
ONLY_NVIDIA: Final = "business is read through NVML, which knows NVIDIA devices only"
_SETTLED_NS: Final = round(SHORTEST_PERIOD_SECONDS * 1e9)


class ScopeUtilization:
    """All devices in one scope."""

    __slots__ = ("_devices", "_started_ns")

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._devices: dict[str, DeviceTrack] = {}

    def add(self, at_ns: int, reading: ActivityReading) -> None:
        """Take a reading, unless it tells of the time before the scope alone."""
        if at_ns - self._started_ns < _SETTLED_NS:
            return
        for activity in reading.activities:
            self._devices.setdefault(activity.device, DeviceTrack()).add(at_ns, activity)

    def freeze(self, start_ns: int) -> dict[str, DeviceUtilization]:
        """Return the records by device."""
        return {device: track.freeze(device, start_ns) for device, track in sorted(self._devices.items())}


class UtilizationMeter:
    """The business of one recorder's accelerators. Switched off, with a reason, where it cannot be read.

    Args:
        accelerator: The recorder's.
        is_sampled: Whether a thread will call `sample`.
        read: Gives readings of the devices named.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        is_sampled: bool,
        read: Callable[[list[str]], Reading[ActivityReading]] = GPU_ACTIVITY.read,
    ) -> None:
        self._accelerator = accelerator
        self._read = read
        self._open: list[ScopeUtilization] = []
        self._seen = 0
        self.reason = accelerator.absence
        if self.reason is None and accelerator.kind != "cuda":
            self.reason = ONLY_NVIDIA
        if self.reason is None and not is_sampled:
            self.reason = NOT_SAMPLED

    def open(self, started_ns: int) -> ScopeUtilization | None:
        """Begin a scope; None where nothing will be read."""
        if self.reason is not None:
            return None
        scope = ScopeUtilization(started_ns)
        with peaks.LOCK:
            self._open.append(scope)
        return scope

    def close(self, scope: ScopeUtilization | None) -> None:
        """End a scope; afterwards it changes no more."""
        with peaks.LOCK:
            if scope in self._open:
                self._open.remove(scope)

    def sample(self, at_ns: int) -> None:
        """Give all open scopes the reading of now, if it is a new one."""
        if self.reason is not None or not self._open:
            return
        reading = self._read(self._accelerator.devices())
        if reading.value is None:
            self.reason = reading.reason or "unknown"
            return
        with peaks.LOCK:
            if reading.value.number == self._seen:
                return
            self._seen = reading.value.number
            for scope in self._open:
                scope.add(at_ns, reading.value)

    def now(self) -> dict[str, float]:
        """How busy each device is, in per cent; empty where that is not known."""
        if self._accelerator.absence is not None or self._accelerator.kind != "cuda":
            return {}
        reading = self._read(self._accelerator.devices()).value
        activities = () if reading is None else reading.activities
        return {one.device: one.busy_percent for one in activities if one.busy_percent is not None}

    def freeze(
        self, scope: ScopeUtilization | None, start_ns: int
    ) -> tuple[dict[str, DeviceUtilization], str | None]:
        """Return what is known of a scope by device, or nothing and why."""
        with peaks.LOCK:
            found = {} if scope is None else scope.freeze(start_ns)
        return found, None if found else self.reason or TOO_SHORT
