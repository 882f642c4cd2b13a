"""Names, defaults and structures of SPEC section 6, as users of the performance monitor's document know them."""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.conftest import FakeClock

import sigmascope
from sigmascope.monitor.performance import PerformanceMonitor

FIELDS: dict[str, object] = {
    "model_load_time": 0.0, "generation_time_per_step": 0.0, "total_generation_time": 0.0,
    "pipeline_setup_time": 0.0, "gpu_memory_used_gb": 0.0, "gpu_memory_total_gb": 0.0,
    "gpu_memory_utilization_percent": 0.0, "system_memory_used_gb": 0.0, "system_memory_utilization_percent": 0.0,
    "num_inference_steps": 0, "image_resolution": (0, 0), "batch_size": 1, "target_met": False,
    "target_generation_time": 5.0, "performance_score": 0.0, "architecture_type": "MMDiT", "model_name": "",
    "torch_dtype": "float16", "device": "cuda", "timestamp": MISSING, "gpu_name": "", "driver_version": "",
    "assumed": (), "derived_time_per_step": None,
}  # fmt: skip

GENERATION = {"model_name": "", "architecture_type": "MMDiT", "num_steps": 20, "resolution": (1024, 1024)}
SIGNATURES: list[tuple[Callable[..., Any], dict[str, object]]] = [
    (PerformanceMonitor, {"target_generation_time": 5.0}),
    (PerformanceMonitor.monitor_generation, GENERATION),
    (PerformanceMonitor.start_timing, {}),
    (PerformanceMonitor.end_timing, {}),
    (PerformanceMonitor.start_step_timing, {}),
    (PerformanceMonitor.end_step_timing, {}),
    (PerformanceMonitor.measure_model_load_time, {"load_function": MISSING, "args": MISSING, "kwargs": MISSING}),
    (PerformanceMonitor.validate_performance_target, {"generation_time": MISSING}),
    (PerformanceMonitor.get_current_metrics, {}),
    (PerformanceMonitor.get_performance_summary, {}),
    (PerformanceMonitor.get_before_after_comparison, {"before_metrics": MISSING}),
    (PerformanceMonitor.log_performance_metrics, {"metrics": MISSING}),
    (PerformanceMonitor.export_metrics_to_json, {"filepath": MISSING}),
    (PerformanceMonitor.reset_metrics, {}),
    (PerformanceMonitor.clear_history, {}),
    (sigmascope.create_mmdit_performance_monitor, {"target_time": 5.0}),
    (
        sigmascope.monitor_generation_performance,
        {"model_name": "", "target_time": 5.0, "architecture_type": "MMDiT", "num_steps": 20,
         "resolution": (1024, 1024)},
    ),
]  # fmt: skip

SUMMARY = {
    "current_generation": "total_time per_step_time target_met performance_score model_name architecture steps resolution",
    "memory_usage": "gpu_memory_gb gpu_utilization_percent system_memory_gb system_utilization_percent",
    "hardware_info": "gpu_name gpu_total_memory_gb device driver_version",
    "target_configuration": "target_time torch_dtype",
    "historical_performance": "total_generations avg_generation_time min_generation_time max_generation_time "
    "avg_performance_score success_rate",
    "step_performance": "total_steps avg_step_time min_step_time max_step_time",
}
COMPARISON = {
    "before": "total_time per_step_time target_met performance_score model",
    "after": "total_time per_step_time target_met performance_score model",
    "improvement": "total_time_percent per_step_time_percent performance_score_change target_status_change target_status",
    "summary": "faster improvement_factor meets_target_now significant_improvement",
}


def keys_of(nested: Any) -> dict[str, set[str]]:
    return {name: set(values) for name, values in nested.items()}


def words_of(nested: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(words.split()) for name, words in nested.items()}


def generation(seconds: float) -> PerformanceMonitor:
    clock = FakeClock()
    monitor = PerformanceMonitor(5.0, clock=clock, sample_hz=None)
    with monitor.monitor_generation("Qwen-Image", "MMDiT", num_steps=20, resolution=(1024, 1024)) as watching:
        for _ in range(20):
            watching.start_step_timing()
            clock.pass_seconds(seconds / 20)
            watching.end_step_timing()
    return monitor


def test_metrics_have_these_fields_in_this_order_with_these_defaults() -> None:
    found = {one.name: one.default for one in fields(sigmascope.PerformanceMetrics)}
    assert list(found.items()) == list(FIELDS.items())
    assert sigmascope.PerformanceMetrics().timestamp[:2] == "20"


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda one: getattr(one, "__name__", ""))
def test_functions_take_these_arguments_by_position(
    function: Callable[..., Any], expected: dict[str, object]
) -> None:
    found = {
        name: MISSING if one.default is inspect.Parameter.empty else one.default
        for name, one in inspect.signature(function).parameters.items()
        if name != "self" and one.kind is not inspect.Parameter.KEYWORD_ONLY
    }
    assert list(found.items()) == list(expected.items())


def test_the_summary_has_these_keys_and_two_more_with_history() -> None:
    assert keys_of(generation(2.4).get_performance_summary()) == words_of(SUMMARY)
    before_any = {name: words for name, words in SUMMARY.items() if "performance" not in name}
    assert keys_of(PerformanceMonitor().get_performance_summary()) == words_of(before_any)


def test_the_golden_comparison() -> None:
    before = generation(16.0).get_current_metrics()
    compared = generation(2.4).get_before_after_comparison(before)
    assert keys_of(compared) == words_of(COMPARISON)
    assert (compared["before"]["performance_score"], compared["after"]["performance_score"]) == (31.2, 100.0)
    assert compared["improvement"]["total_time_percent"] == pytest.approx(85.0)
    assert compared["summary"]["improvement_factor"] == pytest.approx(6.7, abs=0.04)
    assert compared["summary"]["significant_improvement"] is True
    assert compared["summary"]["meets_target_now"] is True


def test_the_export_holds_these_three(tmp_path: Path) -> None:
    generation(2.4).export_metrics_to_json(str(tmp_path / "metrics.json"))
    exported = json.loads((tmp_path / "metrics.json").read_text())
    assert list(exported) == ["current_metrics", "performance_summary", "export_timestamp"]
    assert list(exported["current_metrics"]) == list(FIELDS)
    assert exported["performance_summary"]["current_generation"]["resolution"] == "1024x1024"


def test_a_session_of_the_document_works_as_it_is_written() -> None:
    monitor = sigmascope.PerformanceMonitor(target_generation_time=5.0)
    with monitor.monitor_generation(
        model_name="Qwen-Image", architecture_type="MMDiT", num_steps=20, resolution=(1024, 1024)
    ) as perf_monitor:
        for _step in range(20):
            perf_monitor.start_step_timing()
            step_time = perf_monitor.end_step_timing()
            assert step_time is not None
    assert monitor.get_performance_summary()["current_generation"]["performance_score"] == 100.0
    optimizer = sigmascope.PipelineOptimizer()
    with sigmascope.monitor_generation_performance(
        model_name="Qwen-Image", target_time=5.0, architecture_type="MMDiT"
    ):
        settings = optimizer.configure_generation_settings("MMDiT")
    assert settings["num_inference_steps"] > 0
