"""One generation while it runs: its clock, its steps, and where it will end."""

from collections.abc import Callable
from threading import Lock, get_ident
from typing import Final

from sigmascope.monitor.context import current_recorder
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.live import Step
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.request import current_request_id
from sigmascope.monitor.step_progress import Listener, StepProgress
from sigmascope.monitor.step_tally import StepTally
from sigmascope.records.host import HostFacts
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.pipeline import CallFacts, PipelineFacts
from sigmascope.records.run import Run, Stage

STAGE: Final = "generation"


class Generation:
    """Made by `PerformanceMonitor`; lies in the recorder that is current, or in one of its own.

    Attributes:
        stands_alone: Begun by `start_timing`, to be ended by `end_timing`.
        outer: The generation of the same monitor that this one was begun in.
        run: Its record, once it has ended, if the recorder is its own.
        facts: Of the pipeline, if they were read.

    Args:
        metrics: What is known beforehand: names, plan and target.
        make_recorder: Makes a recorder where none is current.
        guard: The monitor's.
    """

    def __init__(
        self, metrics: PerformanceMetrics, make_recorder: Callable[[], Recorder], guard: Guard
    ) -> None:
        self.metrics = metrics
        self.tally = StepTally()
        self.is_open = False
        self.stands_alone = False
        self.outer: Generation | None = None
        self.run: Run | None = None
        self.facts: PipelineFacts | None = None
        current = current_recorder()
        self._own = make_recorder() if current is None else None
        self.recorder = recorder = self._own or current or make_recorder()
        self._guard = guard
        self._stage = recorder.stage(STAGE)
        self._started_ns = 0
        self._stopwatch_ns: int | None = None
        self._warned = False
        self._open_steps: dict[int, Step] = {}
        self._lock = Lock()

    def begin(self) -> None:
        """Open the stage and start the clock."""
        if self._own is not None:
            self._guard.read("generation", self._own.__enter__)
        self._guard.read("generation", self._stage.__enter__)
        self.is_open = True
        self._started_ns = self._stopwatch_ns = self.recorder.clock()

    def end(self, error: BaseException | None = None) -> Stage | None:
        """Stop the clock and close the stage; None if the record cannot be read."""
        self.is_open = False
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        try:
            self._guard.read("generation", lambda: self._stage.__exit__(kind, error, trace))
        finally:
            if self._own is not None:
                own = self._own
                self._guard.read("generation", lambda: own.__exit__(kind, error, trace))
        return self._guard.read("generation", self._stage.record)[0]

    def keep(self) -> None:
        """Put the metrics on the stage, keep the run if it is this generation's own, and let go of the rest."""
        self._stage.fact("performance", self.metrics.as_dict())
        width, height = self.metrics.image_resolution
        call = CallFacts(
            num_inference_steps=self.metrics.num_inference_steps or None,
            width=width or None,
            height=height or None,
            batch_size=self.metrics.batch_size,
        )
        self._stage.fact("call", call)
        if self.facts is not None:
            self._stage.fact("pipeline", self.facts)
        request_id = current_request_id()
        if request_id is not None:
            self._stage.fact("request_id", request_id)
        self._open_steps.clear()
        if self._own is not None:
            self.run = self._guard.read("generation", self._own.run)[0]

    def host(self) -> HostFacts | None:
        """Facts about the machine; None if they cannot be read."""
        return self.recorder.host()

    # --- stopwatch

    def restart_stopwatch(self) -> None:
        """Let `stopwatch` count from now."""
        self._stopwatch_ns = self.recorder.clock()

    def stopwatch(self) -> float | None:
        """Seconds since the generation began or `restart_stopwatch`."""
        return None if self._stopwatch_ns is None else (self.recorder.clock() - self._stopwatch_ns) / 1e9

    # --- steps: the hot path

    def start_step(self) -> None:
        """Begin a step of this thread."""
        thread = get_ident()
        step = self._open_steps.get(thread)
        if step is None:
            step = self._open_steps[thread] = self.recorder.step()
        step.__enter__()

    def end_step(self, listener: Listener | None, warn: Listener) -> float | None:
        """End this thread's step.

        Args:
            listener: Called after each step.
            warn: Called once, at the first step from which the target will be missed.

        Returns:
            The step's seconds; None if none was begun.
        """
        step = self._open_steps.get(get_ident())
        if step is None:
            return None
        step.__exit__(None, None, None)
        if step.last is None:
            return None
        started_ns, ended_ns = step.last
        seconds = (ended_ns - started_ns) / 1e9
        tally, metrics = self.tally, self.metrics
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
        self._tell(progress, listener, warn if is_first else None)
        return seconds

    def setup_seconds(self) -> float | None:
        """From the beginning to the first step; None without steps."""
        first_ns = self.tally.first_ns
        return None if first_ns is None else (first_ns - self._started_ns) / 1e9

    def elapsed_seconds(self) -> float:
        """Since the beginning."""
        return (self.recorder.clock() - self._started_ns) / 1e9

    def progress(self) -> StepProgress:
        """Where it is now, also between steps: what the last steps led to, and never less than what has elapsed."""
        with self._lock:
            tally = self.tally
            count, recent = tally.count, tally.recent_seconds() or 0.0
            projected = self._projected(tally.ended_ns or self._started_ns)
        elapsed, target = self.elapsed_seconds(), self.metrics.target_generation_time
        projected = max(projected, elapsed)
        planned = self.metrics.num_inference_steps
        return StepProgress(count, planned, recent, elapsed, projected, target, projected > target)

    def gpu_busy_percent(self) -> dict[str, float]:
        """How busy each NVIDIA device is now; empty: not known."""
        return self.recorder.gpu_busy_percent()

    def _projected(self, now_ns: int) -> float:
        return self.tally.projected_seconds(now_ns - self._started_ns, self.metrics.num_inference_steps)

    def _progress(self, seconds: float, now_ns: int, projected: float) -> StepProgress:
        metrics = self.metrics
        steps, target = metrics.num_inference_steps, metrics.target_generation_time
        elapsed = (now_ns - self._started_ns) / 1e9
        return StepProgress(self.tally.count, steps, seconds, elapsed, projected, target, projected > target)

    def _tell(self, progress: StepProgress, listener: Listener | None, warn: Listener | None) -> None:
        if listener is not None:
            self._guard.call("step listener", lambda: listener(progress))
        if warn is not None:
            self._guard.call("early warning", lambda: warn(progress))
