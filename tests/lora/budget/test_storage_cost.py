import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints.safetensors import save_safetensors
from sigmascope.lora.budget import StorageCost

SHAPES: dict[str, tuple[int, ...]] = {
    "denoiser.mid_block.attentions.0.proj_in": (96, 64),
    "denoiser.down_blocks.0.resnets.0.conv1": (32, 16, 3, 3),
    "denoiser.üñí.conv_shortcut": (16, 8, 1, 1),
    "denoiser.conv_out": (4, 32, 3, 3),
}
RANKS = dict(zip(SHAPES, (7, 3, 5, 4), strict=True))
TEXTS = {"base": "ünï", "ranks": "7,3,5,4"}


def native_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {}
    for layer, shape in SHAPES.items():
        rank, ones = RANKS[layer], [1] * (len(shape) - 2)
        tensors[f"{layer}.lora_up.weight"] = torch.zeros(shape[0], rank, *ones, dtype=dtype)
        tensors[f"{layer}.lora_down.weight"] = torch.zeros(rank, *shape[1:], dtype=dtype)
        tensors[f"{layer}.alpha"] = torch.tensor(float(rank))
    return tensors


@pytest.mark.parametrize("save", [save_safetensors, lambda path, *rest: save_file(rest[0], path, rest[1])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_file_is_never_larger_than_said_and_hardly_smaller(
    tmp_path: Path, dtype: torch.dtype, save: Callable[..., Any]
) -> None:
    file = tmp_path / "lora.safetensors"
    save(file, native_tensors(dtype), TEXTS)
    said = StorageCost.of(dtype, TEXTS).within(20_000).file_bytes(RANKS, SHAPES)
    # Counted with all digits: the offsets, and the shapes at full rank.
    assert said - 10 * 3 * len(SHAPES) <= file.stat().st_size <= said


def test_a_module_of_rank_0_takes_nothing() -> None:
    cost = StorageCost.of(torch.float16)
    assert cost.file_bytes(dict.fromkeys(SHAPES, 0), SHAPES) == cost.empty_bytes


def test_a_rank_takes_a_column_and_a_row() -> None:
    assert StorageCost(2).rank_bytes("a", (96, 64)) == 2 * 160
    assert StorageCost(4).rank_bytes("a", (32, 16, 3, 3)) == 4 * (32 + 144)


def test_a_format_without_alpha_takes_less() -> None:
    layer, shape = next(iter(SHAPES.items()))
    peft = StorageCost(2, names=lambda name: (f"{name}.lora_B.weight", f"{name}.lora_A.weight"))
    assert peft.module_bytes(layer, shape) < StorageCost(2).module_bytes(layer, shape) - 4


def test_other_tensors_and_metadata_count() -> None:
    plain = StorageCost.of(torch.float16, {"a": "b"})
    more = StorageCost.of(torch.float16, {"a": "b" * 101}, other_bytes=1000)
    assert more.file_bytes(RANKS, SHAPES) - plain.file_bytes(RANKS, SHAPES) == 1100


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_both_factors_costs_what_is_said(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(200, 16, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(300, 16, generator=generator, dtype=torch.float64))
    root = torch.logspace(-1, -2, 16, dtype=torch.float64).sqrt()
    up, down = u * root, root[:, None] * v.T
    error = up.to(dtype).double() @ down.to(dtype).double() - up @ down
    share = float(error.norm()) / math.sqrt(float(root.pow(4).sum()))
    assert 0.9 * StorageCost.of(dtype).rounding < share <= StorageCost.of(dtype).rounding
