"""Which generation a thread or task is in, and those that are over."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace

from sigmascope.analysis.diagnostics.diagnose import diagnose
from sigmascope.monitor.generation import Generation
from sigmascope.monitor.generation_metrics import fill_memory, fill_times, mean_step_seconds
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.live_line import LiveLine
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.request import SERVED
from sigmascope.monitor.step_progress import StepListeners
from sigmascope.records.finding import Finding
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.pipeline import PipelineFacts
from sigmascope.records.run import Run, Stage

_log = logging.getLogger(__name__)
_LEVELS = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
}

# By monitor, the generation that this thread or task is in, or was in last. Replaced, never changed. A context lives
# as long as its thread, so it must not keep monitors alive, nor what belonged to those that are gone.
_NONE: Mapping["weakref.ref[Generations]", Generation] = {}
_CURRENT: ContextVar[Mapping["weakref.ref[Generations]", Generation]] = ContextVar(
    "sigmascope_generations", default=_NONE
)


class Generations:
    """The generations of one monitor. Safe to use from any thread or task.

    Args:
        make_recorder: Makes a recorder of a name.
        history: How many finished generations to remember.
        step_history: How many steps' times to remember.
        guard: The monitor's.
        live_line: Where to show them while they run; None: nowhere.
    """

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
        """Begin one, inside the one that is running here, if any.

        Args:
            metrics: What is known beforehand.
            facts: Of the pipeline.
        """
        generation = Generation(
            metrics, lambda: self._make_recorder(metrics.model_name), self.listeners, self._guard
        )
        generation.facts = facts
        generation.outer = self.running()
        self._set_own(generation)
        generation.begin()
        live_line = self._live_line
        if live_line is not None:
            self._guard.read("live line", lambda: live_line.add(generation))
        return generation

    def end(self, generation: Generation, error: BaseException | None) -> None:
        """End it, and remember it if it went well."""
        if generation.is_open:
            try:
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
        steps = generation.steps
        fill_times(metrics, None if stage is None else stage.seconds, mean_step_seconds(stage, steps.tally))
        metrics.pipeline_setup_time = steps.setup_seconds()
        fill_memory(metrics, stage, generation.host())
        generation.keep()
        served = SERVED.get()
        if served is not None:
            served.generations.append(generation.metrics.as_dict() | {"run_id": generation.recorder.id})
        with self._lock:
            self._last = generation
            if succeeded and stage is not None:
                self._finished.append(replace(metrics))
            if generation.run is not None:
                self.runs.append(generation.run)
        if metrics.target_met is False and generation.run is not None:
            _log_findings(diagnose(generation.run))
        if generation.outer is not None and generation.outer.is_open and self.own() is generation:
            self._set_own(generation.outer)
        generation.outer = None

    def _set_own(self, generation: Generation | None) -> None:
        own = self._key
        others = {key: one for key, one in _CURRENT.get().items() if key is not own and key() is not None}
        _CURRENT.set(others if generation is None else {**others, self._key: generation})


def _log_findings(findings: tuple[Finding, ...]) -> None:
    """Why a target was missed, as far as the rules know."""
    for finding in findings:
        _log.log(_LEVELS[finding.severity], "%s %s", finding.message, finding.advice or "")
