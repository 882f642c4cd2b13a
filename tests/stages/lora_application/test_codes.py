"""LoRAs merged into codes that have a scale beside them, as in ComfyUI's layers of scaled fp8."""

from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.patchers import ModelPatcher, merged
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

SIZE, SCALE, KEY = 64, 0.01, "matrix.weight"
UP, DOWN, *_ = lora_parts(SIZE, 2, SIZE)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter((numbers / SCALE).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale_weight = nn.Parameter(torch.tensor(SCALE), requires_grad=False)

    def numbers(self) -> Tensor:
        return self.weight.detach().double() * float(self.scale_weight)


class ScaledPatcher(ModelPatcher):
    """Merges into the numbers, and stores them with the old scale."""

    def _merge(self, module: Any, part: str, key: str) -> None:
        self.backup.setdefault(key, self.keep(module.weight))
        changed = merged(self.patches[key], module.weight.to(torch.float32) * module.scale_weight)
        module.weight = nn.Parameter((changed / SCALE).to(torch.float8_e4m3fn), requires_grad=False)


def patched(times: float) -> tuple[Any, ScaledPatcher, Tensor]:
    """A baseline, the patcher with a LoRA merged after it, and what that changed the numbers by."""
    model = nn.Module()
    model.matrix = layer = Scaled()
    patcher, before = ScaledPatcher(model), layer.numbers()
    baseline = capture_lora_baseline(patcher, None)
    patcher.add_patches({KEY: lora_adapter(SIZE, 2, SIZE, 2.0 * times)}, 1.0)
    patcher.load()
    return baseline, patcher, layer.numbers() - before


@pytest.mark.parametrize("times", [1.0, 100.0])
def test_figures_are_of_the_numbers_and_not_of_their_codes(times: float) -> None:
    baseline, patcher, change = patched(times)
    whole = float((patcher.model.matrix.numbers() - change).norm())
    found: Any = analyze_lora_application_results(baseline, patcher, None, (patcher, None))
    told = found["unet_weight_changes"]
    assert told["delta_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
    assert told["relative_change"] == pytest.approx(float(change.norm()) / whole, rel=1e-3)
    wanted = times * UP.double() @ DOWN.double()
    assert told["arriving"]["share"] == pytest.approx(
        float((change * wanted).sum() / (wanted * wanted).sum()), rel=1e-3
    )
    after = capture_lora_baseline(patcher, None)
    patcher.unpatch_model()
    patcher.patches.clear()
    taken_off = analyze_lora_application_results(after, patcher, None, (patcher, None))
    assert taken_off["effective"] is True
    assert taken_off["unet_weight_changes"]["delta_norm"] == pytest.approx(float(wanted.norm()), rel=0.05)
