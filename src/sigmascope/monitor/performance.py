"""`PerformanceMonitor` times generations, checks them against a target, compares and remembers them.

It measures with a `Recorder`: each generation is a stage `generation` of the current recorder, or of a recorder of its
own, whose `Run` is then in `runs`.

Watch a generation with `with monitor.monitor_generation(...)`, or use that as a decorator, which gives a callable of the
same kind: function, generator or coroutine function. Its arguments are checked at once, and kept as plain values.
"""

import functools
import inspect
import json
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean
from types import TracebackType
from typing import Any, Final, Generic, ParamSpec, SupportsFloat, TypeVar, cast

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.generations import (
    compare_metrics,
    fill_step_time,
    meets_target,
    per_step_time,
    performance_score,
)
from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path
from sigmascope.monitor.generation import Generation, GenerationHistory, fill_times
from sigmascope.monitor.guard import Guard, to_the_end, whole_number
from sigmascope.monitor.live_line import Listener, LiveLine, live_line_for
from sigmascope.monitor.recorder import Recorder, stage
from sigmascope.monitor.scope import Clock
from sigmascope.probes import Accelerator
from sigmascope.probes.models import pipeline_facts
from sigmascope.probes.reading import attempt
from sigmascope.records.performance import (
    AssumedDict,
    BeforeAfterDict,
    HistoricalPerformanceDict,
    PerformanceMetrics,
    PerformanceSummaryDict,
    StepPerformanceDict,
)
from sigmascope.records.run import Finding, PipelineFacts, Run

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Monitor = TypeVar("Monitor")


class Assumed:
    """Marks a default, to tell it from the same value given by the caller."""


class _AssumedSeconds(Assumed, float):
    pass


class _AssumedCount(Assumed, int):
    pass


class _AssumedText(Assumed, str):
    __slots__ = ()


class _AssumedSize(Assumed, tuple[int, int]):
    __slots__ = ()


ASSUMED_TARGET: Final = _AssumedSeconds(5.0)
_STEPS: Final = _AssumedCount(20)
_RESOLUTION: Final = _AssumedSize((1024, 1024))
_BATCH: Final = _AssumedCount(1)
_ARCHITECTURE: Final = _AssumedText("MMDiT")
_SHOWN_AS: Final = {
    "architecture_type": "architecture",
    "num_inference_steps": "steps",
    "image_resolution": "resolution",
}
"""What a summary calls the fields of the metrics that may hold a default."""
_ARCHITECTURES: Final = {"mmdit": "MMDiT", "dit": "DiT", "unet": "UNet"}


class PerformanceMonitor:
    """Times generations, checks them against a target, and remembers the last ones.

    Any number of threads and tasks may be inside `monitor_generation` at once: each sees its own
    `current_metrics` and step times. Only a wrong argument raises an exception.

    Args:
        target_generation_time: Seconds that a generation may take, above 0.
        history: How many finished generations to remember.
        step_history: How many step times to remember.
        on_step: Called with a `StepProgress` after each step, for example for your own display.
        on_warning: Called with a `StepProgress` at the first step from which a miss is expected; None: it is logged.
        live: Show running generations in a line on stderr, which all monitors share, or in your own `LiveLine`.
        sample_hz: How many times a second a thread reads memory during a generation; None: never.
        accelerator: Where to read devices; None: what torch would use.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: A target that is not a number above 0, or a history below 1.

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
        target_generation_time: float = ASSUMED_TARGET,
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
        self._generations = GenerationHistory(
            lambda name: Recorder(name, sample_hz, accelerator, clock),
            whole_number("history", history, least=1),
            whole_number("step_history", step_history, least=1),
            self._guard,
            live_line_for(live),
        )
        self._unused = PerformanceMetrics()
        self.target_generation_time = target_generation_time
        self.on_step, self.on_warning = on_step, on_warning
        self._model_load_seconds: float | None = None

    def monitor_generation(
        self,
        model_name: str = "",
        architecture_type: str = _ARCHITECTURE,
        num_steps: int | None = _STEPS,
        resolution: tuple[int, int] | None = _RESOLUTION,
        *,
        batch_size: int = _BATCH,
        torch_dtype: object = None,
        model: object = None,
    ) -> "GenerationBlock[PerformanceMonitor]":
        """Return a context, and decorator, that watches one generation and gives this monitor.

        Args:
            model_name: What to call the model.
            architecture_type: "MMDiT", "DiT" or "UNet".
            num_steps: Planned denoising steps, for the projection; 0 or None: not known. If you leave it out, the metrics
                of the finished generation have the number of steps that ran.
            resolution: (width, height) in pixels; None: not known. If you leave it out, it is measured like `num_steps`.
                The metrics' `assumed` names all that is still a default.
            batch_size: Images made at once.
            torch_dtype: The model's dtype, as text or torch.dtype; None: read from `model`, or not known.
            model: The pipeline or denoiser. Its facts are read now, which takes some tens of milliseconds for a large
                model; it is not kept. They give `architecture_type`, and let `diagnose` find more.

        Raises:
            ConfigError: An argument has a wrong type or value; the error names it.
        """
        facts = None if model is None else self._guard.read("model", lambda: pipeline_facts(model))
        planned = planned_metrics(
            model_name, architecture_type, num_steps, resolution, batch_size, torch_dtype, facts
        )
        planned.target_generation_time = self.target_generation_time
        planned.assumed += self._assumed_target()
        return GenerationBlock(self, lambda: self._begin(planned, facts), self._generations)

    def start_timing(self) -> None:
        """Start the clock that `end_timing` reads. Outside a watched generation, this begins one."""
        running = self._generations.running()
        if running is not None:
            running.restart_stopwatch()
            return
        planned = PerformanceMetrics(target_generation_time=self.target_generation_time, torch_dtype=None)
        planned.assumed = ("architecture_type", *self._assumed_target())
        self._begin(planned).stands_alone = True

    def end_timing(self) -> float | None:
        """Seconds since `start_timing`; None, with a line in the log, if no clock is running."""
        running = self._generations.running()
        if running is None:
            _log.warning("end_timing was called without start_timing.")
            return None
        if not running.stands_alone:
            return running.stopwatch()
        self._generations.end(running, None)
        return running.metrics.total_generation_time

    def start_step_timing(self) -> None:
        """Begin a denoising step; outside of generations this has no effect.

        Called again before `end_step_timing`, for example after an exception in a step, it restarts the step. If you
        never call it, the recorder's steps count (`sigmascope.step`, `hook_steps`, `sigmascope.watch`).
        """
        running = self._generations.running()
        if running is not None:
            running.steps.start()

    def end_step_timing(self) -> float | None:
        """End the step and return its seconds on the host; the record has the accelerator's. None if no step began."""
        running = self._generations.running()
        return None if running is None else running.steps.end()

    def measure_model_load_time(
        self, load_function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[T, float]:
        """Call `load_function` as the stage `model_loading` of the current recorder.

        Returns:
            Its result and the seconds, which become `model_load_time` of `current_metrics` and of later generations.
        """
        started_ns = self._clock()
        with stage("model_loading"):
            result = load_function(*args, **kwargs)
        self._model_load_seconds = seconds = (self._clock() - started_ns) / 1e9
        self.current_metrics.model_load_time = seconds
        return result, seconds

    def _assumed_target(self) -> tuple[str, ...]:
        return ("target_generation_time",) if self._is_target_assumed else ()

    def _begin(self, planned: PerformanceMetrics, facts: PipelineFacts | None = None) -> Generation:
        now = datetime.now(UTC).isoformat()
        metrics = replace(planned, model_load_time=self._model_load_seconds, timestamp=now)
        return self._generations.begin(metrics, facts)

    @property
    def target_generation_time(self) -> float:
        """Seconds that a generation may take; a running generation keeps the target that it began with."""
        return self._target_seconds

    @target_generation_time.setter
    def target_generation_time(self, seconds: float) -> None:
        self._target_seconds = seconds_above_zero("target_generation_time", seconds)
        self._is_target_assumed = isinstance(seconds, Assumed)
        self._unused.target_generation_time = self._target_seconds

    @property
    def on_step(self) -> Listener | None:
        """Called with a `StepProgress` after each step."""
        return self._generations.listeners.on_step

    @on_step.setter
    def on_step(self, listener: Listener | None) -> None:
        self._generations.listeners.on_step = listener

    @property
    def on_warning(self) -> Listener | None:
        """Called with a `StepProgress` at the first step from which a miss is expected; None: it is logged."""
        return self._generations.listeners.on_warning

    @on_warning.setter
    def on_warning(self, listener: Listener | None) -> None:
        self._generations.listeners.on_warning = listener

    @property
    def current_metrics(self) -> PerformanceMetrics:
        """The metrics of this thread's or task's running or last generation, or else of the last that finished anywhere.

        They stay the same object until the next generation begins or `reset_metrics` is called, so values that you set
        appear in the summary, the comparison and the export. While a generation runs, reading this updates its times;
        afterwards, where no step was timed, the time per step is total / steps of what stands there.
        """
        generation = self._generations.latest()
        metrics = self._unused if generation is None else generation.metrics
        if generation is not None and generation.is_open:
            fill_times(metrics, generation.steps.elapsed_seconds(), generation.steps.tally.mean_seconds())
        self._guard.read("metrics", lambda: fill_step_time(metrics, is_whole=self._is_whole()))
        return metrics

    def get_current_metrics(self) -> PerformanceMetrics:
        """Return a copy of `current_metrics`, which later generations do not change."""
        return replace(self.current_metrics)

    def gpu_busy_percent(self) -> dict[str, float]:
        """How busy each NVIDIA device is now, by name (0-100); empty if that is not known or nothing is watched."""
        recorder = self.recorder
        return {} if recorder is None else recorder.gpu_busy_percent()

    def validate_performance_target(self, generation_time: float | None) -> bool:
        """Whether this many seconds meet the target; the result is logged. An unknown time does not."""
        met = meets_target(generation_time, self.target_generation_time)
        score = performance_score(generation_time, self.target_generation_time)
        if met is None:
            _log.warning("Cannot check the target: the generation time is %s.", generation_time)
            return False
        relation = "meets" if met else "misses"
        _log.log(
            logging.INFO if met else logging.WARNING,
            "%.2f s %s the target of %.2f s: score %.1f of 100.",
            generation_time, relation, self.target_generation_time, score,
        )  # fmt: skip
        return bool(met)

    def get_performance_summary(self) -> PerformanceSummaryDict:
        """Return the current generation, its hardware and target, and statistics of the history."""
        metrics, (history, step_seconds) = self.current_metrics, self._generations.history()
        return performance_summary(metrics, history, step_seconds, is_whole=self._is_whole())

    def _is_whole(self) -> bool:
        """Whether the current generation, if any, went to its end: only then were all of its steps done."""
        generation = self._generations.latest()
        return generation is None or generation.is_whole

    def diagnose(self) -> tuple[Finding, ...]:
        """Return what is wrong or slow in the current generation, what to do, and how much that would gain.

        Empty if no generation is finished.
        """
        generation = self._generations.latest()
        if generation is None or generation.run is None:
            return ()
        return diagnose(generation.run)

    def get_before_after_comparison(
        self, before_metrics: PerformanceMetrics | Mapping[str, Any]
    ) -> BeforeAfterDict:
        """Compare an earlier generation with the current one.

        Args:
            before_metrics: Its `PerformanceMetrics`, the same from an export, or the whole export.

        Raises:
            ConfigError: It is none of these.
        """
        if not isinstance(before_metrics, PerformanceMetrics):
            before_metrics = _exported_metrics(before_metrics)
        return compare_metrics(before_metrics, self.current_metrics, after_is_whole=self._is_whole())

    def log_performance_metrics(self, metrics: PerformanceMetrics | Mapping[str, Any]) -> None:
        """Log one generation in one line, as a warning if it missed its target.

        Args:
            metrics: `PerformanceMetrics`, or an export; any other dict is logged by name and value.

        Raises:
            ConfigError: A value of an export has a wrong type.
        """
        if not isinstance(metrics, PerformanceMetrics):
            if not {"current_metrics", "total_generation_time"} & metrics.keys():
                _log.info("%s", ", ".join(f"{name}: {value}" for name, value in metrics.items()))
                return
            metrics = _exported_metrics(metrics)
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
            WriteError: The file cannot be written. An existing file stays as it was.
        """
        exported = {
            "current_metrics": self.current_metrics.as_dict(),
            "performance_summary": self.get_performance_summary(),
            "export_timestamp": datetime.now(UTC).isoformat(),
        }
        with atomic_path(filepath) as temporary:
            temporary.write_text(json.dumps(exported, indent=2) + "\n", encoding="utf-8")

    def reset_metrics(self) -> None:
        """Reset `current_metrics` of this thread or task; a running generation is not affected."""
        self._generations.forget_own()
        self._unused = PerformanceMetrics(target_generation_time=self.target_generation_time)

    def clear_history(self) -> None:
        """Forget all finished generations, their runs and steps."""
        self._generations.clear()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of this thread's or task's running generation; None outside of generations."""
        running = self._generations.running()
        return None if running is None else running.recorder

    @property
    def runs(self) -> tuple[Run, ...]:
        """The records of the finished generations, oldest first.

        If a generation was inside another recorder, such as a watch's, its record is that part of the other run.
        """
        return tuple(self._generations.runs)


def create_mmdit_performance_monitor(target_time: float = ASSUMED_TARGET) -> PerformanceMonitor:
    """Return a monitor for joint image-text transformers (SD3, FLUX, Qwen-Image) with this target in seconds."""
    return PerformanceMonitor(target_generation_time=target_time)


class GenerationBlock(Generic[Monitor]):
    """A context that watches one generation each time it is entered. Exceptions pass through it unchanged."""

    def __init__(
        self, monitor: Monitor, begin: Callable[[], Generation], generations: GenerationHistory
    ) -> None:
        self._monitor = monitor
        self._begin = begin
        self._generations = generations
        self._entered: list[Generation] = []

    def __enter__(self) -> Monitor:
        self._entered.append(self._begin())
        return self._monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        generation = self._entered_here()
        if generation is not None:
            to_the_end(functools.partial(self._leave, generation), error)

    def _leave(self, generation: Generation, error: BaseException | None) -> None:
        self._generations.end(generation, error)
        if generation in self._entered:
            self._entered.remove(generation)

    def _entered_here(self) -> Generation | None:
        """The generation that this thread or task entered; else, as where a task goes on elsewhere, the last."""
        running, entered = self._generations.running(), self._entered
        return running if running in entered else next(reversed(entered), None)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Watch each call of a function as a generation; for a coroutine function or generator, until it ends.

        A generator's time includes what its caller does between two values.
        """
        # Each call has its own block, because calls may overlap.
        return decorated(function, lambda: GenerationBlock(self._monitor, self._begin, self._generations))


def monitor_generation_performance(
    model_name: str = "",
    target_time: float = ASSUMED_TARGET,
    architecture_type: str = _ARCHITECTURE,
    num_steps: int = _STEPS,
    resolution: tuple[int, int] = _RESOLUTION,
) -> GenerationBlock[PerformanceMonitor]:
    """Return a context that watches one generation with a new monitor, and gives that monitor.

    Args:
        model_name: What to call the model.
        target_time: Seconds that the generation may take.
        architecture_type: "MMDiT", "DiT" or "UNet".
        num_steps: Planned denoising steps.
        resolution: (width, height) in pixels.
    """
    monitor = PerformanceMonitor(target_generation_time=target_time)
    return monitor.monitor_generation(model_name, architecture_type, num_steps, resolution)


def performance_summary(
    metrics: PerformanceMetrics,
    history: Sequence[PerformanceMetrics],
    step_seconds: Sequence[float],
    *,
    is_whole: bool = True,
) -> PerformanceSummaryDict:
    """One generation, its hardware and target, and what the history says."""
    width, height = metrics.image_resolution
    derived = attempt(lambda: per_step_time(metrics, is_whole=is_whole)).value
    shown = [name for field, name in _SHOWN_AS.items() if field in metrics.assumed]
    assumed: AssumedDict = {"assumed": shown} if shown else {}
    summary: PerformanceSummaryDict = {
        "current_generation": {
            "total_time": metrics.total_generation_time,
            **(derived or {"per_step_time": metrics.generation_time_per_step}),
            "target_met": metrics.target_met,
            "performance_score": metrics.performance_score,
            "model_name": metrics.model_name,
            "architecture": metrics.architecture_type,
            "steps": metrics.num_inference_steps,
            "resolution": f"{width}x{height}",
            **assumed,
        },
        "memory_usage": {
            "gpu_memory_gb": metrics.gpu_memory_used_gb,
            "gpu_utilization_percent": metrics.gpu_memory_utilization_percent,
            "system_memory_gb": metrics.system_memory_used_gb,
            "system_utilization_percent": metrics.system_memory_utilization_percent,
        },
        "hardware_info": {
            "gpu_name": metrics.gpu_name,
            "gpu_total_memory_gb": metrics.gpu_memory_total_gb,
            "device": metrics.device,
            "driver_version": metrics.driver_version,
        },
        "target_configuration": {
            "target_time": metrics.target_generation_time,
            "torch_dtype": metrics.torch_dtype,
        },
    }
    if history:
        summary["historical_performance"] = _historical_performance(history)
    if step_seconds:
        summary["step_performance"] = _step_performance(step_seconds)
    return summary


def _historical_performance(history: Sequence[PerformanceMetrics]) -> HistoricalPerformanceDict:
    times = [metrics.total_generation_time or 0.0 for metrics in history]
    return {
        "total_generations": len(history),
        "avg_generation_time": fmean(times),
        "min_generation_time": min(times),
        "max_generation_time": max(times),
        "avg_performance_score": fmean(metrics.performance_score or 0.0 for metrics in history),
        "success_rate": fmean(bool(metrics.target_met) for metrics in history) * 100,
    }


def _step_performance(seconds: Sequence[float]) -> StepPerformanceDict:
    return {
        "total_steps": len(seconds),
        "avg_step_time": fmean(seconds),
        "min_step_time": min(seconds),
        "max_step_time": max(seconds),
    }


def _exported_metrics(exported: object) -> PerformanceMetrics:
    values = exported.get("current_metrics", exported) if isinstance(exported, Mapping) else None
    if not isinstance(values, Mapping) or "total_generation_time" not in values:
        raise ConfigError(
            f"before_metrics: a {type(exported).__name__} without total_generation_time.",
            hint="Give what get_current_metrics returned, or what export_metrics_to_json wrote.",
        )
    try:
        return PerformanceMetrics.from_dict(values)
    except ValueError as failure:
        raise ConfigError(
            f"before_metrics cannot be read: {failure}.", hint="Give what export_metrics_to_json wrote."
        ) from None


def planned_metrics(
    model_name: object,
    architecture_type: object,
    num_steps: object,
    resolution: object,
    batch_size: object,
    torch_dtype: object,
    facts: PipelineFacts | None,
) -> PerformanceMetrics:
    """The arguments of `PerformanceMonitor.monitor_generation` as metrics, completed by facts of the model.

    Numbers may be NumPy's, a dtype torch's, a name a path: an export holds plain values.

    Raises:
        ConfigError: An argument has a wrong type or value; the error names it.
    """
    given = "" if architecture_type is None else str(architecture_type)
    found = None if facts is None else facts.architecture
    dtype = None if torch_dtype is None else str(torch_dtype).removeprefix("torch.")
    defaults = {
        "num_inference_steps": num_steps,
        "image_resolution": resolution,
        "batch_size": batch_size,
        "architecture_type": found or architecture_type,
    }
    return PerformanceMetrics(
        model_name=str(model_name or "") or ("" if facts is None else facts.class_name),
        architecture_type=found or _ARCHITECTURES.get(given.lower(), given),
        num_inference_steps=whole_number("num_steps", num_steps),
        image_resolution=_resolution(resolution),
        batch_size=whole_number("batch_size", batch_size, least=1, none_is=1),
        torch_dtype=dtype or (None if facts is None else attempt(lambda: _dtype_of(facts)).value),
        assumed=tuple(name for name, value in defaults.items() if isinstance(value, Assumed)),
    )


def _resolution(value: object) -> tuple[int, int]:
    """(width, height); None: not known."""
    if value is None:
        return (0, 0)
    sides = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if len(sides) != 2:
        raise ConfigError(f"resolution is {value!r:.60}.", hint="Give (width, height) in pixels.")
    return whole_number("resolution", sides[0]), whole_number("resolution", sides[1])


def _dtype_of(facts: PipelineFacts) -> str | None:
    """The dtype of most of the denoiser's weights, without "torch."."""
    for part in facts.of_role("denoiser").values():
        if part.module is not None and part.module.dtypes:
            dtypes = part.module.dtypes
            return max(dtypes, key=lambda name: dtypes[name]).removeprefix("torch.")
    return None


def seconds_above_zero(name: str, value: object) -> float:
    """A target as a float.

    Raises:
        ConfigError: It is not a finite number above 0.
    """
    try:
        seconds = math.nan if isinstance(value, str) else float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} is {value!r:.60}.", hint="Give seconds: a finite number above 0.")
    return seconds


def decorated(
    function: Callable[..., Any], around: Callable[[], AbstractContextManager[object]]
) -> Callable[..., Any]:
    """A function that does what another does, with a context around each call, or around each generator's life."""
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def streamed(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with around():
                inner = function(*args, **kwargs)
                try:
                    given = await anext(inner)
                    while True:
                        try:
                            sent = yield given
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 - thrown in for the function to handle
                            given = await inner.athrow(error)
                        else:
                            given = await inner.asend(sent)
                except StopAsyncIteration:
                    return
                finally:
                    await inner.aclose()

        return streamed
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generated(*args: Any, **kwargs: Any) -> Any:  # a generator
            with around():
                return (yield from function(*args, **kwargs))

        return generated
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with around():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with around():
            return function(*args, **kwargs)

    return called
