"""Memory over time while scopes are open, from the sampler's thread."""

from collections.abc import Mapping
from typing import Final

from sigmascope.monitor import peaks
from sigmascope.monitor.peaks import UNKNOWN, HostMemory
from sigmascope.monitor.sampler import MAX_SAMPLE_HZ
from sigmascope.monitor.series import Series, highest_of
from sigmascope.probes import AllocatorBytes
from sigmascope.records.memory_over_time import PROCESS, SYSTEM

NO_READING: Final = (
    f"no reading fell into the stage; memory is read {MAX_SAMPLE_HZ:.0f} times a second at most"
)


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
