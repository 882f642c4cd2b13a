"""A LoRA in a family's original names becomes diffusers' by name, order and halves, as diffusers converts weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.lora.families.small_models import family_of, small
from tests.lora.families.test_names_of_models import CONVERSIONS, Lenient, original_shape, rows_of
from torch import Tensor

from sigmascope import convert_lora
from sigmascope.errors import ConfigError
from sigmascope.lora.families import FAMILIES, row_of_diffusers
from sigmascope.lora.hosts import host_readings
from sigmascope.lora.reader import load_lora

NAMES = ("auraflow", "cosmos", "flux2", "ltx2", "mochi", "sana", "z_image")
STARTS = ("diffusion_model.", "lora_unet_")


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_in_original_names_becomes_diffusers(name: str, start: str, tmp_path: Path) -> None:
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
    save_file(
        lora, tmp_path / "in.safetensors", {"modelspec.architecture": FAMILIES[family_of(name)].architecture}
    )
    convert_lora(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "peft")
    converted = CONVERSIONS[name](Lenient(changes))
    made = {
        path: factors.up @ factors.down * factors.scale
        for path, factors in load_lora(tmp_path / "out.safetensors").modules.items()
    }
    assert len(made) >= len(changes) >= 5
    for path, change in made.items():
        torch.testing.assert_close(change, converted[path.removeprefix("transformer.") + ".weight"], msg=path)


@pytest.mark.parametrize("only", ["", "_k"], ids=["all", "keys alone"])
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_of_diffusers_becomes_the_originals(name: str, only: str, tmp_path: Path) -> None:
    """Parts of a fused layer that are not in the file stay unchanged; they may be wider than the layer's inputs."""
    generator = torch.Generator().manual_seed(0)
    lora: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for path, module in small(name).named_modules():
        has_row = row_of_diffusers(family_of(name), path) is not None
        if isinstance(module, torch.nn.Linear) and has_row and ".0." in path and only in path:
            down, up = (
                torch.randn(shape, generator=generator)
                for shape in ((2, module.in_features), (module.out_features, 2))
            )
            lora |= {f"transformer.{path}.lora_A.weight": down, f"transformer.{path}.lora_B.weight": up}
            changes[f"{path}.weight"] = up @ down
    header = {"modelspec.architecture": FAMILIES[family_of(name)].architecture}
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
    assert [reading.taken for reading in host_readings(tmp_path / "in.safetensors")] == [None, 0, None]
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
