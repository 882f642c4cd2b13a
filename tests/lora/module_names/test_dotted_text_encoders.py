"""kohya's starts of text encoders before dotted paths, as a trainer of FLUX wrote them (ComfyUI's issue 4439)."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sigmascope import convert_lora
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
