from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.analysis.faulty_runs import component, pipeline, stage, steps
from torch import nn

import sigmascope
from sigmascope.monitor.guard import as_json
from sigmascope.records.run import CallFacts, ComponentFacts, Finding

Found = Callable[..., dict[str, Finding]]
DENOISING = stage("denoising", 30.0, steps=steps([1.0] * 10))
"""Ten seconds in its steps, and a callback's twenty between them."""
LATE = {"performance": {"target_met": False}}


def test_an_editing_model_without_an_image_is_told(found: Found) -> None:
    pipe = pipeline(class_name="QwenImageEditPipeline", source="Qwen/Qwen-Image-Edit")
    finding = found(pipe=pipe, call=CallFacts(has_image=False))["model.edit_model_for_text_to_image"]
    assert "Qwen/Qwen-Image with QwenImagePipeline" in (finding.advice or "")
    assert "model.edit_model_for_text_to_image" not in found(pipe=pipe, call=CallFacts(has_image=True))
    assert "model.edit_model_for_text_to_image" not in found(pipe=pipe, call=CallFacts())


def test_an_editing_model_in_a_text_to_image_pipeline_is_known_by_its_source(found: Found) -> None:
    call = CallFacts(has_image=False)
    assert "model.edit_model_for_text_to_image" in found(
        pipe=pipeline(class_name="QwenImagePipeline", source="Qwen/Qwen-Image-Edit"), call=call
    )
    assert "model.edit_model_for_text_to_image" not in found(
        pipe=pipeline(class_name="QwenImagePipeline", source="Qwen/Qwen-Image"), call=call
    )


@pytest.mark.parametrize(
    ("class_name", "config", "source"),
    [
        ("UNet2DConditionModel", {"time_cond_proj_dim": 256}, None),
        ("FluxTransformer2DModel", {"guidance_embeds": False}, None),
        ("UNet2DConditionModel", {"_name_or_path": "stabilityai/sdxl-turbo"}, None),
        ("UNet2DConditionModel", {}, "ByteDance/SDXL-Lightning"),
    ],
)
def test_many_steps_of_a_few_step_model_are_told_by_evidence(
    found: Found, class_name: str, config: dict[str, Any], source: str | None
) -> None:
    pipe = pipeline(unet=component("denoiser", class_name, config=config), source=source)
    finding = found(DENOISING, pipe=pipe, call=CallFacts(num_inference_steps=40))["model.too_many_steps"]
    assert finding.evidence["gain_seconds"] == pytest.approx(8.0)
    assert "model.too_many_steps" not in found(DENOISING, pipe=pipe, call=CallFacts(num_inference_steps=4))


def test_many_steps_of_an_ordinary_model_are_no_fault(found: Found) -> None:
    part = component("denoiser", "FluxTransformer2DModel", config={"guidance_embeds": True})
    assert not found(DENOISING, pipe=pipeline(transformer=part), call=CallFacts(num_inference_steps=40))


def test_a_few_step_scheduler_on_an_ordinary_model_is_told(found: Found) -> None:
    pipe = pipeline(unet=component("denoiser"), scheduler=ComponentFacts("scheduler", "LCMScheduler"))
    call = CallFacts(num_inference_steps=4)
    assert "model.scheduler_for_distilled_models" in found(pipe=pipe, call=call)


@pytest.mark.parametrize(("config", "severity"), [({}, "info"), ({"time_cond_proj_dim": 256}, "warning")])
@pytest.mark.parametrize(("batches", "gain"), [(2, 5.0), (3, 20 / 3)])
def test_guidance_costs_its_share_of_the_steps(
    found: Found, config: dict[str, Any], severity: str, batches: int, gain: float
) -> None:
    pipe = pipeline(unet=component("denoiser", config=config))
    call = CallFacts(num_inference_steps=8, guidance_scale=7.5, guidance_batches=batches)
    finding = found(replace(DENOISING, facts=LATE), pipe=pipe, call=call)["model.guidance_doubles_the_work"]
    assert finding.severity == severity
    assert finding.evidence["gain_seconds"] == pytest.approx(gain)
    in_time = found(DENOISING, pipe=pipe, call=call)
    assert ("model.guidance_doubles_the_work" in in_time) == bool(
        config
    )  # a fault even so, where it is distilled
    assert "model.guidance_doubles_the_work" not in found(
        DENOISING, pipe=pipe, call=CallFacts(guidance_scale=3.5, guidance_batches=1)
    )


@pytest.mark.parametrize(("loaded", "severity"), [(0, "error"), (40, "warning"), (88, None)])
def test_modules_that_are_not_on_the_model_are_counted(
    found: Found, loaded: int, severity: str | None
) -> None:
    verdicts = {
        "verdict": {"total_modules": 88, "matched_modules": 88},
        "applied_verdict": {"total_modules": 88, "modules_there": loaded},
    }
    findings = found(stage("lora_application", facts={"lora_application": verdicts}))
    assert ("lora.modules_unmatched" in findings) is (severity is not None)
    if severity is not None:
        finding = findings["lora.modules_unmatched"]
        assert finding.severity == severity
        assert finding.evidence == {"modules": 88, "matched": loaded}


def test_a_lora_of_another_model_is_diagnosed_from_the_stage_s_own_analysis(
    found: Found, tmp_path: Path
) -> None:
    state = {
        "unet.elsewhere.lora_A.weight": torch.ones(2, 4),
        "unet.elsewhere.lora_B.weight": torch.ones(4, 2),
    }
    save_file(state, tmp_path / "lora.safetensors")
    unet = nn.Sequential(nn.Linear(4, 4))
    baseline = sigmascope.capture_lora_baseline(unet, None, str(tmp_path / "lora.safetensors"))
    analysis = sigmascope.analyze_lora_application_results(baseline, unet, None, (unet,))
    findings = found(stage("lora_application", facts={"lora_application": as_json(analysis)}))
    assert findings["lora.modules_unmatched"].severity == "error"
