"""What slows a run from outside: other programs, disks, garbage collection, graphs compiled again, the watch itself.

`Load` reads counters of the machine and of Python at the beginning and end of a run, and puts the differences on the run
as facts. `OwnTime` adds up the time that the watch itself takes outside of stages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import thread_time_ns
from typing import Final

from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.scope import Clock
from sigmascope.probes.host import cpu_moment, disk_moment, others_share, runtime_moment
from sigmascope.probes.processor import processor_moment, processor_use
from sigmascope.records.performance import (
    CACHED_GRAPHS,
    CHILDREN,
    COLLECTIONS,
    COMPILED_GRAPHS,
    DISK_READ,
    OTHERS,
    PAGE_FAULTS,
    PROCESSOR,
)
from sigmascope.records.run import OWN_CPU_SECONDS, OWN_SECONDS

_LEAST_SECONDS_TO_JUDGE_LOAD: Final = 0.2
"""The system counts processor time in hundredths of a second."""


class Load:
    """Counts from now on what the machine and Python do."""

    def __init__(self) -> None:
        self._cpu = cpu_moment().value
        self._disk = disk_moment()
        self._runtime = runtime_moment()
        self._processor = processor_moment()

    def note(self, recorder: Recorder) -> None:
        """Put the counts on the run."""
        cpu, disk, runtime = cpu_moment().value, disk_moment(), runtime_moment()
        recorder.fact(PROCESSOR, asdict(processor_use(self._processor, processor_moment())[0]))
        before = self._cpu
        if before is not None and cpu is not None and cpu.at - before.at >= _LEAST_SECONDS_TO_JUDGE_LOAD:
            recorder.fact(OTHERS, others_share(before, cpu))
        began, ended = (None if moment is None else moment.children for moment in (before, cpu))
        if began is not None and ended is not None and ended > began:
            recorder.fact(CHILDREN, ended - began)
        for name, was, count in (
            (PAGE_FAULTS, self._disk.page_faults, disk.page_faults),
            (DISK_READ, self._disk.read_bytes, disk.read_bytes),
            (COLLECTIONS, self._runtime.collections, runtime.collections),
            (COMPILED_GRAPHS, self._runtime.compiled_graphs, runtime.compiled_graphs),
            (CACHED_GRAPHS, self._runtime.cached_graphs, runtime.cached_graphs),
        ):
            if was is not None and count is not None and count >= was:  # some counters can be reset
                recorder.fact(name, count - was)


class OwnTime:
    """How long a watch itself worked, before its first stage and after that."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._before_stages_ns = 0
        self._since_stages_ns = 0
        self._cpu_ns = 0

    @contextmanager
    def taken(self, *, has_stages: bool) -> Iterator[None]:
        """Add what is done meanwhile.

        Args:
            has_stages: Whether a stage has been opened already.
        """
        began_ns, began_cpu_ns = self._clock(), thread_time_ns()
        try:
            yield
        finally:
            took_ns = self._clock() - began_ns
            self._cpu_ns += thread_time_ns() - began_cpu_ns
            if has_stages:
                self._since_stages_ns += took_ns
            else:
                self._before_stages_ns += took_ns

    def note(self, recorder: Recorder) -> None:
        """Put both on the run, and the processor time of both together."""
        recorder.fact(OWN_SECONDS, [self._before_stages_ns / 1e9, self._since_stages_ns / 1e9])
        recorder.fact(OWN_CPU_SECONDS, self._cpu_ns / 1e9)
