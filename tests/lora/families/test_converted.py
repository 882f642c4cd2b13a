"""A LoRA in a family's original names becomes diffusers' by name, order and halves, as diffusers converts weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.lora.families.small_models import small
from tests.lora.families.test_names_of_models import CONVERSIONS, Lenient, family_of, original_shape, rows_of
from torch import Tensor

from sigmascope import convert_lora
from sigmascope.lora.families import FAMILIES
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
