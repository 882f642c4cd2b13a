"""A LoRA's application on a `WorkflowMonitor`."""

import io
from typing import Any

import pytest
from rich.console import Console
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher

import sigmascope
from sigmascope.records.serialization import run_from_json, run_to_json
from sigmascope.stages.lora_application import in_short


@pytest.fixture
def monitor() -> sigmascope.ModelLoadingMonitor:
    return sigmascope.ModelLoadingMonitor()


@pytest.fixture
def unet() -> ModelPatcher:
    return ModelPatcher(BaseModel())


def apply(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher, strength: float = 1.0) -> dict[str, Any]:
    """A workflow's step as the seed integrates it."""
    baseline = monitor.capture_lora_baseline(unet, None)
    monitor.start_monitoring("LORA_APPLICATION")
    modified = unet.clone()
    modified.add_patches({Q: lora_adapter()}, strength)
    monitor.update_peak_memory()
    monitor.end_monitoring("LORA_APPLICATION", modified, "UNet")
    return monitor.analyze_lora_application_results(baseline, modified, None, (modified, None))


def test_time_and_peaks_come_from_the_step(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher) -> None:
    found = apply(monitor, unet)
    stage = monitor.run().stage("lora_application")
    assert found["elapsed_time"] == stage.seconds
    assert stage.peak is not None
    assert found["peak_memory"] == stage.peak.as_dict()


def test_the_record_has_the_analysis_in_short(
    monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher
) -> None:
    found = apply(monitor, unet)
    kept: Any = monitor.run().stage("lora_application").facts["lora_application"]
    assert kept["effective"] is True
    assert kept["unet_weight_changes"]["keys_modified"] == len(found["unet_weight_changes"]["keys_modified"])
    changed = found["unet_weight_changes"]["keys_value_changed"][Q]
    assert kept["unet_weight_changes"]["keys_value_changed"] == {Q: changed["relative_change"]}


def test_the_record_is_read_again_as_it_was(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher) -> None:
    apply(monitor, unet)
    run = monitor.run()
    assert run_from_json(run_to_json(run)) == run


def test_findings_are_the_runs(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher) -> None:
    apply(monitor, unet, strength=0.0)
    found = {finding.id: finding for finding in monitor.run().findings}
    assert found["lora_strength_zero"].severity == "warning"
    assert found["lora_strength_zero"].stage == "lora_application"


def test_what_the_step_raised_is_in_the_analysis(
    monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher
) -> None:
    baseline = monitor.capture_lora_baseline(unet, None)
    monitor.start_monitoring("lora_application")
    try:
        raise KeyError("no such layer")
    except KeyError as error:
        monitor.end_monitoring("lora_application", error=error)
    found = monitor.analyze_lora_application_results(baseline, unet, None, None)
    assert "no such layer" in found["error"]
    assert found["exception_details"]["type"] == "KeyError"
    assert found["lora_application_success"] is False


def test_the_functions_are_methods_of_the_same_signature(
    monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher
) -> None:
    baseline = monitor.capture_lora_baseline(unet, None)
    assert monitor.track_model_identity_changes(unet, unet, "UNet")["model_cloned"] is False
    assert monitor.track_weight_modifications(unet, unet, "UNet")["keys_added"] == []
    assert monitor.analyze_lora_patches(unet, "UNet")["total_patched_keys"] == 0
    assert monitor.track_model_placement_changes(unet, unet, "UNet")["model_device_changed"] is False
    assert monitor.calculate_memory_change(baseline["unet"], unet)["error"] is None


def test_two_loras_are_two_stages(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher) -> None:
    apply(monitor, unet)
    apply(monitor, unet, strength=0.0)
    stages = [stage for stage in monitor.run().stages if stage.name == "lora_application"]
    facts: list[Any] = [stage.facts["lora_application"] for stage in stages]
    assert [one["effective"] for one in facts] == [True, False]


def test_the_comprehensive_summary_has_it(monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher) -> None:
    analysis = apply(monitor, unet)
    text = io.StringIO()
    monitor.print_comprehensive_summary(lora_analysis=analysis, console=Console(file=text, width=80))
    assert "LORA APPLICATION ANALYSIS SUMMARY" in text.getvalue()
    assert "Weights with effect: 1, predicted from the changes" in text.getvalue()


def test_a_broken_function_does_not_reach_the_host(
    monitor: sigmascope.WorkflowMonitor, unet: ModelPatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("sigmascope.stages.lora_application.capture_lora_baseline", broken)
    monkeypatch.setattr("sigmascope.stages.lora_application.analyze_lora_application_results", broken)
    baseline = monitor.capture_lora_baseline(unet, None)
    found = monitor.analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["lora_application_success"] is None
    assert found["unavailable"]["lora_application_success"] == "RuntimeError: a bug of ours"


def test_lists_of_single_weights_become_their_lengths() -> None:
    analysis = {"unet_weight_changes": {"keys_added": ["a", "b"], "delta_norm": 1.0}, "baseline": {}}
    assert in_short(analysis) == {"unet_weight_changes": {"keys_added": 2, "delta_norm": 1.0}}
