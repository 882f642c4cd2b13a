"""A LoRA that PEFT merges into weights in 16 bits: what arrives is measured from their elements."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

SIDE = 30  # a weight of fewer elements than the baseline takes, so that all are compared


def merged(
    size: float, dtype: torch.dtype, *, in_two_steps: bool, set_to: float = 1.0
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The analysis of merging, how far the weights really changed, and how far they were to."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(SIDE, SIDE, bias=False) for name in ("to_q", "to_k")}).to(dtype)
    before = torch.stack([weight.detach().clone() for weight in model.parameters()])
    baseline = capture_lora_baseline(model, None)
    tuner: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k"]))
    layers = [tuner.base_model.model[name] for name in ("to_q", "to_k")]
    for layer in layers:
        for factor in (layer.lora_A, layer.lora_B):
            factor["default"].weight.data = size * torch.randn_like(factor["default"].weight, dtype=dtype)
    factors = [(layer.lora_B["default"].weight, layer.lora_A["default"].weight) for layer in layers]
    wanted = torch.stack([up.detach().double() @ down.detach().double() for up, down in factors])
    if in_two_steps:
        baseline = capture_lora_baseline(model, None)
    tuner.merge_adapter()
    for layer in layers:
        layer.scaling["default"] = set_to
    after = torch.stack([layer.base_layer.weight.detach() for layer in layers])
    found = dict(analyze_lora_application_results(baseline, model, None, (model, None)))
    return found, after.double() - before.double(), wanted


@pytest.mark.parametrize("in_two_steps", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-4, 3e-3, 1e-2, 0.03])
def test_share_and_noise_are_those_of_the_contents(
    size: float, dtype: torch.dtype, in_two_steps: bool
) -> None:
    found, real, wanted = merged(size, dtype, in_two_steps=in_two_steps)
    share = float((real * wanted).sum() / (wanted * wanted).sum())
    noise = float((real - share * wanted).norm() / wanted.norm())
    arriving = found["unet_weight_changes"]["arriving"]
    assert (arriving["stored"], arriving["weights"]) == (str(dtype).removeprefix("torch."), 2)
    assert (arriving["share"], arriving["noise"]) == pytest.approx((share, noise), rel=1e-6, abs=1e-9)
    ids = {finding["id"] for finding in found["findings"]}
    assert ("lora_arrives_weak" in ids) == (share < 0.8)
    assert ("lora_arrives_noisy" in ids) == (noise > 0.5)


def test_a_strength_that_was_set_after_merging_is_no_loss_by_rounding() -> None:
    found, *_ = merged(0.5, torch.bfloat16, in_two_steps=True, set_to=4.0)
    assert found["unet_weight_changes"]["arriving"] is None


def test_weights_in_float32_hold_all() -> None:
    found, *_ = merged(1e-2, torch.float32, in_two_steps=True)
    assert found["unet_weight_changes"]["arriving"] is None
