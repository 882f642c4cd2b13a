"""Damaged and lying LoRA files: an error that a user can act on, or a LoRA, and nothing else."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.errors import SigmascopeError
from sigmascope.lora.adapters import DiffChange, DoraChange, LohaChange, LokrChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.module_names import parse_names
from sigmascope.lora.reader import load_lora, open_lora
from sigmascope.lora.writer import save_lora

ENDS = [
    "lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha", "dora_scale", "lora_A.weight", "lora_B.weight",
    "lora_B.bias", "lora_A.default.weight", "lora_magnitude_vector", "hada_w1_a", "hada_t1", "lokr_w1", "lokr_w2_b",
    "lokr_t2", "diff", "diff_b", "set_weight", "w_norm", "b_norm", "lora_embedding_A", "lora_embedding_B", "weight",
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [
    (),
    (1,),
    (3,),
    (2, 3),
    (3, 2),
    (0, 2),
    (2, 2, 1, 1),
    (2, 3, 3, 3),
    (2, 2, 3, 3, 3),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float64]


def factors(*shape: int) -> LoraFactors:
    inner = int(torch.Size(shape[1:]).numel())
    return LoraFactors(torch.randn(shape[0], 2), torch.randn(2, inner), 1.0, shape)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """A file with a module of every kind."""
    loha = {f"hada_w{side}_{end}": torch.randn(3, 3) for side in (1, 2) for end in "ab"}
    lora = LoraFile(
        {"denoiser.conv_in": factors(6, 4, 3, 3), "denoiser.conv_out": factors(6, 5)},
        changes={
            "denoiser.time_embedding.linear_1": LohaChange(loha),
            "denoiser.time_embedding.linear_2": LokrChange(
                {"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(2, 2)}
            ),
            "denoiser.mid_block.resnets.0.conv1": DoraChange(factors(6, 5), torch.ones(6)),
            "denoiser.conv_norm_out": DiffChange({"diff": torch.ones(6)}),
        },
    )
    path = tmp_path_factory.mktemp("whole") / "lora.safetensors"
    save_lora(path, lora)
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def mutated(tensors: dict[str, Tensor], dice: random.Random) -> dict[str, Tensor]:
    """One to four tensors renamed, removed, reshaped, retyped, spoilt or added."""
    changed = dict(tensors)
    for _ in range(dice.randint(1, 4)):
        key = dice.choice(sorted(changed))
        module = key.rsplit(".", 2 if key.endswith("weight") else 1)[0]
        what = dice.choice(["rename", "remove", "reshape", "spoil", "add", "move"])
        if what == "remove" and len(changed) > 1:
            del changed[key]
        elif what == "rename":
            changed[f"{module}.{dice.choice(ENDS)}"] = changed.pop(key)
        elif what == "move":
            prefix = dice.choice(["lora_unet_x", "base_model.model.x", "diffusion_model.x", "x"])
            changed[f"{prefix}.{dice.choice(ENDS)}"] = changed.pop(key)
        elif what == "reshape":
            changed[key] = torch.ones(dice.choice(SHAPES)).to(dice.choice(DTYPES))
        elif what == "spoil" and changed[key].is_floating_point():
            changed[key] = torch.full_like(
                changed[key].float(), dice.choice([float("nan"), float("inf"), 3e38])
            )
        else:
            changed[f"{module}.{dice.choice(ENDS)}"] = torch.ones(dice.choice(SHAPES))
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_file_is_a_lora_or_an_error_of_one_line(
    seed: int, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    dice, path = random.Random(seed), tmp_path / "lora.safetensors"
    refusals: list[str] = []
    for _ in range(60):
        save_file(mutated(tensors, dice), path)
        try:
            lora = load_lora(path)
            parse_names(lora)
            for name in lora.changes:
                lora.changes[name].delta(torch.ones(lora.shape_of(name)))
            with open_lora(path, check_finite=False) as opened:
                assert opened.names == lora.names
        except SigmascopeError as error:
            refusals.append(str(error))
    assert refusals
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lora_unet_a.alpha": torch.tensor(torch.nan)}, "alpha is nan"),
        ({"lora_unet_a.alpha": torch.tensor(torch.inf)}, "alpha is inf"),
        ({"lora_unet_a.lora_A.weight": torch.ones(2, 4)}, "are the same tensor of lora_unet_a"),
    ],
)
def test_a_refusal_says_the_next_step(extra: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    state = {"lora_unet_a.lora_down.weight": torch.ones(2, 4), "lora_unet_a.lora_up.weight": torch.ones(4, 2)}
    save_file(state | extra, tmp_path / "lora.safetensors")
    with pytest.raises(SigmascopeError, match=said) as refused:
        load_lora(tmp_path / "lora.safetensors")
    assert refused.value.hint
