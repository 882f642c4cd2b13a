"""Against a real ComfyUI, its own U-Net and its own loader: what is monitored is what its code does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout, load_in_part
from tests.comfy_shapes.real import CPU, kohya_file, real_clip, unet_patcher
from torch import Tensor

from sigmascope.lora.compatibility import judge_lora
from sigmascope.probes.comfyui_patcher import read_patches, weights_of
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.comfyui


@pytest.fixture
def unet(comfy: Checkout) -> Any:
    return unet_patcher(comfy)


@pytest.fixture
def clip(comfy: Checkout) -> Any:
    return real_clip(comfy)


@pytest.fixture
def file(comfy: Checkout, unet: Any, clip: Any) -> dict[str, Tensor]:
    return kohya_file(comfy, unet, clip)


@pytest.fixture
def path(file: Mapping[str, Tensor], tmp_path: Path) -> Path:
    save_file(dict(file), tmp_path / "style.safetensors")
    return tmp_path / "style.safetensors"


def keys(model: object) -> set[str]:
    found = read_patches(model).value
    assert found is not None
    return {patch.key for patch in found}


def denoise(patcher: Any) -> Tensor:
    context, x = random(1, 7, 32, seed=1), random(1, 4, 8, 8)
    with torch.no_grad():
        output: Tensor = patcher.model.apply_model(x, torch.tensor([1.0]), c_crossattn=context)
    return output


def test_every_module_of_a_file_that_fits_is_on_the_model(
    comfy: Checkout, unet: Any, clip: Any, file: dict[str, Tensor]
) -> None:
    new_unet, new_clip = comfy.module("comfy.sd").load_lora_for_models(unet, clip, file, 0.8, 0.8)
    assert len(keys(new_unet)) + len(keys(new_clip)) == len(file) / 3


def test_the_verdict_matches_the_layers_that_comfyui_matches(
    comfy: Checkout, unet: Any, file: dict[str, Tensor], path: Path
) -> None:
    model = weights_of(unet).value
    assert model is not None
    verdict = judge_lora(path, model)
    new_unet, _ = comfy.module("comfy.sd").load_lora_for_models(unet, None, file, 1.0, 1.0)
    assert keys(new_unet) == {layer for module in verdict.matched for layer in module.layers}


def test_the_analysis_of_a_merged_lora_measures_what_merging_did(
    comfy: Checkout, unet: Any, clip: Any, file: dict[str, Tensor], path: Path
) -> None:
    before = {name: weight.clone() for name, weight in unet.model.state_dict().items()}
    baseline = capture_lora_baseline(unet, clip, path)
    result = comfy.module("comfy.sd").load_lora_for_models(unet, clip, file, 0.8, 0.8)
    result[0].patch_model(device_to=CPU)
    analysis = analyze_lora_application_results(baseline, result[0], result[1], result)
    changed = {name: (weight.double() - before[name].double()).norm().item()
               for name, weight in result[0].model.state_dict().items()}  # fmt: skip
    found = analysis["unet_weight_changes"]["keys_value_changed"]
    assert found.keys() == {name for name, size in changed.items() if size}
    assert all(change["delta_norm"] == pytest.approx(changed[key], rel=1e-3) for key, change in found.items())


def test_the_analysis_of_a_registered_lora_predicts_what_merging_does(
    comfy: Checkout, unet: Any, clip: Any, file: dict[str, Tensor], path: Path
) -> None:
    baseline = capture_lora_baseline(unet, clip, path)
    result = comfy.module("comfy.sd").load_lora_for_models(unet, clip, file, 0.8, 0.8)
    analysis = analyze_lora_application_results(baseline, result[0], result[1], result)
    before = {name: weight.clone() for name, weight in unet.model.state_dict().items()}
    result[0].patch_model(device_to=CPU)
    found = analysis["unet_weight_changes"]["keys_value_changed"]
    after = result[0].model.state_dict()
    assert all(change["predicted"] for change in found.values())
    for key, change in found.items():
        assert change["delta_norm"] == pytest.approx((after[key] - before[key]).norm().item(), rel=1e-3)


def test_a_file_that_the_loader_ignores_without_a_word_is_found_out(
    comfy: Checkout, unet: Any, clip: Any, tmp_path: Path
) -> None:
    wrong = {
        "transformer.blocks.0.attn.to_q.lora_A.weight": random(2, 8),
        "transformer.blocks.0.attn.to_q.lora_B.weight": random(8, 2),
    }
    save_file(wrong, tmp_path / "wrong.safetensors")
    baseline = capture_lora_baseline(unet, clip, tmp_path / "wrong.safetensors")
    result = comfy.module("comfy.sd").load_lora_for_models(unet, clip, wrong, 1.0, 1.0)
    analysis = analyze_lora_application_results(baseline, result[0], result[1], result)
    assert analysis["lora_application_success"]
    assert not analysis["effective"]


@pytest.mark.parametrize("memory", [0, 100_000], ids=["loaded", "low memory"])
def test_the_output_is_bit_identical_with_and_without_the_monitor(
    comfy: Checkout, clip: Any, path: Path, file: dict[str, Tensor], memory: int
) -> None:
    outputs = []
    for monitored in (False, True):
        unet = unet_patcher(comfy)
        baseline = capture_lora_baseline(unet, clip, path) if monitored else None
        result = comfy.module("comfy.sd").load_lora_for_models(unet, clip, file, 0.8, 0.8)
        load_in_part(result[0], memory)
        if monitored:
            analyze_lora_application_results(baseline, result[0], result[1], result)
        outputs.append(denoise(result[0]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("loaded", [False, True])
def test_one_file_forth_and_back_is_said_to_cancel(
    comfy: Checkout, unet: Any, file: dict[str, Tensor], path: Path, loaded: bool
) -> None:
    before = denoise(unet)
    baseline = capture_lora_baseline(unet, None, path)
    load = comfy.module("comfy.sd").load_lora_for_models
    changed = load(load(unet, None, file, 0.8, 0.0)[0], None, file, -0.8, 0.0)[0]
    if loaded:
        changed.patch_model(device_to=CPU)
        torch.testing.assert_close(denoise(changed), before, rtol=1e-4, atol=1e-5)
    analysis = analyze_lora_application_results(baseline, changed, None, (changed, None))
    found = [finding["id"] for finding in analysis["findings"]]
    assert analysis["effective"] is False
    assert found[0] == "lora_cancelled"
    assert "lora_applied_twice" not in found


def test_a_hook_in_the_conditioning_is_named(
    comfy: Checkout, unet: Any, clip: Any, file: dict[str, Tensor], path: Path
) -> None:
    hooks = comfy.module("comfy.hooks")
    baseline = capture_lora_baseline(unet, clip, path)
    group = hooks.create_hook_lora(lora=file, strength_model=0.8, strength_clip=0.8)
    conditioning = hooks.set_hooks_for_conditioning([[random(1, 7, 32), {}]], group)
    analysis = analyze_lora_application_results(baseline, unet, clip, (conditioning,))
    found = [finding["id"] for finding in analysis["findings"]]
    assert "lora_in_conditioning" in found
    assert not {"lora_not_applied", "lora_not_loaded"} & set(found)


@pytest.mark.parametrize(("size", "strength"), [(1.0, 0.8), (1.0, 0.0), (0.0, 0.8)])
def test_a_bypass_is_told_as_it_moves_the_output(
    comfy: Checkout, unet: Any, file: dict[str, Tensor], size: float, strength: float
) -> None:
    sd = comfy.module("comfy.sd")
    if not hasattr(sd, "load_bypass_lora_for_models"):
        pytest.skip("this version knows no bypass")
    before, baseline = denoise(unet), capture_lora_baseline(unet, None)
    state = {name: tensor * size if "lora_up" in name else tensor for name, tensor in file.items()}
    changed, _ = sd.load_bypass_lora_for_models(unet, None, state, strength, 0.0)
    changed.patch_model(device_to=CPU)
    changed.inject_model()
    analysis = analyze_lora_application_results(baseline, changed, None, (changed, None))
    assert analysis["effective"] is not torch.allclose(denoise(changed), before, atol=1e-6)
    assert analysis["effective"] is (size * strength > 0.0)
    changed.eject_model()
    assert analyze_lora_application_results(baseline, unet, None, (unet, None))["effective"] is False
