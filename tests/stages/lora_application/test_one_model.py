"""A LoRA that ComfyUI applies to the denoiser alone, as `LoraLoaderModelOnly` does, or to nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.modules import CLIP_Q, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP

import sigmascope
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a module for each model, whose factors are `lora_parts(seed=0)` and `(seed=5)`."""
    state: dict[str, torch.Tensor] = {}
    for prefix, seed in (("", 0), ("text_encoders.", 5)):
        up, down, *_ = lora_parts(seed=seed)
        name = prefix + (Q if seed == 0 else CLIP_Q).removesuffix(".weight")
        state |= {f"{name}.lora_up.weight": up.contiguous(), f"{name}.lora_down.weight": down.contiguous()}
        state[f"{name}.alpha"] = torch.tensor(1.0)
    save_file(state, tmp_path / "style.safetensors")
    return tmp_path / "style.safetensors"


@pytest.mark.parametrize("clip_given", ["to both", "to neither", "to the baseline"])
def test_a_lora_for_the_denoiser_alone_is_whole(
    unet: ModelPatcher, clip: CLIP, path: Path, clip_given: str
) -> None:
    baseline = capture_lora_baseline(unet, None if clip_given == "to neither" else clip, path)
    modified = unet.clone()
    modified.add_patches({Q: lora_adapter()})
    after = clip if clip_given == "to both" else None
    found = analyze_lora_application_results(baseline, modified, after, (modified,))
    findings = {finding["id"]: finding["severity"] for finding in found["findings"]}
    assert findings == {"lora_registered_only": "info", "lora_part_left_out": "info"}
    verdict = found["applied_verdict"]
    assert verdict is not None
    assert (verdict["modules_there"], verdict["total_modules"], verdict["complete"]) == (1, 1, True)
    assert found["success"] is True


def test_a_text_encoder_that_took_nothing_is_found(unet: ModelPatcher, clip: CLIP, path: Path) -> None:
    baseline = capture_lora_baseline(unet, clip, path)
    modified, cloned = unet.clone(), clip.clone()
    modified.add_patches({Q: lora_adapter()})
    found = analyze_lora_application_results(baseline, modified, cloned, (modified, cloned))
    assert "lora_partly_loaded" in {finding["id"] for finding in found["findings"]}
    assert found["success"] is False


def test_strength_zero_for_both_is_no_failure_to_load(unet: ModelPatcher, clip: CLIP, path: Path) -> None:
    baseline = capture_lora_baseline(unet, clip, path)
    found = analyze_lora_application_results(baseline, unet, clip, (unet, clip))
    assert [(one["id"], one["severity"]) for one in found["findings"]] == [("lora_left_off", "warning")]
    assert found["effective"] is False


def test_a_clone_that_took_nothing_has_failed(unet: ModelPatcher, clip: CLIP, path: Path) -> None:
    baseline = capture_lora_baseline(unet, clip, path)
    result = unet.clone(), clip.clone()
    found = analyze_lora_application_results(baseline, *result, result)
    assert found["findings"][0]["id"] == "lora_not_loaded"


def test_a_step_closed_for_one_model_says_nothing_of_the_other(unet: ModelPatcher, clip: CLIP) -> None:
    monitor = sigmascope.WorkflowMonitor(verbose=False)
    for model, kind in ((unet, "UNet"), (clip, "CLIP")):
        monitor.start_monitoring("model_loading")
        monitor.end_monitoring("model_loading", model, kind)
    monitor.start_monitoring("lora_application")
    new_unet, new_clip = unet.clone(), clip.clone()
    new_unet.add_patches({Q: lora_adapter()})
    new_clip.add_patches({CLIP_Q: lora_adapter(seed=5)})
    monitor.end_monitoring("lora_application", new_unet, "UNet")
    monitor.start_monitoring("text_encoding")
    monitor.end_monitoring("text_encoding", new_clip, "CLIP")
    assert [one for one in monitor.run().findings if one.id == "model_state_changed"] == []
    monitor.start_monitoring("denoising")
    monitor.end_monitoring("denoising", clip, "CLIP")
    assert [one.stage for one in monitor.run().findings if one.id == "model_state_changed"] == ["denoising"]
