from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.together import LorasTogether, ModuleTogether, inspect_together

NAMES = [f"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_{end}" for end in "qkv"]


def made(seed: int, names: list[str], rank: int, alpha: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors[f"{name}.lora_up.weight"] = torch.randn(12, rank, generator=generator)
        tensors[f"{name}.lora_down.weight"] = torch.randn(rank, 10, generator=generator)
        tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def delta(tensors: dict[str, Tensor], name: str) -> Tensor:
    """What the file says, formed in float64."""
    if f"{name}.lora_up.weight" not in tensors:
        return torch.zeros(12, 10, dtype=torch.float64)
    up, down = (tensors[f"{name}.lora_{end}.weight"].double() for end in ("up", "down"))
    return float(tensors[f"{name}.alpha"]) / up.shape[1] * up @ down


def saved(folder: Path, files: list[dict[str, Tensor]]) -> list[Path]:
    for index, tensors in enumerate(files):
        save_file(tensors, folder / f"{index}.safetensors")
    return [folder / f"{index}.safetensors" for index in range(len(files))]


def by_name(report: LorasTogether) -> list[ModuleTogether]:
    """In the order of `NAMES`."""
    return sorted(report.modules, key=lambda module: "qkv".index(module.name.split("to_")[-1][0]))


def test_figures_are_those_of_the_formed_changes(tmp_path: Path) -> None:
    files = [made(0, NAMES, 4, 2.0), made(1, NAMES[:2], 3, -6.0), made(2, NAMES[1:], 6, 6.0)]
    report = inspect_together(saved(tmp_path, files))
    parts = [[delta(tensors, name) for tensors in files] for name in NAMES]
    for module, own in zip(by_name(report), parts, strict=True):
        assert module.norms == pytest.approx([float(part.norm()) for part in own])
        assert module.inner == pytest.approx([float((a * b).sum()) for a, b in combinations(own, 2)])
        assert module.sum_norm == pytest.approx(float(torch.stack(own).sum(0).norm()))
    sums = torch.stack([torch.stack(own).sum(0) for own in parts])
    assert report.total.sum_norm == pytest.approx(float(sums.norm()))
    assert len(report.shared) == 3


@pytest.mark.parametrize(("factor", "interference"), [(1.0, 1.0), (-1.0, -1.0)])
def test_interference_is_signed(tmp_path: Path, factor: float, interference: float) -> None:
    first = made(0, NAMES[:1], 4, 4.0)
    second = first | {f"{NAMES[0]}.alpha": torch.tensor(4.0 * factor)}
    (module,) = inspect_together(saved(tmp_path, [first, second])).modules
    assert module.interference == pytest.approx(interference)
    assert module.sum_norm == pytest.approx((1 + factor) * module.norms[0], abs=1e-5)


def test_other_kinds_are_formed_and_other_shapes_are_unknown(tmp_path: Path) -> None:
    plain = made(0, NAMES[:2], 4, 4.0)
    whole = delta(made(1, NAMES[:1], 4, 4.0), NAMES[0]).float()
    other = {f"{NAMES[0]}.diff": whole, f"{NAMES[1]}.diff": torch.ones(9, 10)}
    first, second = by_name(inspect_together(saved(tmp_path, [plain, other])))
    assert first.inner == pytest.approx([float((delta(plain, NAMES[0]) * whole).sum())])
    assert (second.sum_norm, second.interference) == (None, None)
    assert "different shape" in str(second.unavailable)


def test_one_lora_is_not_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two LoRAs"):
        inspect_together(saved(tmp_path, [made(0, NAMES, 2, 2.0)]))
