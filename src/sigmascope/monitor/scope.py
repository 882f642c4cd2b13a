"""One stage while it is open, and the record that it becomes."""

from collections.abc import Callable
from dataclasses import replace

from sigmascope.monitor import peaks
from sigmascope.monitor.exception_text import details
from sigmascope.monitor.gpu_timing import Mark, StepTimings, of_stage
from sigmascope.monitor.guard import describe
from sigmascope.monitor.instruments import Instruments
from sigmascope.monitor.peaks import UNKNOWN, HostMemory, Peaks
from sigmascope.monitor.sampled_facts import ScopeSamples
from sigmascope.monitor.steps import StepColumns, row
from sigmascope.records.facts import ExceptionDetails, ModuleFacts, TensorFacts
from sigmascope.records.memory import MemoryImpact, MemorySnapshot, PeakMemory
from sigmascope.records.memory_over_time import MEMORY_OVER_TIME
from sigmascope.records.run import Stage
from sigmascope.records.stage_seconds import DEVICE_SECONDS
from sigmascope.records.steps import Steps
from sigmascope.records.utilization import UTILIZATION

STILL_OPEN = "the stage was still open when the run was read"
OWN_FACT = "the stage was given a fact of this name, which stands in its place"
OUTSIDE = "these steps ran outside all stages"

StepListener = Callable[[str, int, int], None]
"""Called with a stage's name, and when its step began and ended in nanoseconds of the recorder's clock."""


class Scope:
    """What is known of a stage so far. Baseline → steps and peaks → the memory at its end.

    Args:
        name: The stage's name.
        instruments: The recorder's.
    """

    def __init__(self, name: str, instruments: Instruments) -> None:
        self.name = name
        self.instruments = instruments
        self.is_outermost = False
        self.was_opened = False
        self.started_ns = 0
        self.ended_ns: int | None = None
        self.columns = StepColumns(instruments.new_timings())
        self.step_listener: StepListener | None = None
        self.children: list[Scope] = []
        self.tensors: dict[str, TensorFacts] = {}
        self.modules: dict[str, ModuleFacts] = {}
        self.facts: dict[str, object] = {}
        self.unavailable: dict[str, str] = {}
        self.error: str | None = None
        self.exception_details: ExceptionDetails | None = None
        self._step_memory = instruments.step_memory
        self._baseline: MemorySnapshot | None = None
        self._final: MemorySnapshot | None = None
        self._peaks: Peaks | None = None
        self._samples: ScopeSamples | None = None
        self._edges = instruments.new_timings()
        self._began: Mark | None = None

    def open(self) -> None:
        """Take the baseline, then start the clock."""
        instruments = self.instruments
        self.was_opened = True
        self.started_ns = instruments.clock()
        self._baseline = instruments.snapshot()
        instruments.start_sampling()
        memory = instruments.host_memory(self._baseline)
        self._peaks = instruments.tracker.open(memory, instruments.clock())
        self._samples = instruments.sampled.open(instruments.clock(), is_outermost=self.is_outermost)
        if self._edges is not None:
            self._began = instruments.mark()
        self.started_ns = instruments.clock()

    @property
    def has_bare_steps(self) -> bool:
        """Whether nothing is read at a step's end but the time, so that `columns.add` alone takes it."""
        return self.columns.timings is None and not self._step_memory

    def add_step(self, started_ns: int, ended_ns: int, start: Mark | None) -> None:
        """Take what there is at a step's end: the hot path.

        Args:
            started_ns: When the step began.
            ended_ns: When it ended, just now.
            start: The mark at its beginning, where there is an accelerator.
        """
        columns = self.columns
        if columns.timings is None:
            rss = self._rss_after_step(ended_ns) if self._step_memory else UNKNOWN
            columns.add(row(started_ns, ended_ns, rss, UNKNOWN))
        else:
            self._add_step_of_device(columns.timings, started_ns, ended_ns, start)
        if self.step_listener is not None:
            self.step_listener(self.name, started_ns, ended_ns)

    def _rss_after_step(self, ended_ns: int) -> int:
        instruments = self.instruments
        tracker, rss = instruments.tracker, instruments.rss()
        if rss > tracker.pending.rss.value:
            with peaks.LOCK:
                tracker.step(rss, ended_ns, None)
        return rss

    def _add_step_of_device(
        self, timings: StepTimings, started_ns: int, ended_ns: int, start: Mark | None
    ) -> None:
        instruments = self.instruments
        end = None if start is None else instruments.mark(start.device)
        device = instruments.device_in_use() if start is None else start.device
        rss = instruments.rss() if self._step_memory else UNKNOWN
        with peaks.LOCK:
            allocated = instruments.tracker.step(rss, ended_ns, device)
            instruments.add_timing(timings, len(self.columns), start, end)
            self.columns.add(row(started_ns, ended_ns, rss, allocated))

    def close(self, error: BaseException | None) -> None:
        """Stop the clock, then take what there is at the end.

        Args:
            error: What ended the stage early. Only its text is kept.
        """
        instruments = self.instruments
        self.ended_ns = ended_ns = instruments.clock()
        self.step_listener = None
        memory = HostMemory()
        try:
            instruments.sampled.close(self._samples)
            self._end_on_device()
            self._final = instruments.snapshot()
            memory = instruments.host_memory(self._final)
        finally:  # also when Ctrl-C comes just now: nothing of ours may go on
            try:
                if self._peaks is not None:
                    instruments.tracker.close(self._peaks, memory, ended_ns)
            finally:
                instruments.sampled.close(self._samples)
                instruments.stop_sampling()
        instruments.resolve(self.columns.timings)
        if error is not None:
            self.error = describe(error)
            self.exception_details = instruments.guard.call("exception_details", lambda: details(error))

    def _end_on_device(self) -> None:
        instruments, edges, began = self.instruments, self._edges, self._began
        if edges is not None:
            end = None if began is None else instruments.mark(began.device)
            with peaks.LOCK:
                instruments.guard.call("gpu_timing", lambda: instruments.stage_edges.add(edges, began, end))

    def freeze(self, run_started_ns: int) -> Stage:
        """Return the record as it is now. An open stage ends now, and says so."""
        instruments = self.instruments
        unavailable = dict(self.unavailable)
        ended_ns = self.ended_ns
        if ended_ns is None:
            ended_ns = instruments.clock()
            unavailable["end"] = STILL_OPEN
        memory = self._memory()
        if memory is None:
            unavailable["memory"] = instruments.guard.reasons.get("memory_snapshot", "nothing was read")
        sampled, why_not_sampled = instruments.sampled.freeze(
            self._samples, self.started_ns, is_outermost=self.is_outermost
        )
        facts = sampled | self.facts
        unavailable |= {**why_not_sampled, **dict.fromkeys(sampled.keys() & self.facts.keys(), OWN_FACT)}
        instruments.resolve(self._edges)
        on_device, why_not = of_stage(self._edges)
        if on_device is not None:
            facts[DEVICE_SECONDS] = on_device
        elif why_not is not None:
            unavailable[DEVICE_SECONDS] = instruments.step_reasons().get("gpu_seconds") or why_not
        return Stage(
            name=self.name,
            started_seconds=(self.started_ns - run_started_ns) / 1e9,
            seconds=(ended_ns - self.started_ns) / 1e9,
            success=self.error is None,
            error=self.error,
            exception_details=self.exception_details,
            memory=memory,
            peak=self._peak(),
            steps=self._steps(self.started_ns),
            children=tuple(child.freeze(run_started_ns) for child in list(self.children)),
            tensors=dict(self.tensors),
            modules=dict(self.modules),
            facts=facts,
            unavailable=unavailable,
        )

    def freeze_steps(self, run_started_ns: int) -> Stage:
        """Return a stage of what a scope that was never opened has: steps, from the first to the last."""
        started_ns, ended_ns = self.columns.edges() or (run_started_ns, run_started_ns)
        return Stage(
            name=self.name,
            started_seconds=(started_ns - run_started_ns) / 1e9,
            seconds=(ended_ns - started_ns) / 1e9,
            steps=self._steps(started_ns),
            unavailable=dict.fromkeys(("memory", "peak", UTILIZATION, MEMORY_OVER_TIME), OUTSIDE),
        )

    def _steps(self, started_ns: int) -> Steps:
        self.instruments.resolve(self.columns.timings)
        return self.columns.freeze(started_ns, self.instruments.step_reasons())

    def _memory(self) -> MemoryImpact | None:
        final = self._final if self.ended_ns is not None else self.instruments.snapshot()
        if self._baseline is None or final is None:
            return None
        return MemoryImpact(self._baseline, final)

    def _peak(self) -> PeakMemory | None:
        if self._peaks is None:
            return None
        peak = self._peaks.freeze(self.started_ns, self.instruments.device_reasons)
        return replace(peak, unavailable=self.instruments.peak_reasons(peak))
