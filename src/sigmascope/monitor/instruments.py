"""The probes of one recorder, each behind its guard."""

import time
from collections.abc import Callable, Mapping

from sigmascope.monitor import peaks
from sigmascope.monitor.gpu_timing import EventPool, Mark, StageEdges, StepTimings, elsewhere
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peak_tracking import ACCELERATOR_PEAK, PeakTracker, reader_for
from sigmascope.monitor.peaks import UNKNOWN, HostMemory
from sigmascope.monitor.process_facts import accelerator_of_this_process, facts_of_host
from sigmascope.monitor.sampled_facts import FAILED, SampledFacts
from sigmascope.monitor.sampler import SAMPLER, Wish
from sigmascope.probes import (
    Accelerator,
    AllocatorBytes,
    NullAccelerator,
    memory_snapshot,
    process_peak_rss_bytes,
    process_rss_bytes,
    system_memory,
)
from sigmascope.records.host import HostFacts
from sigmascope.records.memory import MemorySnapshot, PeakMemory

NOT_AT_STEPS = "it was not asked for at the ends of steps (step_memory)"
Clock = Callable[[], int]


class Instruments:
    """What a recorder measures with. Nothing here raises.

    Args:
        accelerator: What to ask about devices; None finds out, once a process.
        sample_hz: Samples a second between the boundaries; None or 0: none.
        clock: Monotonic nanoseconds.
        step_memory: Whether `rss` is to be read at the end of each step.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        sample_hz: float | None,
        clock: Clock = time.perf_counter_ns,
        *,
        step_memory: bool = True,
    ) -> None:
        self.guard = Guard()
        self.step_memory = step_memory
        self.clock = clock
        if accelerator is None:
            accelerator = self.guard.call("accelerator", accelerator_of_this_process)
        self.accelerator = accelerator or NullAccelerator("it could not be detected")
        reader = self.guard.call(ACCELERATOR_PEAK, lambda: reader_for(self.accelerator))
        self.tracker = PeakTracker(reader, self.guard)
        self._events = None if reader is None else EventPool(self.accelerator.new_event)
        self._elsewhere: str | None = None
        self.stage_edges = StageEdges()
        self._wish = Wish(self._sample, sample_hz) if sample_hz and sample_hz > 0 else None
        self.sampled = SampledFacts(self.accelerator, self.guard, is_sampled=self._wish is not None)
        self._rss_works = True

    # --- steps: the hot path

    def rss(self) -> int:
        """Resident bytes of this process, or UNKNOWN."""
        if not self._rss_works:
            return UNKNOWN
        try:
            rss = process_rss_bytes()
        except Exception as failure:  # noqa: BLE001 - a probe's failure must not reach the host
            self._rss_works = False
            self.guard.switch_off("process_rss", failure)
            return UNKNOWN
        return UNKNOWN if rss is None else rss

    def mark(self, device: str | None = None) -> Mark | None:
        """Record an event on a device (None: the one in use); None when there is no such thing."""
        events = self._events
        if events is None or not self.guard.works("gpu_timing"):
            return None
        try:
            device = device or self._elsewhere or self.accelerator.current_device()
            return None if device is None else events.mark(device)
        except Exception as failure:  # noqa: BLE001 - as above
            self.guard.switch_off("gpu_timing", failure)
            return None

    def device_in_use(self) -> str | None:
        """The device that the calling thread works on; None without an accelerator."""
        if self._events is None or self._elsewhere is not None:
            return self._elsewhere
        return self.guard.call(ACCELERATOR_PEAK, self.accelerator.current_device)

    # --- stages

    def new_timings(self) -> StepTimings | None:
        """A column for the accelerator's time; None without an accelerator."""
        return None if self._events is None else StepTimings(self._events)

    def resolve(self, timings: StepTimings | None) -> None:
        """Read what the accelerator has finished by now."""
        if timings is not None:
            with peaks.LOCK:
                self.guard.call("gpu_timing", timings.resolve)

    def add_timing(self, timings: StepTimings, row: int, start: Mark | None, end: Mark | None) -> None:
        """Take the marks of the step of this number, with LOCK held."""
        self.guard.call("gpu_timing", lambda: timings.add(row, start, end))

    def snapshot(self) -> MemorySnapshot | None:
        """All memory now."""
        found = self.guard.call("memory_snapshot", lambda: memory_snapshot(self.accelerator))
        self._elsewhere = None if found is None else elsewhere(found)
        return found

    def host_memory(self, snapshot: MemorySnapshot | None = None) -> HostMemory:
        """The host's part of a snapshot; what is not in one is read now."""
        if snapshot is None:
            snapshot = self.guard.call("system_memory", system_memory) or MemorySnapshot()
        rss, ram_used = snapshot.process_rss_bytes, snapshot.ram_used_bytes
        largest_rss = self.guard.call("process_peak_rss", process_peak_rss_bytes)
        return HostMemory(
            self.rss() if rss is None else rss,
            UNKNOWN if ram_used is None else ram_used,
            UNKNOWN if largest_rss is None else largest_rss,
        )

    def host(self) -> HostFacts | None:
        """Facts about this machine, read once a process."""
        return self.guard.call("host_facts", lambda: facts_of_host(self.accelerator))

    def start_sampling(self) -> None:
        """Sample from now on, on behalf of one more scope."""
        wish = self._wish
        if wish is not None:
            self.guard.call("sampler", lambda: SAMPLER.open(wish))

    def stop_sampling(self) -> None:
        """End what one `start_sampling` began."""
        if self._wish is None:
            return
        try:  # even when sampling has been switched off: the thread must end
            SAMPLER.close(self._wish)
        except Exception as failure:  # noqa: BLE001 - as above
            self.guard.switch_off("sampler", failure)

    def look(self) -> None:
        """Bring the peaks of all open scopes up to date."""
        self._look(self.host_memory(), self.clock())

    def _look(self, memory: HostMemory, at_ns: int) -> Mapping[str, AllocatorBytes]:
        return self.guard.call("peaks", lambda: self.tracker.look(memory, at_ns)) or {}

    def _sample(self) -> None:
        memory, at_ns = self.host_memory(), self.clock()
        self.sampled.sample(at_ns, memory, self._look(memory, at_ns))

    def step_reasons(self) -> dict[str, str]:
        """For each column of `Steps` that may be missing, why it is."""
        reasons = self.guard.reasons
        absence = reasons.get("accelerator") or self.accelerator.absence
        known = {
            "rss_bytes": reasons.get("process_rss") or (None if self.step_memory else NOT_AT_STEPS),
            "allocated_bytes": reasons.get(ACCELERATOR_PEAK) or absence,
            "gpu_seconds": reasons.get("gpu_timing") or absence or getattr(self.accelerator, "untimed", None),
        }
        return {name: reason for name, reason in known.items() if reason is not None}

    def peak_reasons(self, peak: PeakMemory) -> dict[str, str]:
        """For each field of `peak` that is missing, why it is."""
        reasons = {**self.step_reasons(), "ram_used_bytes": self.guard.reasons.get("system_memory")}
        known = {
            "rss_bytes": (peak.rss_bytes, self.guard.reasons.get("process_rss")),
            "ram_used_bytes": (peak.ram_used_bytes, reasons["ram_used_bytes"]),
            "accelerators": (peak.accelerators or None, reasons.get("allocated_bytes")),
        }
        return {name: reason or FAILED for name, (value, reason) in known.items() if value is None}

    def device_reasons(self, device: str) -> Mapping[str, str]:
        """Why figures of a device's allocator are missing, by the names of `AllocatorBytes`."""
        return self.guard.call("accelerator_reasons", lambda: self.accelerator.unavailable(device)) or {}
