"""The dicts of a performance monitor, from its metrics and its history (SPEC section 6)."""

from collections.abc import Sequence
from statistics import fmean

from sigmascope.records.performance import (
    HistoricalPerformanceDict,
    PerformanceMetrics,
    PerformanceSummaryDict,
    StepPerformanceDict,
)


def performance_summary(
    metrics: PerformanceMetrics, history: Sequence[PerformanceMetrics], step_seconds: Sequence[float]
) -> PerformanceSummaryDict:
    """One generation, its hardware and target, and what the history says.

    Args:
        metrics: The generation that is asked for.
        history: Finished generations.
        step_seconds: Of the steps that are kept.
    """
    width, height = metrics.image_resolution
    summary: PerformanceSummaryDict = {
        "current_generation": {
            "total_time": metrics.total_generation_time,
            "per_step_time": metrics.generation_time_per_step,
            "target_met": metrics.target_met,
            "performance_score": metrics.performance_score,
            "model_name": metrics.model_name,
            "architecture": metrics.architecture_type,
            "steps": metrics.num_inference_steps,
            "resolution": f"{width}x{height}",
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
        summary["historical_performance"] = _historical(history)
    if step_seconds:
        summary["step_performance"] = _steps(step_seconds)
    return summary


def _historical(history: Sequence[PerformanceMetrics]) -> HistoricalPerformanceDict:
    times = [one.total_generation_time or 0.0 for one in history]
    return {
        "total_generations": len(history),
        "avg_generation_time": fmean(times),
        "min_generation_time": min(times),
        "max_generation_time": max(times),
        "avg_performance_score": fmean(one.performance_score or 0.0 for one in history),
        "success_rate": fmean(bool(one.target_met) for one in history) * 100,
    }


def _steps(seconds: Sequence[float]) -> StepPerformanceDict:
    return {
        "total_steps": len(seconds),
        "avg_step_time": fmean(seconds),
        "min_step_time": min(seconds),
        "max_step_time": max(seconds),
    }
