"""What a performance monitor holds its generations to, and tells of them: metrics, summary, comparison, findings, export."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sigmascope.analysis.compare import compare_metrics
from sigmascope.analysis.diagnostics.diagnose import diagnose
from sigmascope.analysis.score import meets_target, performance_score
from sigmascope.errors import ConfigError
from sigmascope.monitor.generation_metrics import fill_times
from sigmascope.monitor.generation_plan import seconds_above_zero
from sigmascope.monitor.generations import Generations
from sigmascope.monitor.performance_summary import performance_summary
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.step_progress import Listener
from sigmascope.records.atomic import atomic_path
from sigmascope.records.finding import Finding
from sigmascope.records.performance import BeforeAfterDict, PerformanceMetrics, PerformanceSummaryDict
from sigmascope.records.run import Run

_log = logging.getLogger(__name__)


class PerformanceResults:
    """The part of `PerformanceMonitor` that begins and ends no generation.

    Args:
        generations: The monitor's.
        target_seconds: What a generation may take, above 0.
    """

    def __init__(self, generations: Generations, target_seconds: float) -> None:
        self._generations = generations
        self.target_generation_time = target_seconds

    @property
    def target_generation_time(self) -> float:
        """Seconds that a generation may take; one that is running keeps the target that it began with."""
        return self._target_seconds

    @target_generation_time.setter
    def target_generation_time(self, seconds: float) -> None:
        self._target_seconds = seconds_above_zero("target_generation_time", seconds)

    @property
    def on_step(self) -> Listener | None:
        """Called with a `StepProgress` after each step."""
        return self._generations.listeners.on_step

    @on_step.setter
    def on_step(self, listener: Listener | None) -> None:
        self._generations.listeners.on_step = listener

    @property
    def on_warning(self) -> Listener | None:
        """Called with one as soon as a generation heads beyond its target; None: that is logged."""
        return self._generations.listeners.on_warning

    @on_warning.setter
    def on_warning(self, listener: Listener | None) -> None:
        self._generations.listeners.on_warning = listener

    @property
    def current_metrics(self) -> PerformanceMetrics:
        """Of this thread's or task's generation, running or last; else of the last that finished anywhere."""
        found = self._generations.latest()
        if found is None:
            return PerformanceMetrics(target_generation_time=self.target_generation_time)
        if found.is_open:
            fill_times(found.metrics, found.steps.elapsed_seconds(), found.steps.tally.mean_seconds())
        return found.metrics

    def get_current_metrics(self) -> PerformanceMetrics:
        """Return a copy of `current_metrics`, which later generations do not touch."""
        return replace(self.current_metrics)

    def gpu_busy_percent(self) -> dict[str, float]:
        """How busy each NVIDIA device is now, by name (0-100); empty where that is not known or nothing is watched."""
        recorder = self.recorder
        return {} if recorder is None else recorder.gpu_busy_percent()

    def validate_performance_target(self, generation_time: float | None) -> bool:
        """Whether that many seconds meet the target; what it means is logged. A time that is not known does not."""
        met = meets_target(generation_time, self.target_generation_time)
        score = performance_score(generation_time, self.target_generation_time)
        if met is None:
            _log.warning("There is no time to hold to the target: %s.", generation_time)
            return False
        relation = "meets" if met else "misses"
        _log.log(
            logging.INFO if met else logging.WARNING,
            "%.2f s %s the target of %.2f s: score %.1f of 100.",
            generation_time, relation, self.target_generation_time, score,
        )  # fmt: skip
        return bool(met)

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
        """Compare an earlier generation with the current one.

        Args:
            before_metrics: Its metrics, as they are or as an export holds them, or the whole export.

        Raises:
            ConfigError: They are neither.
        """
        if not isinstance(before_metrics, PerformanceMetrics):
            before_metrics = _exported_metrics(before_metrics)
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
