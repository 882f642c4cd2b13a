"""One generation while it runs: its clock, its steps, and where it will end."""

from collections.abc import Callable
from typing import Final

from sigmascope.monitor.context import current_recorder
from sigmascope.monitor.generation_steps import GenerationSteps
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.request import current_request_id
from sigmascope.monitor.step_progress import StepListeners, StepProgress
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
        steps: Its steps.

    Args:
        metrics: What is known beforehand: names, plan and target.
        make_recorder: Makes a recorder where none is current.
        listeners: Of the steps.
        guard: The monitor's.
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

    def begin(self) -> None:
        """Open the stage and start the clock."""
        if self._own is not None:
            self._guard.read("generation", self._own.__enter__)
        self._guard.read("generation", self._stage.__enter__)
        self._stage.on_step(self.steps.take)
        self.is_open = True
        self._stopwatch_ns = started_ns = self.recorder.clock()
        self.steps.begin(started_ns)

    def end(self, error: BaseException | None = None) -> Stage | None:
        """Stop the clock and close the stage; None if the record cannot be read."""
        self.is_open = False
        self.steps.finish()
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

    def progress(self) -> StepProgress:
        """Where it is now."""
        return self.steps.progress()

    def gpu_busy_percent(self) -> dict[str, float]:
        """How busy each NVIDIA device is now; empty: not known."""
        return self.recorder.gpu_busy_percent()
