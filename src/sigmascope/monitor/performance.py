"""`PerformanceMonitor`: generations against a target, by the names that users of the seeds know (SPEC section 6).

It measures with a `Recorder`: each generation is a stage `generation` of the recorder that is current, or of one
of its own, whose `Run` is then among `runs`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from sigmascope.monitor.context import stage
from sigmascope.monitor.generation import Generation
from sigmascope.monitor.generation_block import GenerationBlock
from sigmascope.monitor.generation_plan import Plan, planned_metrics, whole_number
from sigmascope.monitor.generations import Generations
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.instruments import Clock
from sigmascope.monitor.live_line import LiveLine, choose
from sigmascope.monitor.performance_results import PerformanceResults
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.step_progress import Listener
from sigmascope.probes import Accelerator
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.pipeline import PipelineFacts

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class PerformanceMonitor(PerformanceResults):
    """Times generations, holds them to a target, and remembers the last of them.

    Any number of threads and tasks may be inside `monitor_generation` at once: each sees its own
    `current_metrics` and step times. Nothing of it raises into the host but a wrong argument.

    Args:
        target_generation_time: Seconds that a generation may take, above 0.
        history: How many finished generations to remember.
        step_history: How many steps' times to remember.
        on_step: Called with a `StepProgress` after each step, for a display of one's own.
        on_warning: Called with one as soon as a generation heads beyond its target; None: that is logged.
        live: Show running generations in a line on stderr (all monitors share it), or in a `LiveLine` of one's own.
        sample_hz: How often a thread looks at memory during a generation; None: never.
        accelerator: Where to read devices; None: what torch would use.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: A target that is no number above 0, or a history below 1.

    Examples:
        >>> monitor = PerformanceMonitor(target_generation_time=5.0)
        >>> with monitor.monitor_generation("Qwen-Image", num_steps=2) as watching:
        ...     for _ in range(2):
        ...         watching.start_step_timing()
        ...         seconds = watching.end_step_timing()
        >>> monitor.get_performance_summary()["current_generation"]["target_met"]
        True
    """

    def __init__(
        self,
        target_generation_time: float = 5.0,
        *,
        history: int = 100,
        step_history: int = 1000,
        on_step: Listener | None = None,
        on_warning: Listener | None = None,
        live: bool | LiveLine = False,
        sample_hz: float | None = 10.0,
        accelerator: Accelerator | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._clock = clock
        self._guard = Guard()
        generations = Generations(
            lambda name: Recorder(name, sample_hz, accelerator, clock),
            whole_number("history", history, least=1),
            whole_number("step_history", step_history, least=1),
            self._guard,
            choose(live),
        )
        super().__init__(generations, target_generation_time)
        self.on_step, self.on_warning = on_step, on_warning
        self._model_load_seconds: float | None = None

    def monitor_generation(
        self,
        model_name: str = "",
        architecture_type: str = "MMDiT",
        num_steps: int | None = 20,
        resolution: tuple[int, int] | None = (1024, 1024),
        *,
        batch_size: int = 1,
        torch_dtype: object = None,
        model: object = None,
    ) -> "GenerationBlock[PerformanceMonitor]":
        """Return a context, and decorator, that watches one generation and gives this monitor.

        Args:
            model_name: What to call the model.
            architecture_type: "MMDiT", "DiT" or "UNet".
            num_steps: Planned denoising steps, for the projection; 0 or None: not known.
            resolution: (width, height) in pixels; None: not known.
            batch_size: Images made at once.
            torch_dtype: Of the model, as text or torch's own; None: read from `model`, or not known.
            model: The pipeline or denoiser, to read facts from now; it is not kept. `architecture_type` is then what
                its modules say, and `diagnose` knows more. Takes some tens of milliseconds for a large model.

        Raises:
            ConfigError: Names an argument that is none of its kind.
        """
        facts = None if model is None else self._guard.read("model", lambda: pipeline_facts(model))[0]
        plan = Plan(model_name, architecture_type, num_steps, resolution, batch_size, torch_dtype)
        planned = planned_metrics(plan, self.target_generation_time, facts)
        return GenerationBlock(self, lambda: self._begin(planned, facts), self._generations)

    def start_timing(self) -> None:
        """Start the clock that `end_timing` reads: a generation of its own, unless one is being watched."""
        running = self._generations.running()
        if running is not None:
            running.restart_stopwatch()
            return
        planned = PerformanceMetrics(target_generation_time=self.target_generation_time, torch_dtype=None)
        self._begin(planned).stands_alone = True

    def end_timing(self) -> float | None:
        """Seconds since `start_timing`; None, with a line in the log, when no clock runs."""
        running = self._generations.running()
        if running is None:
            _log.warning("end_timing was called, but no timing was begun.")
            return None
        if not running.stands_alone:
            return running.stopwatch()
        self._generations.end(running, None)
        return running.metrics.total_generation_time

    def start_step_timing(self) -> None:
        """Begin a denoising step; outside all generations it is of no effect.

        Called again before `end_step_timing`, as after an exception in a step, it begins the step anew.
        Steps of the recorder (`sigmascope.step`, `hook_steps`, `sigmascope.watch`) count without it, unless it is called.
        """
        running = self._generations.running()
        if running is not None:
            running.steps.start()

    def end_step_timing(self) -> float | None:
        """End the step. Seconds of the host's clock; the record has the accelerator's. None if none was begun."""
        running = self._generations.running()
        return None if running is None else running.steps.end()

    def measure_model_load_time(
        self, load_function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, float]:
        """Call `load_function` as the stage `model_loading` of the current recorder.

        Returns:
            What it gave, and seconds; they become `model_load_time` of the generations that follow.
        """
        started_ns = self._clock()
        with stage("model_loading"):
            result = load_function(*args, **kwargs)
        self._model_load_seconds = seconds = (self._clock() - started_ns) / 1e9
        return result, seconds

    def _begin(self, planned: PerformanceMetrics, facts: PipelineFacts | None = None) -> Generation:
        now = datetime.now(UTC).isoformat()
        metrics = replace(planned, model_load_time=self._model_load_seconds, timestamp=now)
        return self._generations.begin(metrics, facts)


def create_mmdit_performance_monitor(target_time: float = 5.0) -> PerformanceMonitor:
    """Return a monitor for joint image-text transformers (SD3, FLUX, Qwen-Image) with this target in seconds."""
    return PerformanceMonitor(target_generation_time=target_time)


def monitor_generation_performance(
    model_name: str = "",
    target_time: float = 5.0,
    architecture_type: str = "MMDiT",
    num_steps: int = 20,
    resolution: tuple[int, int] = (1024, 1024),
) -> GenerationBlock[PerformanceMonitor]:
    """Return a context that watches one generation with a monitor of its own, and gives that monitor.

    Args:
        model_name: What to call the model.
        target_time: Seconds that the generation may take.
        architecture_type: "MMDiT", "DiT" or "UNet".
        num_steps: Planned denoising steps.
        resolution: (width, height) in pixels.
    """
    monitor = PerformanceMonitor(target_generation_time=target_time)
    return monitor.monitor_generation(model_name, architecture_type, num_steps, resolution)
