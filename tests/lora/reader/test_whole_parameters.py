"""Changes of parameters that are no layer's: the modulation of WAN's blocks, and the norms of BFL's control LoRAs of FLUX."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora.wild.models import single_file, tiny

from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.hosts import host_readings


def folder_of(family: str, folder: Path) -> Path:
    tiny(family).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize("form", ["folder", "single file"])
def test_the_difference_of_a_modulation_is_added(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    change, of_head = torch.randn(1, 6, 24), torch.randn(1, 2, 24)
    file, merged = tmp_path / "lora.safetensors", tmp_path / "merged.safetensors"
    save_file({"diffusion_model.blocks.0.diff_m": change, "diffusion_model.head.diff_m": of_head}, file)
    if form == "folder":
        into, before = folder_of("wan", tmp_path / "wan"), tiny("wan").state_dict()
        keys = ("blocks.0.scale_shift_table", "scale_shift_table")
    else:
        into, before = tmp_path / "wan.safetensors", dict(single_file("wan"))
        before["blocks.0.modulation"] = torch.randn(1, 6, 24)
        save_file(before, into)
        keys = ("blocks.0.modulation", "head.modulation")
    merge_into_checkpoint([file], into, merged)
    after = load_file(merged)
    for key, wanted in zip(keys, (change, of_head), strict=True):
        torch.testing.assert_close(after[key] - before[key], wanted)
    assert {reading.taken for reading in host_readings(file)} == {0}
    convert_lora(file, tmp_path / "comfy.safetensors", "comfyui", family="wan")
    converted = load_file(tmp_path / "comfy.safetensors")
    assert torch.equal(converted["diffusion_model.blocks.0.modulation.diff"], change)


@pytest.mark.parametrize("form", ["folder", "single file"])
def test_a_norm_of_a_control_lora_takes_the_weights_place(form: str, tmp_path: Path) -> None:
    scale, name = torch.rand(8) + 1.0, "double_blocks.0.img_attn.norm.key_norm.scale"
    factors = {"lora_A.weight": torch.randn(2, 6), "lora_B.weight": torch.randn(16, 2)}
    file, merged = tmp_path / "lora.safetensors", tmp_path / "merged.safetensors"
    save_file({f"img_in.{end}": one for end, one in factors.items()} | {name: scale}, file)
    if form == "folder":
        into, key = folder_of("flux", tmp_path / "flux"), "transformer_blocks.0.attn.norm_k.weight"
    else:
        into, key = tmp_path / "flux.safetensors", name
        save_file(single_file("flux") | {name: torch.ones(8)}, into)
    report = merge_into_checkpoint([file], into, merged)
    assert not report.unused_keys
    torch.testing.assert_close(load_file(merged)[key], scale)
