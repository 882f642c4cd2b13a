"""One generation while it runs: its clock, its steps, where it will end, and what is kept when it is over.

A `Generation` is a stage of the recorder that is current, or of one of its own. `GenerationSteps` counts its
steps, tells those who listen, and holds them against the target; `StepTally` knows how long they took and where
they lead. `GenerationHistory` knows which generation a thread or task is in, and those that are over, whose records
become rows of metrics. The request that a generation is made for is known to whatever runs in the context of
its handling (`SERVED`).
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from statistics import fmean
from threading import RLock, get_ident
from typing import Any, Final

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.generations import (
    fill_step_time,
    meets_target,
    performance_score,
    projected_seconds,
)
from sigmascope.analysis.run_figures import is_timed_on_device, known, step_seconds
from sigmascope.monitor.guard import Guard, log_quietly
from sigmascope.monitor.live_line import LiveLine, StepListeners, StepProgress, running_text
from sigmascope.monitor.publishing import publication
from sigmascope.monitor.recorder import LiveStage, Recorder, Step, current_recorder, frames_here
from sigmascope.monitor.scope import Clock
from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.run import STAGES, CallFacts, Finding, HostFacts, PipelineFacts, Run, Stage
from sigmascope.records.serialization import from_plain

_log = logging.getLogger(__name__)
_LEVELS = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}

STAGE: Final = "generation"

OTHER_STAGES: Final = frozenset(STAGES) - {"denoising"}
"""Stages whose steps (tiles, files, prompts) are not the generation's."""

RECENT_STEPS: Final = 5
"""How many of the last steps the projection takes the mean of."""

_MOST_OF_REQUEST: Final = 1000

_GB = 1e9


class Generation:
    """Made by `PerformanceMonitor`; lies in the recorder that is current, or in one of its own.

    Attributes:
        stands_alone: Begun by `start_timing`, to be ended by `end_timing`.
        is_whole: Whether it ran to its end.
        outer: The generation of the same monitor that this one was begun in.
        run: Its record, once it has ended; of a caller's recorder that of this generation's stage alone.
        facts: Of the pipeline, if they were read.
        steps: Its steps.
    """

    def __init__(
        self,
        metrics: PerformanceMetrics,
        make_recorder: Callable[[], Recorder],
        listeners: StepListeners,
        guard: Guard,
    ) -> None:
        self.metrics = metrics
        self.is_open = False
        self.is_whole = False
        self.stands_alone = False
        self.outer: Generation | None = None
        self.run: Run | None = None
        self.facts: PipelineFacts | None = None
        current = current_recorder()
        self._own = make_recorder() if current is None else None
        self.recorder = recorder = self._own or current or make_recorder()
        self.steps = GenerationSteps(recorder, metrics, listeners, guard)
        self._guard = guard
        self._stage = recorder.stage(STAGE)
        self._stopwatch_ns: int | None = None

    @property
    def has_own_record(self) -> bool:
        """Whether `run` is a record of its own, and no part of a caller's."""
        return self._own is not None

    def begin(self) -> None:
        """Open the stage and start the clock."""
        if self._own is not None:
            self._guard.read("generation", self._own.__enter__)
        self._guard.read("generation", self._stage.__enter__)
        self._stage.on_step(self.steps.take)
        if self._own is not None:
            self._stage.take_in_others()
        self.is_open = True
        self._stopwatch_ns = started_ns = self.recorder.clock()
        self.steps.begin(started_ns)

    def end(self, error: BaseException | None = None) -> Stage | None:
        """Stop the clock and close the stage; None if the record cannot be read."""
        self.steps.finish()
        try:
            self._guard.read("generation", lambda: self._stage.__exit__(None, error, None))
        except BaseException as interruption:  # Ctrl-C just now
            error = error or interruption
            raise
        finally:
            if self._own is not None:
                own = self._own
                self._guard.read("generation", lambda: own.__exit__(None, error, None))
        self.is_open = False  # only now: what Ctrl-C broke off is done by another call
        return self._guard.read("generation", self._stage.record)

    def live_text(self) -> str:
        """How it is doing, in one line."""
        return running_text(self.metrics, self.steps.progress(), self.recorder.gpu_busy_percent())

    def keep(self, seen: CallFacts | None) -> None:
        """Put the metrics on the stage, keep the run, and let go of the rest."""
        self._stage.fact("performance", self.metrics.as_dict())
        self._stage.fact("call", self.metrics.call_facts(seen or CallFacts()))
        if self.facts is not None:
            self._stage.fact("pipeline", self.facts)
        self._guard.read("request", lambda: tell_request(self._stage, self.recorder.clock))
        own = self._own
        self.run = self._guard.read(
            "generation", lambda: self.recorder.run_of(self._stage) if own is None else own.run()
        )

    def publish(self) -> None:
        """Hand it over to those who export runs, unless it is part of another one."""
        publication(self.recorder, self._stage)()

    def restart_stopwatch(self) -> None:
        """Let `stopwatch` count from now."""
        self._stopwatch_ns = self.recorder.clock()

    def stopwatch(self) -> float | None:
        """Seconds since the generation began or `restart_stopwatch`."""
        return None if self._stopwatch_ns is None else (self.recorder.clock() - self._stopwatch_ns) / 1e9


class GenerationSteps:
    """Takes steps in one of two ways: by the calls `start` and `end`, or as its stage's recorder takes them.

    Where there are calls they alone count, so that a pipeline that is watched in both ways has no step
    twice.
    """

    def __init__(
        self, recorder: Recorder, metrics: PerformanceMetrics, listeners: StepListeners, guard: Guard
    ) -> None:
        self.tally = StepTally()
        self._recorder = recorder
        self._metrics = metrics
        self._listeners = listeners
        self._guard = guard
        self._started_ns = 0
        self._open: dict[int, Step] = {}
        self._is_called = False
        self._is_over = False
        self._warned = False
        self._lock = RLock()  # its holder may log, and a handler of the host may ask for progress

    def begin(self, started_ns: int) -> None:
        """Count time from here, on the recorder's clock."""
        self._started_ns = started_ns

    def finish(self) -> None:
        """Take no more, and let go of everyone."""
        self._is_over = True
        self._open.clear()
        self._listeners = StepListeners()

    def start(self) -> None:
        """Begin a step of this thread; one that it began and did not end is dropped."""
        thread = get_ident()
        step = self._open.get(thread)
        if step is None:
            self._is_called = True
            step = self._open[thread] = self._recorder.step()
        else:
            step.drop()
        step.__enter__()

    def end(self) -> float | None:
        """End this thread's step; its seconds, or None if none was begun."""
        step = self._open.get(get_ident())
        if step is None:
            return None
        step.__exit__(None, None, None)
        return None if step.last is None else self._count(*step.last)

    def take(self, stage: str, started_ns: int, ended_ns: int) -> None:
        """Take a step that the recorder took in the generation's stage, or in one inside it."""
        if not (self._is_called or self._is_over or stage in OTHER_STAGES):
            self._count(started_ns, ended_ns)

    def _count(self, started_ns: int, ended_ns: int) -> float:
        seconds = (ended_ns - started_ns) / 1e9
        listeners = self._listeners
        listeners.seconds.append(seconds)
        with self._lock:
            self.tally.add(started_ns, ended_ns)
            progress = self._guard.call("step progress", lambda: self._progress(seconds, ended_ns))
            if progress is None:
                return seconds
            is_first_warning = progress.misses_target and not self._warned
            self._warned = self._warned or is_first_warning
        on_step = listeners.on_step
        if on_step is not None:
            self._guard.call("step listener", lambda: on_step(progress))
        if is_first_warning:
            self._guard.call("early warning", lambda: listeners.warn(progress))
        return seconds

    def _progress(self, step_seconds: float, at_ns: int) -> StepProgress:
        """Where the generation was at a moment; with the lock held."""
        metrics = self._metrics
        planned, target = metrics.num_inference_steps, metrics.target_generation_time
        if "num_inference_steps" in metrics.assumed:
            planned = 0  # nobody said how many there will be
        elapsed_ns = at_ns - self._started_ns
        projected = self.tally.projected_seconds(elapsed_ns, planned)
        return StepProgress(
            self.tally.count,
            planned,
            step_seconds,
            elapsed_ns / 1e9,
            projected,
            target,
            self._is_beyond_target(projected),
        )

    def _is_beyond_target(self, seconds: float) -> bool:
        metrics = self._metrics
        return seconds > metrics.target_generation_time and not metrics.target_assumed

    def setup_seconds(self) -> float | None:
        """From the beginning to the first step; None without steps."""
        first_ns = self.tally.first_ns
        return None if first_ns is None else (first_ns - self._started_ns) / 1e9

    def elapsed_seconds(self) -> float:
        """Since the beginning."""
        return (self._recorder.clock() - self._started_ns) / 1e9

    def progress(self) -> StepProgress:
        """Where it is now, also between steps: what the last steps led to, and never less than what has elapsed."""
        with self._lock:
            tally = self.tally
            last = self._progress(tally.recent_seconds() or 0.0, tally.ended_ns or self._started_ns)
        elapsed = self.elapsed_seconds()
        projected = max(last.projected_seconds, elapsed)
        return replace(
            last,
            elapsed_seconds=elapsed,
            projected_seconds=projected,
            misses_target=self._is_beyond_target(projected),
        )


class StepTally:
    """How many steps there were, and how long they took. Not locked.

    Attributes:
        count: Steps so far.
        first_ns: When the first began, on the recorder's clock; None: none has ended yet.
        ended_ns: When the last ended.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_ns: int | None = None
        self.ended_ns: int | None = None
        self._total_ns = 0
        self._recent_ns: deque[int] = deque(maxlen=RECENT_STEPS)

    def add(self, started_ns: int, ended_ns: int) -> None:
        """Count a step."""
        if self.first_ns is None:
            self.first_ns = started_ns
        self.ended_ns = ended_ns
        self.count += 1
        self._total_ns += ended_ns - started_ns
        self._recent_ns.append(ended_ns - started_ns)

    def mean_seconds(self) -> float | None:
        """Of all steps; None without any."""
        return self._total_ns / self.count / 1e9 if self.count else None

    def recent_seconds(self) -> float | None:
        """Mean of the last few; None without any."""
        return sum(self._recent_ns) / len(self._recent_ns) / 1e9 if self._recent_ns else None

    def projected_seconds(self, elapsed_ns: int, planned: int) -> float:
        """Where the generation will end: what has elapsed, and the last steps' mean for each that is left."""
        return projected_seconds(elapsed_ns / 1e9, self.recent_seconds() or 0.0, planned - self.count)


@dataclass(slots=True)
class ServedRequest:
    """A request while it is served.

    Attributes:
        request_id: What generations are marked with.
        generations: The metrics of those that are over, the last ones: a websocket may be served for days.
        on_run: Called with the run of each that is over, but for those whose record is a caller's.
        route: Gives the template of the request's route, as soon as it is known.
        waits_since_ns: When it came, by `time.perf_counter_ns`, until its first generation is over, which has waited since
            then; None: nobody waits, or that is not known.
    """

    request_id: str
    generations: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_OF_REQUEST))
    on_run: Callable[[Run], object] | None = None
    route: Callable[[], str | None] = lambda: None
    waits_since_ns: int | None = None


SERVED: ContextVar[ServedRequest | None] = ContextVar("sigmascope_request", default=None)
"""The request of this thread or task. A task starts with its creator's, and so does a server's worker thread."""


def current_request_id() -> str | None:
    """The id of the request that this context serves; None outside of all requests."""
    served = SERVED.get()
    return None if served is None else served.request_id


def tell_request(stage: LiveStage, clock: Clock) -> None:
    """Put on a generation, which is over, for which request it was, by which route, and how long that waited for it.

    The wait is that of the request's first generation, and only where the recorder has the clock of requests.
    """
    served = SERVED.get()
    if served is None:
        return
    stage.fact("request_id", served.request_id)
    if any(frame.scope.name == STAGE for frame in frames_here()):
        return  # the one around it is told
    route, since_ns = served.route(), served.waits_since_ns
    if route is not None:
        stage.fact("route", route)
    if since_ns is not None and clock is time.perf_counter_ns:
        served.waits_since_ns = None
        stage.fact("seconds_before", {"queue": max(0, stage.started_ns - since_ns) / 1e9})


# By monitor, the generation that this thread or task is in, or was in last. Replaced, never changed. A context lives
# as long as its thread, so it must not keep monitors alive, nor what belonged to those that are gone.
_NONE: Mapping["weakref.ref[GenerationHistory]", Generation] = {}
_CURRENT: ContextVar[Mapping["weakref.ref[GenerationHistory]", Generation]] = ContextVar(
    "sigmascope_generations", default=_NONE
)


class GenerationHistory:
    """The generations of one monitor. Safe to use from any thread or task."""

    def __init__(
        self,
        make_recorder: Callable[[str], Recorder],
        history: int,
        step_history: int,
        guard: Guard,
        live_line: LiveLine | None = None,
    ) -> None:
        self.runs: deque[Run] = deque(maxlen=history)
        self._make_recorder = make_recorder
        self._guard = guard
        self._live_line = live_line
        self._finished: deque[PerformanceMetrics] = deque(maxlen=history)
        self.listeners = StepListeners(seconds=deque(maxlen=step_history))
        self._last: Generation | None = None
        self._lock = threading.Lock()
        self._key = weakref.ref(self)

    def own(self) -> Generation | None:
        """The generation that this thread or task is in, or was in last."""
        return _CURRENT.get().get(self._key)

    def running(self) -> Generation | None:
        """The generation that this thread or task is in."""
        own = _CURRENT.get().get(self._key)
        return own if own is not None and own.is_open else None

    def latest(self) -> Generation | None:
        """This thread's or task's own; else the one that finished last anywhere."""
        return self.own() or self._last

    def begin(self, metrics: PerformanceMetrics, facts: PipelineFacts | None = None) -> Generation:
        """Begin one, inside the one that is running here, if any."""
        generation = Generation(
            metrics, lambda: self._make_recorder(metrics.model_name), self.listeners, self._guard
        )
        generation.facts = facts
        generation.outer = self.running()
        self._set_own(generation)
        try:
            generation.begin()
        except BaseException as interruption:  # Ctrl-C just now: nobody ends what has not begun
            self._set_own(generation.outer)
            generation.end(interruption)
            raise
        live_line = self._live_line
        if live_line is not None:
            self._guard.read("live line", lambda: live_line.add(generation))
        return generation

    def end(self, generation: Generation, error: BaseException | None) -> None:
        """End it, and remember it if it went well. What Ctrl-C broke off is done by another call."""
        try:
            if generation.is_open:
                stage = generation.end(error)
                self._guard.read("metrics", lambda: self._finish(generation, stage, succeeded=error is None))
        finally:  # also when Ctrl-C comes just now
            live_line = self._live_line
            if live_line is not None:
                self._guard.read("live line", lambda: live_line.remove(generation, error))

    def forget_own(self) -> None:
        """Let this thread or task have had no generation, unless it is in one."""
        if self.running() is None:
            self._set_own(None)
            with self._lock:
                self._last = None

    def clear(self) -> None:
        """Forget what is over."""
        with self._lock:
            self._finished.clear()
            self.listeners.seconds.clear()
            self.runs.clear()

    def history(self) -> tuple[list[PerformanceMetrics], list[float]]:
        """Finished generations that went well, and steps' seconds, oldest first."""
        with self._lock:
            return list(self._finished), list(self.listeners.seconds)

    def _finish(self, generation: Generation, stage: Stage | None, *, succeeded: bool) -> None:
        metrics = generation.metrics
        generation.is_whole = succeeded
        steps = generation.steps
        fill_times(metrics, None if stage is None else stage.seconds, mean_step_seconds(stage, steps.tally))
        metrics.pipeline_setup_time = steps.setup_seconds()
        fill_memory(metrics, stage, generation.recorder.host())
        seen = None if stage is None else _call_within(stage)
        metrics.fill_assumed(seen, steps.tally.count if succeeded else 0)
        fill_step_time(metrics, is_whole=succeeded)
        generation.keep(seen)
        served = SERVED.get()
        if served is not None:
            served.generations.append(generation.metrics.as_dict() | {"run_id": generation.recorder.id})
            if served.on_run is not None and generation.run is not None and generation.has_own_record:
                served.on_run(generation.run)
        generation.publish()
        with self._lock:
            self._last = generation
            if succeeded and stage is not None:
                self._finished.append(replace(metrics))
            if generation.run is not None:
                self.runs.append(generation.run)
        if metrics.misses_target and generation.run is not None:
            _log_findings(diagnose(generation.run))
        if generation.outer is not None and generation.outer.is_open and self.own() is generation:
            self._set_own(generation.outer)
        generation.outer = None

    def _set_own(self, generation: Generation | None) -> None:
        current = {key: other for key, other in _CURRENT.get().items() if key() not in (None, self)}
        _CURRENT.set(current if generation is None else {**current, self._key: generation})


def fill_times(metrics: PerformanceMetrics, total: float | None, per_step: float | None) -> None:
    """Total, step time, and what follows from them for the target."""
    metrics.total_generation_time = total
    metrics.generation_time_per_step = per_step
    metrics.target_met = meets_target(total, metrics.target_generation_time)
    metrics.performance_score = performance_score(total, metrics.target_generation_time)


def _call_within(stage: Stage) -> CallFacts | None:
    """What a watch saw of the one call of a pipeline in a generation; None: of none, or of several."""
    calls = [part.facts["call"] for part in stage.walk() if part is not stage and "call" in part.facts]
    return from_plain(calls[0], CallFacts, "call") if len(calls) == 1 else None


def mean_step_seconds(stage: Stage | None, tally: StepTally) -> float | None:
    """Mean seconds of the steps: on the accelerator's clock for those it was seen to finish, else on the host's.

    A step still on the device when the generation ends does not count; the record says how many there were.
    """
    parts = () if stage is None else tuple(stage.walk())
    own = [part for part in parts if part.name not in OTHER_STAGES and is_timed_on_device(part)]
    seconds = [duration for part in own for duration in step_seconds(part)]
    on_device = known(seconds)
    return fmean(on_device) if on_device and len(seconds) == tally.count else tally.mean_seconds()


def fill_memory(metrics: PerformanceMetrics, stage: Stage | None, host: HostFacts | None) -> None:
    """Memory and hardware, from the stage's end and its peak; None for what was not measured."""
    snapshot = MemorySnapshot() if stage is None or stage.memory is None else stage.memory.current
    device = snapshot.device_in_use()
    memory = snapshot.accelerator(device or "")
    peak = None if stage is None or stage.peak is None or device is None else stage.peak.accelerator(device)
    used = memory.allocated_bytes if peak is None else peak.allocated_bytes
    metrics.device = device or "cpu"
    metrics.gpu_memory_used_gb = _gb(used)
    metrics.gpu_memory_total_gb = _gb(memory.total_bytes)
    metrics.gpu_memory_utilization_percent = _percent(used, memory.total_bytes)
    metrics.system_memory_used_gb = _gb(snapshot.ram_used_bytes)
    metrics.system_memory_utilization_percent = snapshot.ram_percent_used()
    by_device = {facts.device: facts for facts in host.accelerators} if host else {}
    facts = by_device.get(device or "")
    metrics.gpu_name = None if facts is None else facts.name
    metrics.driver_version = None if facts is None else facts.driver_version


def _gb(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / _GB


def _percent(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole * 100


def _log_findings(findings: tuple[Finding, ...]) -> None:
    """Why a target was missed, as far as the rules know."""
    for finding in findings:
        log_quietly(_log, "%s %s", finding.message, finding.advice or "", level=_LEVELS[finding.severity])
