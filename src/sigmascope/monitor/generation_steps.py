"""The steps of one generation while it runs: counted, told to those who listen, and held against the target."""

from threading import Lock, get_ident
from typing import Final

from sigmascope.monitor.guard import Guard
from sigmascope.monitor.live import Step
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.step_progress import Listener, StepListeners, StepProgress
from sigmascope.monitor.step_tally import StepTally
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.run import STAGES

STEPS_OF_OTHERS: Final = frozenset(STAGES) - {"denoising"}
"""Stages whose steps (tiles, files, prompts) are not the generation's."""


class GenerationSteps:
    """Takes steps in one of two ways: by the calls `start` and `end`, or as its stage's recorder takes them.

    Where there are calls they alone count, so that a pipeline that is watched in both ways has no step twice.

    Attributes:
        tally: How many, and how long.

    Args:
        recorder: Of the generation.
        metrics: Its plan and its target.
        listeners: The monitor's.
        guard: The monitor's.
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
        self._lock = Lock()

    def begin(self, started_ns: int) -> None:
        """Count time from here, on the recorder's clock."""
        self._started_ns = started_ns

    def finish(self) -> None:
        """Take no more, and let go of everyone."""
        self._is_over = True
        self._open.clear()
        self._listeners = StepListeners()

    # --- the hot path

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
        """Take a step that the recorder took in the generation's stage, or in one inside it.

        Args:
            stage: Its name.
            started_ns: On the recorder's clock.
            ended_ns: Just now.
        """
        if not (self._is_called or self._is_over or stage in STEPS_OF_OTHERS):
            self._count(started_ns, ended_ns)

    def _count(self, started_ns: int, ended_ns: int) -> float:
        seconds = (ended_ns - started_ns) / 1e9
        listeners, tally, metrics = self._listeners, self.tally, self._metrics
        listeners.seconds.append(seconds)
        listener = listeners.on_step
        with self._lock:
            tally.add(started_ns, ended_ns)
            if listener is None and self._warned:
                return seconds
            projected = tally.projected_seconds(ended_ns - self._started_ns, metrics.num_inference_steps)
            misses = projected > metrics.target_generation_time
            if listener is None and not misses:
                return seconds
            is_first = misses and not self._warned
            self._warned = self._warned or is_first
            progress = self._progress(seconds, ended_ns, projected)
        self._tell(progress, listener, listeners.warn if is_first else None)
        return seconds

    def _progress(self, seconds: float, now_ns: int, projected: float) -> StepProgress:
        metrics = self._metrics
        steps, target = metrics.num_inference_steps, metrics.target_generation_time
        elapsed = (now_ns - self._started_ns) / 1e9
        return StepProgress(self.tally.count, steps, seconds, elapsed, projected, target, projected > target)

    def _tell(self, progress: StepProgress, listener: Listener | None, warn: Listener | None) -> None:
        if listener is not None:
            self._guard.call("step listener", lambda: listener(progress))
        if warn is not None:
            self._guard.call("early warning", lambda: warn(progress))

    # --- between the steps

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
            tally, planned = self.tally, self._metrics.num_inference_steps
            count, recent = tally.count, tally.recent_seconds() or 0.0
            projected = tally.projected_seconds(
                (tally.ended_ns or self._started_ns) - self._started_ns, planned
            )
        elapsed, target = self.elapsed_seconds(), self._metrics.target_generation_time
        projected = max(projected, elapsed)
        return StepProgress(count, planned, recent, elapsed, projected, target, projected > target)
