"""`PerformanceMonitor`: generations against a target, by the names that users of the seeds know (SPEC section 6).

It measures with a `Recorder`: each generation is a stage `generation` of the recorder that is current, or of one
of its own, whose `Run` is then among `runs`.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

from sigmascope.analysis.compare import compare_metrics
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.score import meets_target, performance_score
from sigmascope.errors import ConfigError
from sigmascope.monitor import context
from sigmascope.monitor.generation import Generation
from sigmascope.monitor.generation_block import GenerationBlock
from sigmascope.monitor.generation_metrics import fill_times
from sigmascope.monitor.generations import Generations
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.instruments import Clock
from sigmascope.monitor.live_line import LiveLine, choose
from sigmascope.monitor.performance_summary import performance_summary
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.step_progress import Listener, StepProgress
from sigmascope.probes import Accelerator
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.records.atomic import atomic_path
from sigmascope.records.finding import Finding
from sigmascope.records.performance import BeforeAfterDict, PerformanceMetrics, PerformanceSummaryDict
from sigmascope.records.pipeline import PipelineFacts
from sigmascope.records.run import Run

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class PerformanceMonitor:
    """Times generations, holds them to a target, and remembers the last of them.

    Any number of threads and tasks may be inside `monitor_generation` at once: each sees its own
    `current_metrics` and step times. Nothing of it raises into the host but a wrong argument.

    Args:
        target_generation_time: Seconds that a generation may take, above 0.
        history: How many finished generations to remember.
        step_history: How many steps' times to remember.
        on_step: Called with a `StepProgress` after each step, for a display of one's own.
        on_warning: Called with one as soon as a generation's projected total misses the target; by default
            that is logged.
        live: Show the running generations in a line on stderr (all monitors share it), or in a `LiveLine` of one's
            own.
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
        if not target_generation_time > 0:
            raise ConfigError(
                f"target_generation_time is {target_generation_time}.", hint="Give seconds above 0."
            )
        if history < 1 or step_history < 1:
            raise ConfigError("history and step_history keep at least one.", hint="Give 1 or more.")
        self.target_generation_time = float(target_generation_time)
        self.on_step = on_step
        self.on_warning = on_warning
        self._clock = clock
        self._guard = Guard()
        self._generations = Generations(
            lambda name: Recorder(name, sample_hz, accelerator, clock),
            history,
            step_history,
            self._guard,
            choose(live),
        )
        self._model_load_seconds: float | None = None

    # --- generations

    def monitor_generation(
        self,
        model_name: str = "",
        architecture_type: str = "MMDiT",
        num_steps: int = 20,
        resolution: tuple[int, int] = (1024, 1024),
        *,
        batch_size: int = 1,
        torch_dtype: str | None = None,
        model: object = None,
    ) -> "GenerationBlock[PerformanceMonitor]":
        """Return a context, and decorator, that watches one generation and gives this monitor.

        Args:
            model_name: What to call the model.
            architecture_type: "MMDiT", "DiT" or "UNet".
            num_steps: Planned denoising steps, for the projection; 0: not known.
            resolution: (width, height) in pixels.
            batch_size: Images made at once.
            torch_dtype: Of the model; None: read from `model`, or not known.
            model: The pipeline or denoiser, to read facts from now; it is not kept. `architecture_type` is then what
                its modules say, and `diagnose` knows more. Takes some tens of milliseconds for a large model.
        """
        facts = None if model is None else self._guard.read("model", lambda: pipeline_facts(model))[0]
        if facts is not None:
            architecture_type = facts.architecture or architecture_type
            torch_dtype = torch_dtype or _dtype_of(facts)
        planned = PerformanceMetrics(
            model_name=model_name or ("" if facts is None else facts.class_name),
            architecture_type=architecture_type,
            num_inference_steps=num_steps,
            image_resolution=(resolution[0], resolution[1]),
            batch_size=batch_size,
            torch_dtype=torch_dtype,
            target_generation_time=self.target_generation_time,
        )
        return GenerationBlock(self, lambda: self._begin(planned, facts), self._generations.end)

    def start_timing(self) -> None:
        """Start the clock that `end_timing` reads: a generation of its own, unless one is being watched."""
        running = self._generations.running()
        if running is None:
            planned = PerformanceMetrics(target_generation_time=self.target_generation_time, torch_dtype=None)
            self._begin(planned).stands_alone = True
        else:
            running.restart_stopwatch()

    def end_timing(self) -> float | None:
        """Seconds since `start_timing`; None, with a line in the log, when no clock runs."""
        running = self._generations.running()
        if running is None:
            _log.warning("end_timing was called, but no timing was begun.")
            return None
        if running.stands_alone:
            self._generations.end(running, None)
            return running.metrics.total_generation_time
        return running.stopwatch()

    def start_step_timing(self) -> None:
        """Begin a denoising step; outside all generations it is of no effect."""
        running = self._generations.running()
        if running is not None:
            running.start_step()

    def end_step_timing(self) -> float | None:
        """End the step. Seconds of the host's clock; the record has the accelerator's. None if none was begun."""
        running = self._generations.running()
        seconds = None if running is None else running.end_step(self.on_step, self._warn)
        if seconds is not None:
            self._generations.add_step(seconds)
        return seconds

    def measure_model_load_time(
        self, load_function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, float]:
        """Call `load_function` as the stage `model_loading` of the current recorder.

        Returns:
            What it gave, and seconds; they become `model_load_time` of the generations that follow.
        """
        started_ns = self._clock()
        with context.stage("model_loading"):
            result = load_function(*args, **kwargs)
        seconds = (self._clock() - started_ns) / 1e9
        self._model_load_seconds = seconds
        return result, seconds

    # --- results

    @property
    def current_metrics(self) -> PerformanceMetrics:
        """Of this thread's or task's generation, running or last; else of the last that finished anywhere."""
        found = self._generations.latest()
        if found is None:
            return PerformanceMetrics(target_generation_time=self.target_generation_time)
        if found.is_open:
            fill_times(found.metrics, found.elapsed_seconds(), found.tally.mean_seconds())
        return found.metrics

    def get_current_metrics(self) -> PerformanceMetrics:
        """Return a copy of `current_metrics`, which later generations do not touch."""
        return replace(self.current_metrics)

    def gpu_busy_percent(self) -> dict[str, float]:
        """How busy each NVIDIA device is now, by name (0-100); empty where that is not known or nothing is watched."""
        recorder = self.recorder
        return {} if recorder is None else recorder.gpu_busy_percent()

    def validate_performance_target(self, generation_time: float) -> bool:
        """Whether that many seconds meet the target; what it means is logged."""
        met = bool(meets_target(generation_time, self.target_generation_time))
        score = performance_score(generation_time, self.target_generation_time)
        relation = "meets" if met else "misses"
        _log.log(
            logging.INFO if met else logging.WARNING,
            "%.2f s %s the target of %.2f s: score %.1f of 100.",
            generation_time, relation, self.target_generation_time, score,
        )  # fmt: skip
        return met

    def get_performance_summary(self) -> PerformanceSummaryDict:
        """Return the current generation, its hardware and target, and what the history says."""
        return performance_summary(self.current_metrics, *self._generations.history())

    def diagnose(self) -> tuple[Finding, ...]:
        """Return what is wrong or slow in the current generation, what to do, and what that would gain.

        Empty when there is no generation, and for one that lay in a recorder of the caller's: diagnose its run.
        """
        found = self._generations.latest()
        if found is None or found.run is None:
            return ()
        return diagnose(found.run)

    def get_before_after_comparison(
        self, before_metrics: PerformanceMetrics | Mapping[str, Any]
    ) -> BeforeAfterDict:
        """Compare an earlier generation, or the `current_metrics` of an export, with the current one."""
        if not isinstance(before_metrics, PerformanceMetrics):
            before_metrics = PerformanceMetrics.from_dict(before_metrics)
        return compare_metrics(before_metrics, self.current_metrics)

    def log_performance_metrics(self, metrics: PerformanceMetrics) -> None:
        """Log one generation in one line, as a warning if it missed its target."""
        _log.log(
            logging.INFO if metrics.target_met else logging.WARNING,
            "%s (%s): %s s for %d steps, target %s s %s, score %s",
            metrics.model_name or "generation", metrics.architecture_type, metrics.total_generation_time,
            metrics.num_inference_steps, metrics.target_generation_time,
            "met" if metrics.target_met else "missed", metrics.performance_score,
        )  # fmt: skip

    def export_metrics_to_json(self, filepath: str | os.PathLike[str]) -> None:
        """Write metrics and summary as JSON, whole or not at all.

        Raises:
            WriteError: The file cannot be written. What was there before stays.
        """
        exported = {
            "current_metrics": self.current_metrics.as_dict(),
            "performance_summary": self.get_performance_summary(),
            "export_timestamp": datetime.now(UTC).isoformat(),
        }
        with atomic_path(filepath) as temporary:
            temporary.write_text(json.dumps(exported, indent=2) + "\n", encoding="utf-8")

    def reset_metrics(self) -> None:
        """Let `current_metrics` of this thread or task begin anew; a generation that is running is not touched."""
        self._generations.forget_own()

    def clear_history(self) -> None:
        """Forget all finished generations, their runs and steps."""
        self._generations.clear()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this thread's or task's running generation; None outside of all."""
        running = self._generations.running()
        return None if running is None else running.recorder

    @property
    def runs(self) -> tuple[Run, ...]:
        """The records of the finished generations that lay in no recorder of the caller's, oldest first."""
        return tuple(self._generations.runs)

    def _begin(self, planned: PerformanceMetrics, facts: PipelineFacts | None = None) -> Generation:
        metrics = replace(
            planned, model_load_time=self._model_load_seconds, timestamp=datetime.now(UTC).isoformat()
        )
        return self._generations.begin(metrics, facts)

    def _warn(self, progress: StepProgress) -> None:
        if self.on_warning is not None:
            self.on_warning(progress)
            return
        _log.warning(
            "At step %d of %d the generation heads for %.2f s, above its target of %.2f s.",
            progress.step, progress.steps, progress.projected_seconds, progress.target_seconds,
        )  # fmt: skip


def _dtype_of(facts: PipelineFacts) -> str | None:
    """The dtype of most of the denoiser's weights, without "torch."."""
    for part in facts.of_role("denoiser").values():
        if part.module is not None and part.module.dtypes:
            dtypes = part.module.dtypes
            return max(dtypes, key=lambda name: dtypes[name]).removeprefix("torch.")
    return None


def create_mmdit_performance_monitor(target_time: float = 5.0) -> PerformanceMonitor:
    """Return a monitor for joint image-text transformers (SD3, FLUX, Qwen-Image), its usual subject.

    Args:
        target_time: Seconds that a generation may take.
    """
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
