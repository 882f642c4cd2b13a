"""What is kept of an accelerator's business: sums that never grow, and a curve of bounded length."""

from collections.abc import Mapping
from statistics import fmean
from typing import Final

from sigmascope.probes.gpu_activity import GpuActivity
from sigmascope.records.utilization import DeviceUtilization, Gauge

LONGEST_SERIES: Final = 256
_FIGURES: Final = ("busy_percent", "memory_busy_percent", "temperature_celsius", "power_watts")


class Series:
    """Values over time in a bounded number of entries: when they are full, neighbours become one."""

    __slots__ = ("_at_ns", "_each", "_pending", "_values")

    def __init__(self) -> None:
        self._at_ns: list[int] = []
        self._values: list[float] = []
        self._pending: list[tuple[int, float]] = []
        self._each = 1

    def add(self, at_ns: int, value: float) -> None:
        """Append a value."""
        self._pending.append((at_ns, value))
        if len(self._pending) == self._each:
            self._take_pending()
        if len(self._values) == LONGEST_SERIES:
            self._at_ns = self._at_ns[::2]
            self._values = [fmean(pair) for pair in zip(self._values[::2], self._values[1::2], strict=True)]
            self._each *= 2

    def freeze(self, start_ns: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return seconds since `start_ns`, and the values. The last entry may be of fewer samples than the others."""
        at_ns, values = list(self._at_ns), list(self._values)
        if self._pending:
            at_ns.append(self._pending[0][0])
            values.append(fmean(value for _, value in self._pending))
        return tuple((at - start_ns) / 1e9 for at in at_ns), tuple(values)

    def _take_pending(self) -> None:
        self._at_ns.append(self._pending[0][0])
        self._values.append(fmean(value for _, value in self._pending))
        self._pending.clear()


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
        self._series = Series()
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
