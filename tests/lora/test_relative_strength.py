from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.compatibility import judge_lora
from sigmascope.lora.effect import Effect
from sigmascope.lora.inspect import relative_strengths

NAME = "denoiser.mid_block.attentions.0.proj_in"


def measured(folder: Path, weight: torch.Tensor, **ends: torch.Tensor) -> Effect:
    save_file({f"{NAME}.weight": weight}, folder / "model.safetensors")
    state = {f"{NAME}.{end.replace('__', '.')}": tensor for end, tensor in ends.items()}
    save_file(state, folder / "lora.safetensors")
    with open_checkpoint(folder / "model.safetensors") as model:
        verdict = judge_lora(folder / "lora.safetensors", model)
        return relative_strengths(folder / "lora.safetensors", verdict, model)[NAME]


def test_it_is_the_change_by_the_weight(tmp_path: Path) -> None:
    weight, up, down = torch.randn(8, 6), torch.randn(8, 2), torch.randn(2, 6)
    effect = measured(tmp_path, weight.bfloat16(), lora_up__weight=up, lora_down__weight=down)
    expected = (up.double() @ down.double()).norm() / weight.bfloat16().double().norm()
    assert effect.relative_change == pytest.approx(float(expected), rel=1e-9)


def test_dora_is_measured_beside_its_weight(tmp_path: Path) -> None:
    weight, up, down = torch.randn(8, 6), torch.randn(8, 2), torch.randn(2, 6)
    magnitude = torch.rand(8, 1) + 0.5
    effect = measured(tmp_path, weight, lora_up__weight=up, lora_down__weight=down, dora_scale=magnitude)
    moved = weight.double() + up.double() @ down.double()
    delta = magnitude.double() * moved / moved.norm(dim=1, keepdim=True) - weight.double()
    assert effect.delta_norm == pytest.approx(float(delta.norm()), rel=1e-6)


def test_a_weight_of_zeros_has_none(tmp_path: Path) -> None:
    effect = measured(
        tmp_path, torch.zeros(8, 6), lora_up__weight=torch.randn(8, 2), lora_down__weight=torch.randn(2, 6)
    )
    assert effect.relative_change is None
    assert effect.unavailable["relative_change"] == "the weight is all zeros"


def test_nan_has_none(tmp_path: Path) -> None:
    up = torch.full((8, 2), torch.nan)
    effect = measured(tmp_path, torch.randn(8, 6), lora_up__weight=up, lora_down__weight=torch.randn(2, 6))
    assert effect.delta_norm is None
    assert "NaN" in effect.unavailable["delta_norm"]
