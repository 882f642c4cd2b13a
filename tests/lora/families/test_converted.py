"""A LoRA in a family's original names becomes diffusers' by name, order and halves, as diffusers converts weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.families.small_models import small
from tests.lora.families.test_names_of_models import CONVERSIONS, Lenient, original_shape, rows_of
from torch import Tensor

from sigmascope import convert_lora, merge_into_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lora.families import FAMILIES, row_of_diffusers
from sigmascope.lora.hosts import host_readings
from sigmascope.lora.reader import load_lora

NAMES = ("auraflow", "cosmos", "flux2", "ideogram4", "krea2", "ltx2", "mochi", "sana", "z_image")
STARTS = ("diffusion_model.", "lora_unet_")


def lora_in_original_names(name: str, start: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A LoRA of the first blocks, and its change of each original weight."""
    generator = torch.Generator().manual_seed(0)
    linears = {path for path, module in small(name).named_modules() if isinstance(module, torch.nn.Linear)}
    lora: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for row in rows_of(name):
        if row.parts[0] not in linears or ".0." not in row.parts[0]:
            continue
        outputs, inputs = original_shape(name, row)
        down, up = (torch.randn(shape, generator=generator) for shape in ((2, inputs), (outputs, 2)))
        path = start + (row.original.replace(".", "_") if start.endswith("_") else row.original)
        lora |= {f"{path}.lora_down.weight": down, f"{path}.lora_up.weight": up}
        changes[f"{row.original}.weight"] = up @ down
    return lora, changes


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_in_original_names_becomes_diffusers(name: str, start: str, tmp_path: Path) -> None:
    lora, changes = lora_in_original_names(name, start)
    save_file(lora, tmp_path / "in.safetensors", {"modelspec.architecture": FAMILIES[name].architecture})
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "peft")
    converted = CONVERSIONS[name](Lenient(changes))
    made = {
        path: factors.up @ factors.down * factors.scale
        for path, factors in load_lora(tmp_path / "out.safetensors").modules.items()
    }
    assert len(made) >= len(changes) >= 5
    for path, change in made.items():
        torch.testing.assert_close(change, converted[path.removeprefix("transformer.") + ".weight"], msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_in_original_names_is_merged_into_diffusers_model(name: str, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(small(name)).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    model.save_pretrained(tmp_path / "model")
    lora, changes = lora_in_original_names(name, "diffusion_model.")
    save_file(lora, tmp_path / "lora.safetensors")
    merge_into_checkpoint(
        [tmp_path / "lora.safetensors"], tmp_path / "model", tmp_path / "merged.safetensors"
    )
    before = load_file(tmp_path / "model" / "diffusion_pytorch_model.safetensors")
    after = load_file(tmp_path / "merged.safetensors")
    converted = CONVERSIONS[name](Lenient(changes))
    for key, weight in before.items():
        change = converted.get(key)
        if change is None or change.shape != weight.shape:
            change = torch.zeros_like(weight)
        torch.testing.assert_close(after[key] - weight, change, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("only", ["", "_k"], ids=["all", "keys alone"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_of_diffusers_becomes_the_originals(name: str, only: str, tmp_path: Path) -> None:
    """Parts of a fused layer that are not in the file stay unchanged; they may be wider than the layer's inputs."""
    generator = torch.Generator().manual_seed(0)
    lora: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for path, module in small(name).named_modules():
        has_row = row_of_diffusers(name, path) is not None
        if isinstance(module, torch.nn.Linear) and has_row and ".0." in path and only in path:
            down, up = (
                torch.randn(shape, generator=generator)
                for shape in ((2, module.in_features), (module.out_features, 2))
            )
            lora |= {f"transformer.{path}.lora_A.weight": down, f"transformer.{path}.lora_B.weight": up}
            changes[f"{path}.weight"] = up @ down
    header = {"modelspec.architecture": FAMILIES[name].architecture}
    save_file(lora, tmp_path / "in.safetensors", header)
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui")
    originals = {
        path.removeprefix("diffusion_model.") + ".weight": factors.up @ factors.down * factors.scale
        for path, factors in load_lora(tmp_path / "out.safetensors").modules.items()
    }
    converted = CONVERSIONS[name](Lenient(originals))
    assert changes
    for key, change in changes.items():
        torch.testing.assert_close(converted[key], change, msg=key)


def test_the_queries_apart_of_hunyuanvideo_1_5_become_fused(tmp_path: Path) -> None:
    """As musubi-tuner trains them; ComfyUI's model has `img_attn.qkv` alone."""
    lora: dict[str, Tensor] = {}
    for letter in "qkv":
        name = f"lora_unet_double_blocks_3_img_attn_{letter}"
        lora |= {
            f"{name}.lora_down.weight": torch.randn(2, 2048),
            f"{name}.lora_up.weight": torch.randn(2048, 2),
        }
    save_file(lora, tmp_path / "in.safetensors")
    readings = host_readings(tmp_path / "in.safetensors")
    assert [reading.taken for reading in readings] == [0, 0, None]
    assert (
        readings[0]
        .unavailable["loader"]
        .startswith("diffusers' pipelines of HunyuanVideo 1.5 have no load_lora")
    )
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui")
    (name, factors), *others = load_lora(tmp_path / "out.safetensors").modules.items()
    assert name == "diffusion_model.double_blocks.3.img_attn.qkv"
    assert others == []
    changes = [
        lora[f"lora_unet_double_blocks_3_img_attn_{letter}.lora_up.weight"]
        @ lora[f"lora_unet_double_blocks_3_img_attn_{letter}.lora_down.weight"]
        for letter in "qkv"
    ]
    torch.testing.assert_close(factors.up @ factors.down * factors.scale, torch.cat(changes))


def test_families_alike_are_named(tmp_path: Path) -> None:
    name = "transformer.transformer_blocks.0.attn1.to_q"
    lora = {f"{name}.lora_A.weight": torch.zeros(2, 1152), f"{name}.lora_B.weight": torch.zeros(1152, 2)}
    save_file(lora, tmp_path / "in.safetensors")
    with pytest.raises(ConfigError, match="its names and shapes fit PixArt and Sana"):
        convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "comfyui")
