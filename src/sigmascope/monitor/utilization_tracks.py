"""What is kept of an accelerator's business: sums that never grow, and a curve of bounded length."""

from collections.abc import Mapping
from typing import Final

from sigmascope.monitor.series import Series, mean_of
from sigmascope.probes.gpu_activity import GpuActivity
from sigmascope.records.utilization import DeviceUtilization, Gauge

_FIGURES: Final = ("busy_percent", "memory_busy_percent", "temperature_celsius", "power_watts")


class Track:
    """Count, sum and highest of one figure."""

    __slots__ = ("count", "highest", "highest_at_ns", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.highest = float("-inf")
        self.highest_at_ns = 0

    def add(self, at_ns: int, value: float | None) -> None:
        """Take a value; None is none."""
        if value is None:
            return
        self.count += 1
        self.total += value
        if value > self.highest:
            self.highest, self.highest_at_ns = value, at_ns

    def mean(self) -> float | None:
        """Of all; None without any."""
        return self.total / self.count if self.count else None

    def freeze(self, start_ns: int) -> Gauge | None:
        """Return the record; None without any value."""
        mean = self.mean()
        if mean is None:
            return None
        return Gauge(mean, self.highest, max(0, self.highest_at_ns - start_ns) / 1e9)


class DeviceTrack:
    """One device in one scope."""

    __slots__ = ("_capped", "_gauges", "_heat", "_samples", "_series", "_unavailable")

    def __init__(self) -> None:
        self._samples = 0
        self._gauges = {name: Track() for name in _FIGURES}
        self._heat, self._capped = Track(), Track()
        self._series = Series(mean_of, "d")
        self._unavailable: Mapping[str, str] = {}

    def add(self, at_ns: int, activity: GpuActivity) -> None:
        """Take a sample."""
        self._samples += 1
        for name, track in self._gauges.items():
            track.add(at_ns, getattr(activity, name))
        if activity.busy_percent is not None:
            self._series.add(at_ns, activity.busy_percent)
        self._heat.add(at_ns, _percent(activity.slowed_by_heat))
        self._capped.add(at_ns, _percent(activity.held_by_power_cap))
        self._unavailable = activity.unavailable

    def freeze(self, device: str, start_ns: int) -> DeviceUtilization:
        """Return the record."""
        at_seconds, busy_series = self._series.freeze(start_ns)
        return DeviceUtilization(
            device=device,
            samples=self._samples,
            heat_percent=self._heat.mean(),
            power_cap_percent=self._capped.mean(),
            at_seconds=at_seconds,
            busy_series=busy_series,
            unavailable=self._unavailable,
            **{name: track.freeze(start_ns) for name, track in self._gauges.items()},
        )


def _percent(is_so: bool | None) -> float | None:
    return None if is_so is None else 100.0 * is_so
