"""kohya's starts of text encoders before dotted paths, as a trainer of FLUX wrote them (ComfyUI's issue 4439)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmascope import convert_lora
from sigmascope.errors import LoraFormatError
from sigmascope.lora.hosts import host_readings

LAYER = "text_model.encoder.layers.0.self_attn.q_proj"
TEXT, IMAGE = f"lora_te1.{LAYER}", "lora_unet_double_blocks_0_img_attn_proj"


def test_they_are_text_encoders_that_no_host_finds_until_they_are_converted(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    up, down = torch.randn(768, 2, generator=random), torch.randn(2, 768, generator=random)
    state = {f"{TEXT}.lora_A.weight": down, f"{TEXT}.lora_B.weight": up}
    state |= {
        f"{IMAGE}.lora_down.weight": torch.ones(2, 3072),
        f"{IMAGE}.lora_up.weight": torch.ones(3072, 2),
    }
    file, target = tmp_path / "lora.safetensors", tmp_path / "new.safetensors"
    save_file(state, file)
    for reading in host_readings(file):
        assert reading.encoders is not None
        assert (reading.taken, reading.modules) == (1, 1)
        assert (reading.encoders.taken, reading.encoders.modules) == (0, 1)
    convert_lora(file, target, "kohya")
    kohya = load_file(target)
    name = f"lora_te1_{LAYER.replace('.', '_')}"
    product = kohya[f"{name}.lora_up.weight"].double() @ kohya[f"{name}.lora_down.weight"].double()
    scale = float(kohya[f"{name}.alpha"]) / 2
    torch.testing.assert_close(product * scale, up.double() @ down.double(), atol=1e-6, rtol=1e-6)
    assert not any("lora_unet_lora_te1" in key for key in kohya)


# As diffusers' own loader takes them; `tests/lora/test_hosts_loaders.py` holds all of this to it.
TAKEN_BY_DIFFUSERS = [
    ("kohya", ["self_attn.q_proj"], (0, 0)),
    ("kohya", ["self_attn.q_proj", "mlp.fc1"], (1, 1)),
    ("kohya", ["self_attn.q_proj", "self_attn.out_proj"], (1, 2)),
    ("comfyui", ["self_attn.q_proj", "mlp.fc1"], (1, 1)),
    ("peft", ["self_attn.q_proj", "mlp.fc1"], (1, 2)),
]


@pytest.mark.parametrize(("format", "layers", "taken"), TAKEN_BY_DIFFUSERS)
def test_diffusers_knows_names_of_an_encoder_by_some_of_its_layers_only(
    format: str, layers: list[str], taken: tuple[int, int], tmp_path: Path
) -> None:
    file, target = file_for_clip(layers, tmp_path), tmp_path / "new.safetensors"
    convert_lora(file, target, format)
    diffusers, comfyui, _ = host_readings(target)
    assert diffusers.encoders is not None
    assert comfyui.encoders is not None
    assert (diffusers.taken, diffusers.encoders.taken) == taken
    assert (comfyui.taken, comfyui.encoders.taken) == (1, len(layers))


def test_names_that_diffusers_would_refuse_are_not_written(tmp_path: Path) -> None:
    file, target = file_for_clip(["mlp.fc1"], tmp_path), tmp_path / "new.safetensors"
    with pytest.raises(
        LoraFormatError, match="diffusers would take none of its 2 modules in the peft format"
    ):
        convert_lora(file, target, "peft")
    assert not target.exists()


def file_for_clip(layers: list[str], folder: Path) -> Path:
    """kohya's file with these layers of CLIP's first block, and one of the denoiser."""
    widths = {"mlp.fc1": 3072}
    modules = {f"lora_te1_text_model_encoder_layers_0_{layer.replace('.', '_')}": layer for layer in layers}
    state = {f"{name}.lora_down.weight": torch.ones(2, 768) for name in modules}
    state |= {
        f"{name}.lora_up.weight": torch.ones(widths.get(layer, 768), 2) for name, layer in modules.items()
    }
    state |= {
        f"{IMAGE}.lora_down.weight": torch.ones(2, 3072),
        f"{IMAGE}.lora_up.weight": torch.ones(3072, 2),
    }
    file = folder / "lora.safetensors"
    save_file(state, file)
    return file
