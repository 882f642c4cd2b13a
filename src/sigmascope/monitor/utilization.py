"""What the sampler's thread sees while scopes are open: how busy accelerators are, and memory over time.

One slow thread, `SAMPLER`, looks between the steps for all recorders of a process. `SampledFacts` makes what it
saw of a scope the facts of its stage. Of each figure sums are kept, which never grow, and a curve of bounded
length (`Series`).
"""

import logging
import os
import threading
from array import array
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from statistics import fmean
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from sigmascope.monitor import peaks
from sigmascope.monitor.guard import Guard, as_json, log_quietly
from sigmascope.monitor.peaks import UNKNOWN, HostMemory
from sigmascope.probes import Accelerator, AllocatorBytes, Reading
from sigmascope.probes.nvml import GPU_ACTIVITY, MAX_HZ, SHORTEST_PERIOD_SECONDS, ActivityReading, GpuActivity
from sigmascope.probes.reading import describe
from sigmascope.records.performance import (
    MEMORY_OVER_TIME,
    PROCESS,
    SYSTEM,
    UTILIZATION,
    DeviceUtilization,
    Gauge,
)

_log = logging.getLogger(__name__)

# Why a figure is missing. `NO_READING` below is one more.
FAILED = "every reading failed"
NOT_SAMPLED: Final = "sampling is switched off (sample_hz)"
TOO_SHORT: Final = f"the stage was over before its first sample; there are {MAX_HZ:.0f} a second"
ONLY_NVIDIA: Final = "business is read through NVML, which knows NVIDIA devices only"

_SETTLED_NS: Final = round(SHORTEST_PERIOD_SECONDS * 1e9)
_FIGURES: Final = ("busy_percent", "memory_busy_percent", "temperature_celsius", "power_watts")

MAX_SAMPLE_HZ = 10.0
"""On one core a 100 Hz sampler costs 2 per cent of the host's time, a 10 Hz one cannot be measured."""

NO_READING: Final = (
    f"no reading fell into the stage; memory is read {MAX_SAMPLE_HZ:.0f} times a second at most"
)

LONGEST_SERIES: Final = 256

Value = TypeVar("Value")
"""It stands beside the nanoseconds of the recorder's clock at which it was read."""

_JOIN_SECONDS = 1.0
_LONGEST_SECONDS = 3600.0
"""No thread can wait for centuries."""


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


class DeviceTrack:
    """One device in one scope."""

    __slots__ = ("_capped", "_gauges", "_heat", "_samples", "_series", "_unavailable")

    def __init__(self) -> None:
        self._samples = 0
        self._gauges = {name: FigureOverTime() for name in _FIGURES}
        self._heat, self._capped = FigureOverTime(), FigureOverTime()
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


class FigureOverTime:
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


def mean_of(entries: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Their mean, from when the first began."""
    return entries[0][0], fmean(value for _, value in entries)


def _percent(is_so: bool | None) -> float | None:
    return None if is_so is None else 100.0 * is_so


class ScopeCurves:
    """All curves of one scope.

    Args:
        started_ns: When it began.
    """

    __slots__ = ("_series", "_started_ns")

    def __init__(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self._series: dict[str, Series[int]] = {}

    def add(self, name: str, at_ns: int, nbytes: int | None) -> None:
        """Take a reading; one that failed, or that was made before the scope began, is none."""
        if nbytes is not None and nbytes != UNKNOWN and at_ns >= self._started_ns:
            if name not in self._series:
                self._series[name] = Series(highest_of, "q")
            self._series[name].add(at_ns, nbytes)

    def freeze(self, start_ns: int) -> dict[str, object]:
        """Return each `MemoryCurve` as JSON values, which they are already: a run is read with all of its stages."""
        frozen = {name: series.freeze(start_ns) for name, series in self._series.items()}
        return {
            name: {"at_seconds": list(at), "nbytes": list(nbytes)} for name, (at, nbytes) in frozen.items()
        }


def highest_of(entries: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The highest, when it was; of equal ones the first."""
    return max(entries, key=lambda entry: entry[1])


class ScopeSamples(NamedTuple):
    """What is gathered of one scope."""

    utilization: ScopeUtilization | None
    curves: ScopeCurves | None


class SampledFacts:
    """Of one recorder: how busy accelerators are in each scope, and memory over time in the outermost.

    Args:
        accelerator: The recorder's.
        guard: Told when a reading fails.
        is_sampled: Whether a thread will call `sample`.
    """

    def __init__(self, accelerator: Accelerator, guard: Guard, *, is_sampled: bool) -> None:
        self.meter = UtilizationMeter(accelerator, is_sampled=is_sampled)
        self._curves = MemoryCurves()
        self._guard = guard
        self._is_sampled = is_sampled

    def open(self, started_ns: int, *, is_outermost: bool) -> ScopeSamples:
        """Begin a scope."""
        has_curves = is_outermost and self._is_sampled
        return ScopeSamples(
            self.meter.open(started_ns), self._curves.open(started_ns) if has_curves else None
        )

    def close(self, samples: ScopeSamples | None) -> None:
        """End a scope; afterwards it changes no more."""
        if samples is not None:
            self.meter.close(samples.utilization)
            self._curves.close(samples.curves)

    def sample(self, at_ns: int, memory: HostMemory, devices: Mapping[str, AllocatorBytes]) -> None:
        """Take what was read just now, and read how busy the accelerators are."""
        self._guard.call(MEMORY_OVER_TIME, lambda: self._curves.add(at_ns, memory, devices))
        self._guard.call(UTILIZATION, lambda: self.meter.sample(at_ns))

    def freeze(
        self, samples: ScopeSamples | None, started_ns: int, *, is_outermost: bool
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Return the facts by name, and for each that is missing, why it is."""
        facts, unavailable = {}, {}
        for name, (found, reason) in {
            UTILIZATION: self._utilization(samples, started_ns),
            **({MEMORY_OVER_TIME: self._memory(samples, started_ns)} if is_outermost else {}),
        }.items():
            if found:
                facts[name] = found
            else:
                unavailable[name] = self._guard.reasons.get(name) or reason or FAILED
        return facts, unavailable

    def _utilization(self, samples: ScopeSamples | None, started_ns: int) -> tuple[object, str | None]:
        scope = None if samples is None else samples.utilization
        read = self._guard.call(UTILIZATION, lambda: self.meter.freeze(scope, started_ns))
        found, reason = ({}, FAILED) if read is None else read
        return {device: as_json(one) for device, one in found.items()}, reason

    def _memory(self, samples: ScopeSamples | None, started_ns: int) -> tuple[object, str | None]:
        scope = None if samples is None else samples.curves
        found = self._guard.call(MEMORY_OVER_TIME, lambda: self._curves.freeze(scope, started_ns))
        return found, NO_READING if self._is_sampled else NOT_SAMPLED


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


class MemoryCurves:
    """The curves of all open scopes of one recorder."""

    def __init__(self) -> None:
        self._open: list[ScopeCurves] = []

    def open(self, started_ns: int) -> ScopeCurves:
        """Begin a scope."""
        scope = ScopeCurves(started_ns)
        with peaks.LOCK:
            self._open.append(scope)
        return scope

    def close(self, scope: ScopeCurves | None) -> None:
        """End a scope; afterwards it changes no more."""
        with peaks.LOCK:
            if scope in self._open:
                self._open.remove(scope)

    def add(self, at_ns: int, memory: HostMemory, devices: Mapping[str, AllocatorBytes]) -> None:
        """Give all open scopes what was read."""
        with peaks.LOCK:
            for scope in self._open:
                scope.add(PROCESS, at_ns, memory.rss)
                scope.add(SYSTEM, at_ns, memory.ram_used)
                for device, reading in devices.items():
                    scope.add(device, at_ns, reading.allocated)

    def freeze(self, scope: ScopeCurves | None, start_ns: int) -> dict[str, object]:
        """Return what is known of a scope, by what it is of."""
        with peaks.LOCK:
            return {} if scope is None else scope.freeze(start_ns)


class Series(Generic[Value]):
    """Values over time, 16 bytes each: when its 256 entries are full, neighbours become one.

    Args:
        one_of: What several entries become.
        typecode: Of an `array` of values: "q" for integers, "d" for floats.
    """

    __slots__ = ("_at_ns", "_each", "_one_of", "_pending", "_typecode", "_values")

    def __init__(
        self, one_of: Callable[[Sequence[tuple[int, Value]]], tuple[int, Value]], typecode: Literal["q", "d"]
    ) -> None:
        self._one_of = one_of
        self._typecode = typecode
        self._pending: list[tuple[int, Value]] = []
        self._each = 1
        self._clear()

    def add(self, at_ns: int, value: Value) -> None:
        """Append a value."""
        self._pending.append((at_ns, value))
        if len(self._pending) == self._each:
            self._append(self._pending)
            self._pending = []
        if len(self._at_ns) == LONGEST_SERIES:
            entries = list(zip(self._at_ns, self._values, strict=True))
            self._clear()
            for pair in zip(entries[::2], entries[1::2], strict=True):
                self._append(pair)
            self._each *= 2

    def freeze(self, start_ns: int) -> tuple[tuple[float, ...], tuple[Value, ...]]:
        """Return seconds since `start_ns`, and the values. The last entry may be of fewer samples than the others."""
        last = [self._one_of(self._pending)] if self._pending else []
        at_ns, values = (
            (*self._at_ns, *(at for at, _ in last)),
            (*self._values, *(value for _, value in last)),
        )
        return tuple(max(0, at - start_ns) / 1e9 for at in at_ns), values

    def _append(self, entries: Sequence[tuple[int, Value]]) -> None:
        at_ns, value = self._one_of(entries)
        self._at_ns.append(at_ns)
        self._values.append(value)

    def _clear(self) -> None:
        self._at_ns: MutableSequence[int] = array("q")
        self._values: MutableSequence[Value] = array(self._typecode)  # type: ignore[assignment]


class SamplerClient:
    """What is called for one recorder, for as long as it has open scopes.

    Args:
        sample: What to call. When it raises, it is called no more, and those of others go on.
        hz: Calls a second, above 0; more than 10 is taken as 10.
    """

    __slots__ = ("open_scopes", "period_seconds", "sample")

    def __init__(self, sample: Callable[[], None], hz: float) -> None:
        self.sample = sample
        self.period_seconds = min(1.0 / min(hz, MAX_SAMPLE_HZ), _LONGEST_SECONDS)
        self.open_scopes = 0

    def failed(self, failure: Exception) -> None:
        """Sample no more."""
        self.sample = _no_sample
        log_quietly(_log, "A sampler is switched off: %s", describe(failure))


def _no_sample() -> None:
    pass


class Sampler:
    """One thread for all recorders of a process: it lives exactly as long as one of them has an open scope.

    The thread is a daemon, so it never keeps the process alive. A forked child starts without it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Be as new: for a forked child, which has no such thread and may have a lock that nobody frees."""
        self._lock = threading.Lock()
        self._clients: list[SamplerClient] = []
        self._stop = threading.Event()
        self._running: threading.Thread | None = None

    def open(self, client: SamplerClient) -> None:
        """Count one more open scope of this client; all are called as often as the most frequent one asks.

        Raises:
            RuntimeError: if the system gives no more threads.
        """
        with self._lock:
            if self._running is None:
                self._start()
            if client not in self._clients:
                client.open_scopes = 0
                self._clients.append(client)
            client.open_scopes += 1

    def close(self, client: SamplerClient) -> None:
        """Count one open scope less; when it was the last of all, the thread has ended at return."""
        with self._lock:
            if client not in self._clients:
                return
            client.open_scopes -= 1
            if client.open_scopes == 0:
                self._clients.remove(client)
            if self._clients or self._running is None:
                return
            thread, stop = self._running, self._stop
            self._running = None
        stop.set()
        thread.join(_JOIN_SECONDS)

    def _start(self) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop,), name="sigmascope-sampler", daemon=True)
        thread.start()
        self._stop, self._running = stop, thread

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._period_seconds()):
            for client in list(self._clients):
                try:
                    client.sample()
                except Exception as failure:  # noqa: BLE001 - the others' samples go on
                    client.failed(failure)

    def _period_seconds(self) -> float:
        return min((client.period_seconds for client in list(self._clients)), default=1.0 / MAX_SAMPLE_HZ)


SAMPLER = Sampler()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SAMPLER.forget)
