"""Weights that something else writes into, besides the LoRAs that are fused into them."""

from typing import Any

import pytest
import torch
from tests.stages.weight_check.test_peft import Analysis, Tiny, analysed, layers_of, with_lora

from sigmascope.stages.lora_application import capture_lora_baseline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def unexplained(found: Analysis) -> list[dict[str, Any]]:
    return [one for one in found["findings"] if one["id"] == "weights_changed_unexplained"]


@pytest.mark.parametrize("fused_before", [False, True])
def test_weights_scaled_after_fusing_are_told_with_the_factor(fused_before: bool) -> None:
    unet = with_lora(Tiny())
    if fused_before:
        unet.fuse_lora()
        baseline = capture_lora_baseline(unet, None)
    else:
        unet.disable_lora()
        baseline = capture_lora_baseline(unet, None)
        unet.enable_lora()
        unet.fuse_lora()
    weights = [layer.get_base_layer().weight.data for layer in layers_of(unet).values()]
    norm = sum(float((0.5 * weight.double()).square().sum()) for weight in weights) ** 0.5
    for weight in weights:
        weight.mul_(1.5)
    found, _ = analysed(baseline, unet)
    (finding,) = unexplained(found)
    assert finding["evidence"]["outside_norm"] == pytest.approx(norm, rel=0.05)  # of a thousand elements each
    assert finding["evidence"]["factor"] == pytest.approx(1.5, rel=1e-4)
    assert found["effective"] is True


def test_what_no_factor_makes_is_told_by_its_size() -> None:
    unet = with_lora(Tiny())
    unet.fuse_lora()
    baseline = capture_lora_baseline(unet, None)
    added = [torch.randn_like(layer.weight) for layer in layers_of(unet).values()]
    for layer, noise in zip(layers_of(unet).values(), added, strict=True):
        layer.get_base_layer().weight.data += noise
    (finding,) = unexplained(analysed(baseline, unet)[0])
    norm = sum(float(noise.double().square().sum()) for noise in added) ** 0.5
    assert finding["evidence"]["outside_norm"] == pytest.approx(norm, rel=0.05)
    assert "factor" not in finding["evidence"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusing_over_and_over_is_not_told_as_written(dtype: torch.dtype) -> None:
    unet = with_lora(Tiny()).to(dtype)
    unet.disable_lora()
    baseline = capture_lora_baseline(unet, None)
    unet.enable_lora()
    for _ in range(10):
        unet.fuse_lora()
        unet.unfuse_lora()
    unet.fuse_lora(lora_scale=0.5)
    assert unexplained(analysed(baseline, unet)[0]) == []
