"""What the sampler's thread sees while scopes are open: how busy accelerators are, and memory over time.

One slow thread, `SAMPLER`, looks between the steps for all recorders of a process. `SampledFacts` makes what it
saw of a scope the facts of its stage; the processors' clocks are among them. Of each figure sums are kept, which never grow, and a curve of bounded
length (`Series`).
"""

import logging
import os
import threading
from array import array
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from statistics import fmean
from typing import Any, Final, Generic, Literal, TypeVar

from sigmascope.monitor import peaks
from sigmascope.monitor.guard import Guard, as_json, log_quietly
from sigmascope.monitor.peaks import UNKNOWN, HostMemory
from sigmascope.probes import Accelerator, AllocatorBytes, Reading
from sigmascope.probes.nvml import GPU_ACTIVITY, MAX_HZ, SHORTEST_PERIOD_SECONDS, ActivityReading, GpuActivity
from sigmascope.probes.processor import STANDSTILL
from sigmascope.probes.processor_clock import ProcessorClock, processor_clock
from sigmascope.probes.reading import describe
from sigmascope.records.performance import (
    MEMORY_OVER_TIME,
    PROCESS,
    PROCESSOR_CLOCK,
    SYSTEM,
    UTILIZATION,
    DeviceUtilization,
    Gauge,
)
from sigmascope.threads import own_thread, start_thread

_log = logging.getLogger(__name__)

# Why a figure is missing. `NO_READING` below is one more.
FAILED = "every reading failed"
NOT_SAMPLED: Final = "sampling is switched off (sample_hz)"
TOO_SHORT: Final = f"the stage was over before its first sample; there are {MAX_HZ:.0f} a second"

_SETTLED_NS: Final = round(SHORTEST_PERIOD_SECONDS * 1e9)
_FIGURES: Final = ("busy_percent", "memory_busy_percent", "temperature_celsius", "power_watts")

MAX_SAMPLE_HZ = 10.0
"""On one core a 100 Hz sampler costs 2 per cent of the host's time, a 10 Hz one cannot be measured."""

NO_READING: Final = (
    f"no reading fell into the stage; memory is read {MAX_SAMPLE_HZ:.0f} times a second at most"
)

_BETWEEN_CLOCKS_NS: Final = 2_000_000_000
"""There may be a hundred processors, each with a file."""

LONGEST_SERIES: Final = 256

Value = TypeVar("Value")
"""It stands beside the nanoseconds of the recorder's clock at which it was read."""

_JOIN_SECONDS = 1.0
_LONGEST_SECONDS = 3600.0
"""No thread can wait for centuries."""


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
        """Add a value; None is ignored."""
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


def highest_of(entries: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The highest, when it was; of equal ones the first."""
    return max(entries, key=lambda entry: entry[1])


class ScopeSamples:
    """What is gathered of one scope."""

    __slots__ = ("celsius", "curves", "devices", "gigahertz", "has_curves", "started_ns")

    def __init__(self, started_ns: int, *, has_curves: bool) -> None:
        self.started_ns = started_ns
        self.has_curves = has_curves
        self.devices: dict[str, DeviceTrack] = {}
        self.curves: dict[str, Series[int]] = {}
        self.gigahertz, self.celsius = FigureOverTime(), FigureOverTime()


class SampledFacts:
    """Of one recorder: how busy accelerators are in each scope; in the outermost, memory over time and the processors' clocks.

    Attributes:
        reason: Why it is not known how busy accelerators are; None: it is.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        guard: Guard,
        *,
        is_sampled: bool,
        read: Callable[[list[str]], Reading[ActivityReading]] = GPU_ACTIVITY.read,
        read_clock: Callable[[], Reading[ProcessorClock]] = processor_clock,
    ) -> None:
        self._accelerator = accelerator
        self._guard = guard
        self._is_sampled = is_sampled
        self._read = read
        self._open: list[ScopeSamples] = []
        self._last_reading = 0
        self._read_clock = read_clock
        self._clock_read_ns = 0
        self._no_clock: str | None = None
        self.reason = accelerator.absence or accelerator.no_utilization
        if self.reason is None and not is_sampled:
            self.reason = NOT_SAMPLED

    def open(self, started_ns: int, *, is_outermost: bool) -> ScopeSamples:
        """Begin a scope."""
        samples = ScopeSamples(started_ns, has_curves=is_outermost and self._is_sampled)
        with peaks.LOCK:
            self._open.append(samples)
        return samples

    def close(self, samples: ScopeSamples | None) -> None:
        """End a scope; afterwards it changes no more."""
        with peaks.LOCK:
            if samples in self._open:
                self._open.remove(samples)

    def sample(self, at_ns: int, memory: HostMemory, devices: Mapping[str, AllocatorBytes]) -> None:
        """Take what was read just now, and read how busy the accelerators are."""
        self._guard.call(MEMORY_OVER_TIME, lambda: self._add_memory(at_ns, memory, devices))
        self._guard.call(UTILIZATION, lambda: self._add_utilization(at_ns))
        self._guard.call(PROCESSOR_CLOCK, lambda: self._add_clock(at_ns))

    def _add_clock(self, at_ns: int) -> None:
        """Give outermost scopes the processors' clocks of now: a new one at once, all of them now and then."""
        outermost = [samples for samples in self._open if samples.has_curves and at_ns >= samples.started_ns]
        is_due = at_ns - self._clock_read_ns >= _BETWEEN_CLOCKS_NS
        if self._no_clock is not None or not outermost:
            return
        if not (is_due or any(samples.gigahertz.count == 0 for samples in outermost)):
            return
        self._clock_read_ns = at_ns
        reading = self._read_clock()
        clock = reading.value
        if clock is None:
            self._no_clock = reading.reason or "unknown"
            return
        with peaks.LOCK:
            for samples in outermost:
                samples.gigahertz.add(at_ns, clock.gigahertz)
                samples.celsius.add(at_ns, clock.celsius)

    def _add_memory(self, at_ns: int, memory: HostMemory, devices: Mapping[str, AllocatorBytes]) -> None:
        """Append to the curves of open scopes; a failed reading, or one from before a scope, is none of it."""
        readings: dict[str, int | None] = {PROCESS: memory.rss, SYSTEM: memory.ram_used}
        readings |= {device: reading.allocated for device, reading in devices.items()}
        with peaks.LOCK:
            for samples in self._open:
                if not samples.has_curves or at_ns < samples.started_ns:
                    continue
                for name, nbytes in readings.items():
                    if nbytes is not None and nbytes != UNKNOWN:
                        samples.curves.setdefault(name, Series(highest_of, "q")).add(at_ns, nbytes)

    def _add_utilization(self, at_ns: int) -> None:
        """Give open scopes the reading of now, if it is a new one and does not tell of the time before them alone."""
        if self.reason is not None or not self._open:
            return
        reading = self._read(self._accelerator.devices())
        if reading.value is None:
            self.reason = reading.reason or "unknown"
            return
        with peaks.LOCK:
            if reading.value.number == self._last_reading:
                return
            self._last_reading = reading.value.number
            for samples in self._open:
                if at_ns - samples.started_ns >= _SETTLED_NS:
                    for activity in reading.value.activities:
                        samples.devices.setdefault(activity.device, DeviceTrack()).add(at_ns, activity)

    def busy_percent(self) -> dict[str, float]:
        """How busy each device is now, in per cent; empty where that is not known."""
        if self._accelerator.absence or self._accelerator.no_utilization:
            return {}
        reading = self._read(self._accelerator.devices()).value
        activities = () if reading is None else reading.activities
        return {
            activity.device: activity.busy_percent
            for activity in activities
            if activity.busy_percent is not None
        }

    def freeze(
        self, samples: ScopeSamples | None, started_ns: int, *, is_outermost: bool
    ) -> tuple[dict[str, object], dict[str, str]]:
        """Return the facts of a scope by name, as JSON values, and for each that is missing, why it is."""
        facts: dict[str, object] = {}
        if samples is not None:
            with peaks.LOCK:
                utilization = self._guard.call(UTILIZATION, lambda: _utilization(samples, started_ns))
                curves = self._guard.call(MEMORY_OVER_TIME, lambda: _curves(samples, started_ns))
                clock = _clock(samples)
            facts = {UTILIZATION: utilization, MEMORY_OVER_TIME: curves, PROCESSOR_CLOCK: clock}
        reasons = {UTILIZATION: self.reason or TOO_SHORT}
        if is_outermost:
            reasons[MEMORY_OVER_TIME] = NO_READING if self._is_sampled else NOT_SAMPLED
            reasons[PROCESSOR_CLOCK] = self._no_clock or reasons[MEMORY_OVER_TIME]
        missing = {
            name: self._guard.reasons.get(name) or reason
            for name, reason in reasons.items()
            if not facts.get(name)
        }
        return {name: fact for name, fact in facts.items() if fact}, missing


def _utilization(samples: ScopeSamples, start_ns: int) -> dict[str, Any]:
    """Each `DeviceUtilization` of a scope, by device."""
    return {
        device: as_json(track.freeze(device, start_ns)) for device, track in sorted(samples.devices.items())
    }


def _clock(samples: ScopeSamples) -> dict[str, float | None]:
    """The means of the processors' clocks and warmth; empty without any look."""
    gigahertz = samples.gigahertz.mean()
    return {} if gigahertz is None else {"gigahertz": gigahertz, "celsius": samples.celsius.mean()}


def _curves(samples: ScopeSamples, start_ns: int) -> dict[str, Any]:
    """Each `MemoryCurve` of a scope, by what it is of."""
    frozen = {name: series.freeze(start_ns) for name, series in samples.curves.items()}
    return {name: {"at_seconds": list(at), "nbytes": list(nbytes)} for name, (at, nbytes) in frozen.items()}


class Series(Generic[Value]):
    """Values over time, 16 bytes each. When all 256 entries are used, neighbours are merged.

    Args:
        one_of: Merges several entries into one.
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
    """What is called for one recorder, for as long as it has open scopes."""

    __slots__ = ("open_scopes", "period_seconds", "sample")

    def __init__(self, sample: Callable[[], None], hz: float) -> None:
        self.sample = sample
        self.period_seconds = min(1.0 / min(hz, MAX_SAMPLE_HZ), _LONGEST_SECONDS)
        self.open_scopes: set[object] = set()

    def failed(self, failure: Exception) -> None:
        """Sample no more."""
        self.sample = lambda: None
        log_quietly(_log, "A sampler is switched off: %s", describe(failure))


class Sampler:
    """One thread for all recorders of a process: it lives exactly as long as one of them has an open scope.

    The thread is a daemon, so it never keeps the process alive. A forked child starts without it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child, which has no such thread and may have a lock that nobody frees."""
        self._lock = threading.Lock()
        self._clients: list[SamplerClient] = []
        self._stop = threading.Event()
        self._running: threading.Thread | None = None

    def open(self, client: SamplerClient, scope: object) -> None:
        """Know an open scope of this client; all are called as often as the most frequent one asks.

        Raises:
            RuntimeError: The system gives no more threads.
        """
        with self._lock:
            if client not in self._clients:
                client.open_scopes.clear()
                self._clients.append(client)
            client.open_scopes.add(scope)
            if self._running is None:  # its first wait is as long as the clients ask
                try:
                    self._start()
                except BaseException as interruption:
                    # Ctrl-C: nobody will close what was not opened
                    if not isinstance(interruption, Exception):
                        self._leave(client, scope)
                    raise

    def close(self, client: SamplerClient, scope: object) -> None:
        """Know that a scope is over; when it was the last of all, the thread has ended at return. Again does nothing."""
        with self._lock:
            self._leave(client, scope)
            if self._clients or self._running is None:
                return
            self._stop.set()  # first: whoever is interrupted now may not come back
            thread, self._running = self._running, None
        thread.join(_JOIN_SECONDS)

    def _leave(self, client: SamplerClient, scope: object) -> None:
        client.open_scopes.discard(scope)
        if not client.open_scopes and client in self._clients:
            self._clients.remove(client)

    def _start(self) -> None:
        stop = threading.Event()
        thread = own_thread("sampler", self._watch, stop)
        start_thread(thread, stop)
        self._stop, self._running = stop, thread

    def _watch(self, stop: threading.Event) -> None:
        try:
            self._sample_until(stop)
        finally:
            STANDSTILL.look_no_more()

    def _sample_until(self, stop: threading.Event) -> None:
        period = self._period_seconds()
        STANDSTILL.look(period)
        while not stop.wait(period):
            period = self._period_seconds()
            STANDSTILL.look(period)
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
