"""One stage while it is open, what it is measured with, and the record that it becomes.

A recorder has one `Instruments`: its probes, each behind its guard. A `Scope` reads them when the stage opens and
closes and at the end of each step, and keeps the steps row after row in `StepColumns`. `FoldedScopes` has the sums of
scopes that a long run no longer keeps. The accelerator and the facts of the machine are found out once a process.

An event is recorded on the current stream at both edges of a step, which costs the host a few
microseconds. Events that have passed are read when the stage closes, later ones when the run is read.
"""

import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from struct import Struct
from time import process_time_ns
from typing import Final, NamedTuple

from sigmascope.monitor import peaks
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peaks import ACCELERATOR_PEAK, UNKNOWN, HostMemory, Peaks, PeakTracker, reader_for
from sigmascope.monitor.utilization import FAILED, SAMPLER, SampledFacts, SamplerClient, ScopeSamples
from sigmascope.probes import (
    Accelerator,
    AllocatorBytes,
    NullAccelerator,
    detect_accelerator,
    host_facts,
    memory_snapshot,
    process_peak_rss_bytes,
    process_rss_bytes,
    system_memory,
)
from sigmascope.probes.accelerators import AcceleratorEvent, why_no_devices
from sigmascope.probes.processor import ProcessorMoment, processor_moment, processor_use
from sigmascope.records.memory import MemoryImpact, MemorySnapshot, PeakMemory
from sigmascope.records.performance import MEMORY_OVER_TIME, PROCESSOR, UTILIZATION, ProcessorUse
from sigmascope.records.run import (
    DEVICE_SECONDS,
    MOST_LEVELS,
    STAGES,
    ExceptionDetails,
    Folded,
    FoldedStages,
    HostFacts,
    ModuleFacts,
    Stage,
    Steps,
    TensorFacts,
    stage_path,
)
from sigmascope.threads import Life, has_hands_off, this_thread
from sigmascope.units import counted

TOO_DEEP: Final = f"no more than {MOST_LEVELS} stages inside each other are kept"
STILL_OPEN = "the stage was still open when the run was read"
ENDED_BEFORE = "when it had ended was found out later"
OWN_FACT = "the caller put a fact of this name on the stage, which replaces it"
OUTSIDE = "these steps ran outside all stages"
NOT_AT_STEPS = "it was not read at the end of steps (step_memory is off)"
NOT_FINISHED = "the accelerator had not been seen to finish when the run was read"
NOT_MARKED = (
    "events are missing at its beginning or end, for example because the accelerator was not in use yet"
)
TWO_STREAMS = "it began and ended on two streams of the accelerator, which do not wait for each other"
THREAD_ENDED = "the thread that recorded it ended before the accelerator was seen to finish"
UNREADABLE = "the accelerator gave no time between its beginning and end"
BACKWARDS = "the accelerator's clock says that it ended before it began"
NOT_IN_USE = "the accelerator was not in use when the stage began"
GENERATION: Final = "generation"
WHOLE: Final = frozenset({*STAGES, GENERATION})
"""Stages that are kept or folded together with all stages inside them."""
_MOST_NAMES: Final = 16
"""Outside of generations so many names of stages are kept apart, in the order in which they come."""
_MOST_SUMS: Final = 100
OTHERS: Final = "others"
"""Where names are made up call by call, those beyond the first are counted together, under this."""
_NO_STEPS: Final = Steps()
_RESOLVE_FROM = 64
_JUST_PAST_NS: Final = 500_000
COLUMNS: Final = 5
"""Of `StepColumns`."""
_ROW: Final = Struct(f"={COLUMNS}q").pack
StepListener = Callable[[str, int, int], None]
"""Called with a stage's name, and when its step began and ended in nanoseconds of the recorder's clock."""
Clock = Callable[[], int]
"""Monotonic nanoseconds."""
_PROCESSOR_FIELDS: Final = tuple(field.name for field in fields(ProcessorUse))
"""All of them are numbers: no need of `asdict`, which costs more than all else of it."""
_host_facts: dict[int, tuple[Accelerator, HostFacts]] = {}
"""What `facts_of_host` has read, by the accelerator object's id."""


_AT_ONCE_NS: Final = 20_000
"""Between two steps: the processor time of so short a while is none to speak of beside a step's."""


class Scope:
    """What is known of a stage so far. Baseline → steps and peaks → the memory at its end.

    Attributes:
        path: Its name with those of the stages around it, such as "generation/denoising".
        thread_id: Of the thread that opened it.
        in_step: Whether a step of it runs now.
        planned_steps: How many steps it will have; None: nobody said.
    """

    def __init__(self, name: str, instruments: "Instruments") -> None:
        self.name = name
        self.instruments = instruments
        self.is_outermost = False
        self.path = name  # until it is opened
        self.thread_id = 0
        self.in_step = False
        self.planned_steps: int | None = None
        self._step_cpu_ns = 0  # the process's time when the step began, or the last one ended
        self._stepped_ns: int | None = None
        self.was_opened = False
        self.started_ns = 0
        self.ended_ns: int | None = None
        self._is_ended_before = False
        self.columns = StepColumns(instruments.new_timings())
        self.step_listener: StepListener | None = None
        self.takes_in_others = False
        self.children: list[Scope] = []
        self.stays_whole = False
        self._closed: dict[str, deque[Scope]] = {}
        self.tensors: dict[str, TensorFacts] = {}
        self.modules: dict[str, ModuleFacts] = {}
        self.facts: dict[str, object] = {}
        self.unavailable: dict[str, str] = {}
        self.error: str | None = None
        self.exception_details: ExceptionDetails | None = None
        self._baseline: MemorySnapshot | None = None
        self._final: MemorySnapshot | None = None
        self._peaks: Peaks | None = None
        self._samples: ScopeSamples | None = None
        self._edges = instruments.new_timings()
        self._began: Mark | None = None
        self._processor: list[ProcessorMoment] = []

    def open(self) -> None:
        """Take the baseline, then start the clock."""
        instruments = self.instruments
        self.was_opened = True
        self.thread_id = threading.get_ident()
        self.started_ns = instruments.clock()
        self._baseline = instruments.snapshot()
        instruments.start_sampling(self)
        memory = instruments.host_memory(self._baseline)
        self._peaks = instruments.tracker.open(memory, instruments.clock())
        self._samples = instruments.sampled.open(instruments.clock(), is_outermost=self.is_outermost)
        if self._edges is not None:
            self._began = instruments.mark()
        self._look_at_processor(is_beginning=True)
        self.started_ns = instruments.clock()

    def begin_step(self) -> int:
        """Note that a step begins now; gives when, on the recorder's clock.

        Asking for the processor time takes longer than all else here. Where a step follows the last one at once, it is what it
        was then.
        """
        self.in_step = True
        started_ns, stepped_ns = self.instruments.clock(), self._stepped_ns
        if stepped_ns is not None and 0 <= started_ns - stepped_ns < _AT_ONCE_NS:
            return started_ns
        self._step_cpu_ns = process_time_ns()
        return self.instruments.clock()

    def add_step(
        self, started_ns: int, ended_ns: int, start: "Mark | None", ended_cpu_ns: int | None = None
    ) -> None:
        """Take what there is at a step's end.

        Args:
            started_ns: When it began.
            ended_ns: When it ended.
            start: Its beginning on the device.
            ended_cpu_ns: The process's processor time when it ended; None: it ends now.
        """
        began_cpu_ns, self._stepped_ns = self._step_cpu_ns, ended_ns
        self._step_cpu_ns = process_time_ns() if ended_cpu_ns is None else ended_cpu_ns
        cpu_ns = self._step_cpu_ns - began_cpu_ns
        self.in_step = False
        instruments, timings = self.instruments, self.columns.timings
        end, device = None, None
        if start is not None:
            end, device = instruments.mark(start.device), start.device
        elif timings is not None:
            device = instruments.device_in_use()
        rss = instruments.rss() if instruments.step_memory else UNKNOWN
        with peaks.LOCK:
            allocated = instruments.tracker.step(rss, ended_ns, device)
            if timings is not None:
                instruments.add_timing(timings, len(self.columns), start, end)
            self.columns.add(started_ns, ended_ns, rss, allocated, cpu_ns)
        if self.step_listener is not None:
            self.step_listener(self.name, started_ns, ended_ns)

    def close(self, error: BaseException | None) -> None:
        """Stop the clock, then take what there is at the end. What Ctrl-C broke off is done by another call."""
        instruments = self.instruments
        if self.ended_ns is None:
            self.ended_ns = instruments.clock()
        ended_ns = self.ended_ns
        if not self._is_ended_before:
            self._look_at_processor()
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
                instruments.stop_sampling(self)
        instruments.resolve_at_last(self.columns.timings)
        if error is not None:
            self.error = instruments.guard.describe(error)
            self.exception_details = instruments.guard.call(
                "exception_details", lambda: instruments.guard.details(error)
            )

    def _look_at_processor(self, *, is_beginning: bool = False) -> None:
        moment = self.instruments.processor_moment(may_be_just_past=is_beginning)
        if moment is not None:
            self._processor.append(moment)

    def _processor_use(self) -> tuple[dict[str, object], dict[str, str]]:
        """What it used of the processor as facts, and why what is missing is."""
        if len(self._processor) < 2:
            reason = ENDED_BEFORE if self._is_ended_before else STILL_OPEN
            return {}, {PROCESSOR: self.instruments.guard.reasons.get(PROCESSOR, reason)}
        use, why_not = processor_use(self._processor[0], self._processor[-1])
        return {PROCESSOR: {name: getattr(use, name) for name in _PROCESSOR_FIELDS}}, {
            f"{PROCESSOR}.{name}": why for name, why in why_not.items()
        }

    def _end_on_device(self) -> None:
        instruments, edges, began = self.instruments, self._edges, self._began
        if edges is not None:
            end = None if began is None or self._is_ended_before else instruments.mark(began.device)
            with peaks.LOCK:
                instruments.guard.call("gpu_timing", lambda: instruments.stage_edges.add(edges, began, end))

    def end_at(self, moment_ns: int) -> None:
        """Let it have ended at this moment, though it is closed later."""
        self.ended_ns = max(moment_ns, self.started_ns)
        self._is_ended_before = True

    def put_in_place(self, child: "Scope", instead: "list[Scope]") -> None:
        """Put other scopes in the place of one that is over. With `peaks.LOCK` held."""
        at = self.children.index(child)
        self.children[at : at + 1] = instead
        closed = self._closed.get(child.name)
        if closed is not None and child in closed:
            closed.remove(child)
        for other in instead:
            other.is_outermost = child.is_outermost
            if other.ended_ns is not None:
                self.take_closed(other)

    def take_closed(self, child: "Scope") -> None:
        """Note that an inner scope is over, if it may be folded later. With `peaks.LOCK` held."""
        if not self.stays_whole:
            is_known = child.name in self._closed or len(self._closed) < _MOST_NAMES
            closed = self._closed.setdefault(child.name if is_known else OTHERS, deque())
            if not closed or closed[-1] is not child:
                closed.append(child)

    def take_out(self, kept: int) -> "list[Scope]":
        """Remove the oldest closed inner scopes of each name that has too many. With `peaks.LOCK` held."""
        gone = []
        for closed in self._closed.values():
            while len(closed) > kept:
                gone.append(closed.popleft())
                self.children.remove(gone[-1])  # it is among the first
        return gone

    def most_closed(self) -> int:
        """How many closed scopes of one name there are."""
        return max(map(len, self._closed.values()), default=0)

    def freeze(self, run_started_ns: int, levels: int = MOST_LEVELS) -> Stage:
        """Return the record as it is now, down to so many levels. An open stage ends now, and says so."""
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
        used, why_not_used = self._processor_use()
        measured = sampled | used
        facts = measured | self.facts
        unavailable |= why_not_sampled | why_not_used
        unavailable |= dict.fromkeys(measured.keys() & self.facts.keys(), OWN_FACT)
        on_device, why_not = self.device_seconds()
        if on_device is not None:
            facts[DEVICE_SECONDS] = on_device
        elif why_not is not None:
            unavailable[DEVICE_SECONDS] = instruments.step_reasons().get("gpu_seconds") or why_not
        children = list(self.children)
        if children and levels == 1:
            unavailable["children"] = TOO_DEEP
            children = []
        return Stage(
            name=self.name,
            started_seconds=(self.started_ns - run_started_ns) / 1e9,
            seconds=(ended_ns - self.started_ns) / 1e9,
            success=self.error is None,
            error=self.error,
            exception_details=self.exception_details,
            memory=memory,
            peak=self.peak_so_far(),
            steps=self._steps(self.started_ns),
            children=tuple(child.freeze(run_started_ns, levels - 1) for child in children),
            tensors=dict(self.tensors),
            modules=dict(self.modules),
            facts=facts,
            unavailable=unavailable,
        )

    def device_seconds(self) -> tuple[float | None, str | None]:
        """What it took on the accelerator, or why that is not known."""
        self.instruments.resolve(self._edges)
        return stage_gpu_seconds(self._edges)

    def freeze_steps(self, run_started_ns: int) -> Stage:
        """Return the steps of a scope that was never opened as a stage, which lasts from the first to the last."""
        started_ns, ended_ns = self.columns.edges() or (run_started_ns, run_started_ns)
        return Stage(
            name=self.name,
            started_seconds=(started_ns - run_started_ns) / 1e9,
            seconds=(ended_ns - started_ns) / 1e9,
            steps=self._steps(started_ns),
            unavailable=dict.fromkeys(("memory", "peak", UTILIZATION, MEMORY_OVER_TIME), OUTSIDE),
        )

    def _steps(self, started_ns: int) -> Steps:
        if not len(self.columns):
            return _NO_STEPS
        self.instruments.resolve(self.columns.timings)
        return self.columns.freeze(started_ns, self.instruments.step_reasons())

    def _memory(self) -> MemoryImpact | None:
        final = self._final if self.ended_ns is not None else self.instruments.snapshot()
        if self._baseline is None or final is None:
            return None
        return MemoryImpact(self._baseline, final)

    def peak_so_far(self) -> PeakMemory | None:
        """The highest memory seen in it; None: nothing was read."""
        if self._peaks is None:
            return None
        instruments = self.instruments
        return self._peaks.freeze(self.started_ns, instruments.device_reasons, instruments.peak_reasons)


class FoldedScopes:
    """Sums of closed scopes that a recorder no longer keeps. With `peaks.LOCK` held."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.generations = 0
        self._sums: dict[str, FoldedStages] = {}
        self._peaks = Peaks()
        self._first_ns: int | None = None
        self._last_ns = 0

    def add(self, scope: Scope) -> None:
        """Take a scope with all that lies in it."""
        self._first_ns = scope.started_ns if self._first_ns is None else min(self._first_ns, scope.started_ns)
        self._last_ns = max(self._last_ns, scope.ended_ns or 0)
        if scope._peaks is not None:
            self._peaks.fold(scope._peaks)
        self.generations += _generations_in(scope)
        self._add_sums(scope, "")

    def _add_sums(self, scope: Scope, around: str) -> None:
        path = around + stage_path(scope.name)
        if path not in self._sums and len(self._sums) >= _MOST_SUMS:
            path = OTHERS
        was = self._sums.get(path, FoldedStages(0, 0.0, 0.0))
        seconds = ((scope.ended_ns or scope.started_ns) - scope.started_ns) / 1e9
        on_device = scope.device_seconds()[0]
        figures = scope.columns.figures()
        self._sums[path] = FoldedStages(
            was.count + 1,
            was.seconds + seconds,
            max(was.longest_seconds, seconds),
            was.failures + (scope.error is not None),
            was.device_seconds + (on_device or 0.0),
            was.timed_on_device + (on_device is not None),
            was.steps + len(figures) // COLUMNS,
            was.step_seconds + (sum(figures[1::COLUMNS]) - sum(figures[0::COLUMNS])) / 1e9,
        )
        for child in list(scope.children):
            self._add_sums(child, f"{path}/")

    def freeze(self, run_started_ns: int, instruments: "Instruments") -> Folded | None:
        """Return the record; None where nothing was folded."""
        if self._first_ns is None:
            return None
        return Folded(
            kept=self.kept,
            generations=self.generations,
            first_at_seconds=(self._first_ns - run_started_ns) / 1e9,
            last_at_seconds=(self._last_ns - run_started_ns) / 1e9,
            stages=dict(self._sums),
            peak=self._peaks.freeze(run_started_ns, instruments.device_reasons, instruments.peak_reasons),
        )


def _generations_in(scope: Scope) -> int:
    """How many generations it is or holds, without those inside others."""
    is_generation = scope.name == GENERATION or not scope.facts.keys().isdisjoint(("call", "pipeline"))
    return 1 if is_generation else sum(map(_generations_in, list(scope.children)))


class StepColumns:
    """When each step began and ended, the memory at its end, and its processor time: five integers, 40 bytes, a step."""

    __slots__ = ("_figures", "timings")

    def __init__(self, timings: "StepTimings | None") -> None:
        self._figures = array("q")
        self.timings = timings

    def __len__(self) -> int:
        return len(self._figures) // COLUMNS

    def add(self, started_ns: int, ended_ns: int, rss: int, allocated: int, cpu_ns: int) -> None:
        """Append a step, whole: within `frombytes` no other thread, handler of a signal or Ctrl-C has a turn."""
        self._figures.frombytes(
            _ROW(started_ns, ended_ns, rss, allocated, cpu_ns)
        )  # half the time of `extend`

    def last_ended_ns(self) -> int | None:
        """When the last step ended; None before the first."""
        figures = self._figures
        return figures[1 - COLUMNS] if figures else None

    def last_seconds(self, most: int) -> tuple[float, ...]:
        """What the last steps took, the oldest first."""
        figures = self._figures[-most * COLUMNS :]
        return tuple(
            (end - start) / 1e9 for start, end in zip(figures[0::COLUMNS], figures[1::COLUMNS], strict=True)
        )

    def figures(self) -> Sequence[int]:
        """Step after step, as they are now."""
        return self._figures[:]

    def edges(self) -> tuple[int, int] | None:
        """When the first step began and the last one ended; None without any."""
        figures = self.figures()
        return (min(figures[0::COLUMNS]), max(figures[1::COLUMNS])) if figures else None

    def freeze(self, stage_started_ns: int, reasons: Mapping[str, str]) -> Steps:
        """Return the record, with `started` in seconds since the stage began."""
        with peaks.LOCK:  # each row with its timing; the host's steps wait for no more than a copy
            figures = self.figures()
            gpu_seconds = _gpu_seconds(self.timings, len(figures) // COLUMNS)
            why = "" if self.timings is None else _why_untimed(self.timings, gpu_seconds)
        started_ns, ended_ns, rss, allocated, cpu_ns = (figures[column::COLUMNS] for column in range(COLUMNS))
        bytes_columns = {
            "rss_bytes": _none_where_unknown(rss),
            "allocated_bytes": _none_where_unknown(allocated),
        }
        unavailable = {"gpu_seconds": why} if why else {}
        if gpu_seconds and None in gpu_seconds and "gpu_seconds" in reasons:
            unavailable["gpu_seconds"] = reasons["gpu_seconds"]
        for name, column in {"gpu_seconds": gpu_seconds, **bytes_columns}.items():
            if not column and started_ns:
                unavailable.setdefault(name, reasons.get(name, "every reading failed"))
        return Steps(
            started=tuple((start - stage_started_ns) / 1e9 for start in started_ns),
            seconds=tuple((end - start) / 1e9 for start, end in zip(started_ns, ended_ns, strict=True)),
            gpu_seconds=gpu_seconds,
            cpu_seconds=tuple(nanoseconds / 1e9 for nanoseconds in cpu_ns),
            unavailable=unavailable,
            **bytes_columns,
        )


def _gpu_seconds(timings: "StepTimings | None", steps: int) -> tuple[float | None, ...]:
    """The column; empty when nothing is known."""
    seconds = () if timings is None else timings.of_first(steps)
    return seconds if any(value is not None for value in seconds) else ()


def _none_where_unknown(column: Sequence[int]) -> tuple[int | None, ...]:
    """The column with None for what is not known; empty when nothing is."""
    if all(value == UNKNOWN for value in column):
        return ()
    return tuple(None if value == UNKNOWN else value for value in column)


def _why_untimed(timings: "StepTimings", gpu_seconds: tuple[float | None, ...]) -> str:
    """Why steps are without a time on the accelerator, where some have one or may still get it; else nothing."""
    reasons = {NOT_FINISHED: timings.unfinished, **timings.untold}
    reasons[NOT_MARKED] = max(0, gpu_seconds.count(None) - sum(reasons.values()))
    return "; ".join(f"{counted(count, 'step')}: {reason}" for reason, count in reasons.items() if count)


class Instruments:
    """What a recorder measures with. Nothing here raises. `rss`, `mark` and `device_in_use` run at every step."""

    def __init__(
        self,
        accelerator: Accelerator | None,
        sample_hz: float | None,
        clock: Clock = time.perf_counter_ns,
        *,
        step_memory: bool = True,
        keeps_words: bool = True,
    ) -> None:
        self.guard = Guard(keeps_words=keeps_words)
        self.step_memory = step_memory
        self.clock = clock
        if accelerator is None:
            accelerator = self.guard.call("accelerator", accelerator_of_this_process)
        self.accelerator = accelerator or NullAccelerator("it could not be detected")
        reader = self.guard.call(ACCELERATOR_PEAK, lambda: reader_for(self.accelerator))
        self.tracker = PeakTracker(reader, self.guard)
        self._events = None if reader is None else EventPool(self.accelerator.new_event)
        self._other_device: str | None = None
        self._last_moment: tuple[int, ProcessorMoment] | None = None
        self.stage_edges = StageEdges()
        self._sampler_client = SamplerClient(self._sample, sample_hz) if sample_hz and sample_hz > 0 else None
        self.sampled = SampledFacts(self.accelerator, self.guard, is_sampled=self._sampler_client is not None)

    def rss(self) -> int:
        """Resident bytes of this process, or UNKNOWN."""
        if "process_rss" in self.guard.reasons:
            return UNKNOWN
        try:  # as `Guard.call` does, in half its time
            rss = process_rss_bytes()
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            self.guard.switch_off("process_rss", failure)
            return UNKNOWN
        return UNKNOWN if rss is None else rss

    def mark(self, device: str | None = None) -> "Mark | None":
        """Record an event on a device (None: the one in use); None when there is no such thing."""
        if self._events is None:
            return None
        return self.guard.call("gpu_timing", lambda: self._record_event(device))

    def _record_event(self, device: str | None) -> "Mark | None":
        device = device or self._other_device or self.accelerator.current_device()
        return None if device is None or self._events is None else self._events.mark(device)

    def device_in_use(self) -> str | None:
        """The device that the calling thread works on; None without an accelerator."""
        if self._events is None or self._other_device is not None:
            return self._other_device
        return self.guard.call(ACCELERATOR_PEAK, self.accelerator.current_device)

    def new_timings(self) -> "StepTimings | None":
        """A column for the accelerator's time; None without an accelerator."""
        return None if self._events is None else StepTimings(self._events)

    def resolve(self, timings: "StepTimings | None") -> None:
        """Read what the accelerator has finished by now."""
        if timings is not None:
            with peaks.LOCK:
                self.guard.call("gpu_timing", timings.resolve)

    def resolve_at_last(self, timings: "StepTimings | None") -> None:
        """Read what the accelerator has finished by now, and the rest when a later stage ends."""
        if timings is not None:
            with peaks.LOCK:
                self.guard.call("gpu_timing", lambda: self.stage_edges.wait_for(timings))

    def processor_moment(self, *, may_be_just_past: bool) -> ProcessorMoment | None:
        """What this thread has had of the processor up to now.

        Args:
            may_be_just_past: Whether a reading of half a millisecond ago will do: the end of the stage before it.
        """
        now_ns, known = time.perf_counter_ns(), self._last_moment
        is_here = known is not None and known[1].thread == threading.get_ident()
        if may_be_just_past and known is not None and is_here and now_ns - known[0] < _JUST_PAST_NS:
            return known[1]
        moment = self.guard.call(PROCESSOR, processor_moment)
        if moment is not None:
            self._last_moment = now_ns, moment
        return moment

    def settle(self) -> None:
        """Read what the accelerator has finished by now of stages that are over."""
        with peaks.LOCK:
            self.guard.call("gpu_timing", self.stage_edges.look)

    def add_timing(self, timings: "StepTimings", row: int, start: "Mark | None", end: "Mark | None") -> None:
        """Take the marks of the step of this number, with LOCK held."""
        self.guard.call("gpu_timing", lambda: timings.add(row, start, end))

    def snapshot(self) -> MemorySnapshot | None:
        """All memory now."""
        snapshot = self.guard.call("memory_snapshot", lambda: memory_snapshot(self.accelerator))
        if not has_hands_off():  # another thread has another current device
            self._other_device = None if snapshot is None else other_device_in_use(snapshot)
        return snapshot

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

    def start_sampling(self, scope: object) -> None:
        """Sample from now on, on behalf of one more scope."""
        client = self._sampler_client
        if client is not None:
            self.guard.call("sampler", lambda: SAMPLER.open(client, scope))

    def stop_sampling(self, scope: object = None) -> None:
        """End what `start_sampling` began for this scope, or for all (None)."""
        if self._sampler_client is None:
            return
        try:  # even when sampling has been switched off: the thread must end
            if scope is None:
                self._sampler_client.open_scopes.clear()
            SAMPLER.close(self._sampler_client, scope)
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
        absence = reasons.get("accelerator") or self.guard.call("accelerator_devices", self._why_no_devices)
        known = {
            "rss_bytes": reasons.get("process_rss") or (None if self.step_memory else NOT_AT_STEPS),
            "allocated_bytes": reasons.get(ACCELERATOR_PEAK) or absence,
            "gpu_seconds": reasons.get("gpu_timing") or absence or self.accelerator.untimed,
        }
        return {name: reason for name, reason in known.items() if reason is not None}

    def _why_no_devices(self) -> str | None:
        return None if self.accelerator.devices() else why_no_devices(self.accelerator)

    def peak_reasons(self, rss: int | None, ram_used: int | None, has_devices: bool) -> dict[str, str]:
        """For each field of a `PeakMemory` that is missing, why it is."""
        reasons = {}
        if rss is None:
            reasons["rss_bytes"] = self.guard.reasons.get("process_rss") or FAILED
        if ram_used is None:
            reasons["ram_used_bytes"] = self.guard.reasons.get("system_memory") or FAILED
        if not has_devices:
            reasons["accelerators"] = self.step_reasons().get("allocated_bytes") or FAILED
        return reasons

    def device_reasons(self, device: str) -> Mapping[str, str]:
        """Why figures of a device's allocator are missing, by the names of `AllocatorBytes`."""
        return self.guard.call("accelerator_reasons", lambda: self.accelerator.unavailable(device)) or {}


@cache
def accelerator_of_this_process() -> Accelerator:
    """What torch would use, found out once."""
    return detect_accelerator()


def facts_of_host(accelerator: Accelerator) -> HostFacts:
    """Facts about this machine, read once for each accelerator object."""
    known = _host_facts.get(id(accelerator))
    if known is not None:
        return known[1]
    facts = host_facts(accelerator)
    # A device's facts may be hidden until the host initialises it, or from this thread; they are asked for again then.
    if all(device.name is not None for device in facts.accelerators) and not has_hands_off():
        _host_facts.clear()
        _host_facts[id(accelerator)] = (accelerator, facts)
    return facts


def other_device_in_use(snapshot: MemorySnapshot) -> str | None:
    """The device that holds the work, where the current one holds none of it; None: marks go to the current one.

    A pipeline put on "cuda:1" leaves "cuda:0" current, and the marks of its idle stream would tell the host's time.
    """
    device = snapshot.device_in_use()
    is_other = device is not None and device != snapshot.current_device
    return device if is_other and snapshot.accelerator(str(device)).allocated_bytes else None


class EventPool:
    """Events to use again. An event belongs to the device that it was first recorded on."""

    __slots__ = ("_free", "_new_event")

    def __init__(self, new_event: Callable[[str], AcceleratorEvent | None]) -> None:
        self._new_event = new_event
        self._free: dict[str, list[AcceleratorEvent]] = {}

    def mark(self, device: str) -> "Mark | None":
        """Record an event on the device's current stream; None if that is not possible now."""
        try:
            event: AcceleratorEvent | None = self._free[device].pop()
        except (KeyError, IndexError):  # asking first would race with another thread
            event = self._new_event(device)
        if event is None:
            return None
        if not event.record():  # as in a graph's capture, during which no event is destroyed either
            self._free.setdefault(device, []).append(event)
            return None
        return Mark(device, event, event.stream, this_thread())

    def give_back(self, mark: "Mark") -> None:
        """Take back an event that nobody will read again."""
        self._free.setdefault(mark.device, []).append(mark.event)


class Mark(NamedTuple):
    """An event that has been recorded on a device: on which of its streams, and by which thread."""

    device: str
    event: AcceleratorEvent
    stream: int | None
    thread: Life


def _may_ask(thread: Life) -> bool:
    """Whether this is the thread that recorded: a call of CUDA by another would break a graph that it captures."""
    return thread is this_thread() and not has_hands_off()


class StepTimings:
    """Accelerator seconds of one stage's steps, by their numbers; None until the events have passed.

    Attributes:
        seconds: By the steps' numbers.
        untold: By the reason, how many stay None though both edges are known: two streams pass theirs in any order, and
            some devices' clocks go backwards (ROCm/rocm-systems pull request 9375).
    """

    __slots__ = ("_pending", "_pool", "seconds", "untold")

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self.seconds: list[float | None] = []
        self.untold: Counter[str] = Counter()
        # By the thread that recorded their ends.
        self._pending: dict[Life, deque[tuple[int, Mark, Mark]]] = {}

    def add(self, row: int, start: Mark | None, end: Mark | None) -> None:
        """Take the marks at a step's edges; without both it stays None.

        Args:
            row: The step's number, from 0. A step that was missed, because timing had failed or Ctrl-C came just then,
                stays None.
            start: At its beginning.
            end: At its end.
        """
        if start is not None and end is not None:
            if start.stream == end.stream:
                self._pending.setdefault(end.thread, deque()).append((row, start, end))
            else:
                self.untold[TWO_STREAMS] += 1
                self._give_back(start, end)
        self.seconds.extend([None] * (row + 1 - len(self.seconds)))
        if self.unfinished >= _RESOLVE_FROM:
            self.resolve()

    def of_first(self, steps: int) -> tuple[float | None, ...]:
        """The seconds of so many steps."""
        known = self.seconds[:steps]
        return (*known, *[None] * (steps - len(known)))

    def resolve(self) -> None:
        """Read the steps that the accelerator has finished, up to the first that it has not.

        Those that another thread recorded are left to it; nobody will read them once it has ended.
        """
        for thread, pending in tuple(self._pending.items()):
            while pending and _may_ask(thread) and pending[0][2].event.query():
                row, start, end = pending.popleft()
                seconds = start.event.elapsed_seconds(end.event)
                if seconds is None:
                    self.untold[UNREADABLE] += 1
                elif seconds >= 0.0:
                    self.seconds[row] = seconds
                else:
                    self.untold[BACKWARDS] += 1
                self._give_back(start, end)
            while pending and thread() is None:
                _, start, end = pending.popleft()
                self.untold[THREAD_ENDED] += 1
                self._give_back(start, end)

    def _give_back(self, *marks: Mark) -> None:
        for mark in marks:
            self._pool.give_back(mark)

    @property
    def unfinished(self) -> int:
        """How many steps the accelerator has not been seen to finish."""
        return sum(map(len, self._pending.values()))


class StageEdges:
    """The timings of stages that are over, by thread, in the order in which they ended. With `peaks.LOCK` held.

    Each stage that ends reads those before it, so that a long run holds no more events than the device has ahead of it.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[Life, deque[StepTimings]] = {}

    def add(self, timings: StepTimings, start: Mark | None, end: Mark | None) -> None:
        """Take the marks at a stage's edges, as the only entry of its timings."""
        timings.add(0, start, end)
        self.wait_for(timings)

    def wait_for(self, timings: StepTimings) -> None:
        """Read these as far as the accelerator has finished them, and the rest when later stages end."""
        timings.resolve()
        self._waiting.setdefault(this_thread(), deque()).append(timings)
        self.look()

    def look(self) -> None:
        """Read what the accelerator has finished by now, and this thread may ask for."""
        for thread, waiting in tuple(self._waiting.items()):
            if _may_ask(thread) or thread() is None:
                _resolve_first(waiting)
                if not waiting:
                    del self._waiting[thread]


def _resolve_first(waiting: deque[StepTimings]) -> None:
    while waiting:
        waiting[0].resolve()
        if waiting[0].unfinished:
            return
        waiting.popleft()


def stage_gpu_seconds(timings: StepTimings | None) -> tuple[float | None, str | None]:
    """What a stage as a whole took on the accelerator, from the timings of its two edges, or why that is not known.

    Args:
        timings: With one entry once the stage is over; None without an accelerator.
    """
    if timings is None or not timings.seconds:
        return None, None
    if timings.unfinished:
        return None, NOT_FINISHED
    if timings.untold:
        return None, next(iter(timings.untold))
    return timings.seconds[0], NOT_IN_USE if timings.seconds[0] is None else None
