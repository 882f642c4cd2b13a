"""What makes a run longer and is no part of it: other programs, disks, garbage collection, graphs compiled anew, the watch.

`Load` reads counters of the machine and of Python where a run begins and where it ends, and notes the differences as facts
of the run. `OwnTime` adds up what the watch itself takes outside of stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.scope import Clock
from sigmascope.probes.host import cpu_moment, disk_moment, others_share, runtime_moment
from sigmascope.records.performance import COLLECTIONS, COMPILED_GRAPHS, DISK_READ, OTHERS, PAGE_FAULTS
from sigmascope.records.run import OWN_SECONDS

_LEAST_TO_JUDGE: Final = 0.2
"""Seconds: the system counts what processors do in hundredths of one."""


class Load:
    """The machine's and Python's counters, from now on."""

    def __init__(self) -> None:
        self._cpu = cpu_moment().value
        self._disk = disk_moment()
        self._runtime = runtime_moment()

    def note(self, recorder: Recorder) -> None:
        """Put on the run what they have counted."""
        cpu, disk, runtime = cpu_moment().value, disk_moment(), runtime_moment()
        before = self._cpu
        if before is not None and cpu is not None and cpu.at - before.at >= _LEAST_TO_JUDGE:
            recorder.fact(OTHERS, others_share(before, cpu))
        for name, was, count in (
            (PAGE_FAULTS, self._disk.page_faults, disk.page_faults),
            (DISK_READ, self._disk.read_bytes, disk.read_bytes),
            (COLLECTIONS, self._runtime.collections, runtime.collections),
            (COMPILED_GRAPHS, self._runtime.compiled_graphs, runtime.compiled_graphs),
        ):
            if was is not None and count is not None and count >= was:  # some can be set back
                recorder.fact(name, count - was)


class OwnTime:
    """How long a watch itself worked, before its first stage and after that."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before_stages_ns = 0
        self._since_stages_ns = 0

    @contextmanager
    def taken(self, *, has_stages: bool) -> Iterator[None]:
        """Add what is done meanwhile.

        Args:
            has_stages: Whether a stage has been opened already.
        """
        began_ns = self._clock()
        try:
            yield
        finally:
            took_ns = self._clock() - began_ns
            if has_stages:
                self._since_stages_ns += took_ns
            else:
                self._before_stages_ns += took_ns

    def note(self, recorder: Recorder) -> None:
        """Put both on the run."""
        recorder.fact(OWN_SECONDS, [self._before_stages_ns / 1e9, self._since_stages_ns / 1e9])
