"""What the sampler's thread tells of each scope, as facts of its stage."""

from collections.abc import Mapping
from typing import NamedTuple

from sigmascope.monitor.guard import Guard
from sigmascope.monitor.json_values import as_json
from sigmascope.monitor.memory_curves import NO_READING, MemoryCurves, ScopeCurves
from sigmascope.monitor.peaks import HostMemory
from sigmascope.monitor.utilization import NOT_SAMPLED, ScopeUtilization, UtilizationMeter
from sigmascope.probes import Accelerator, AllocatorBytes
from sigmascope.records.memory_over_time import MEMORY_OVER_TIME
from sigmascope.records.utilization import UTILIZATION

FAILED = "every reading failed"


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
