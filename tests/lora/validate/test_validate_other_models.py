"""Validation against what diffusers itself does with a LoRA, on a model of another family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.pairs import PairOptions
from sigmascope.lora.validate import validate_lora


def unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=8,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ and tuned/ as diffusers saves them, tuned being base with a LoRA that PEFT fused; and that LoRA."""
    place = tmp_path_factory.mktemp("diffusers")
    model = unet()
    model.save_pretrained(place / "base" / "unet")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "proj_in", "ff.net.2"]
    model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False))
    model.save_lora_adapter(place / "lora")
    model.fuse_lora()
    model.unload_lora()
    model.save_pretrained(place / "tuned" / "unet")
    return place


def lora_file(folder: Path) -> Path:
    (path,) = (folder / "lora").glob("*.safetensors")
    return path


def test_a_lora_that_diffusers_fused_is_found_to_be_the_whole_change(folder: Path) -> None:
    report = validate_lora(folder / "base" / "unet", folder / "tuned" / "unet", lora_file(folder))
    assert (report.success_rate, report.band) == (100.0, "excellent")
    assert len(report.modules) > 20
    assert report.worst[0].relative_error is not None
    assert report.worst[0].relative_error < 1e-5


def test_kohya_s_names_are_found_in_a_diffusers_folder(folder: Path, tmp_path: Path) -> None:
    flat: dict[str, Any] = {}
    for key, value in load_file(lora_file(folder)).items():
        module, end = key.removeprefix("unet.").split(".lora_")
        name = "lora_unet_" + module.replace(".", "_")
        flat[f"{name}.lora_{'down' if end[0] == 'A' else 'up'}.weight"] = value
        flat[f"{name}.alpha"] = torch.tensor(6.0)  # PEFT's scale: alpha / r = 2
    save_file(flat, tmp_path / "kohya.safetensors")
    report = validate_lora(
        folder / "base" / "unet", folder / "tuned" / "unet", tmp_path / "kohya.safetensors"
    )
    assert report.success_rate == 100.0
    assert report.relative_error is not None
    assert report.relative_error < 1e-5


def test_blocks_are_those_of_the_network(folder: Path) -> None:
    report = validate_lora(folder / "base" / "unet", folder / "tuned" / "unet", lora_file(folder))
    assert [block.name for block in report.blocks] == [
        "down_blocks.0",
        "down_blocks.1",
        "mid_block",
        "up_blocks.0",
        "up_blocks.1",
    ]


def text_pair(place: Path, *, lora: dict[str, torch.Tensor]) -> tuple[Path, Path, Path]:
    """A single file with a U-Net and a text encoder, in which one layer of each changed by 1."""
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    state = {f"unet.{key}": value for key, value in unet().state_dict().items()}
    state[f"{layer}.weight"] = torch.zeros(4, 4)
    changed = ("unet.conv_out.weight", f"{layer}.weight")
    tuned = {key: value + 1.0 if key in changed else value for key, value in state.items()}
    paths = place / "base.safetensors", place / "tuned.safetensors", place / "lora.safetensors"
    for path, tensors in zip(paths, (state, tuned, lora), strict=True):
        save_file(tensors, path)
    return paths


TEXT_LORA = {
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight": torch.ones(4, 1),
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": torch.full((1, 4), 0.75),
    "lora_unet_conv_out.diff": torch.ones(4, 16, 3, 3),
}


def test_text_encoders_that_the_lora_changes_are_compared_too(tmp_path: Path) -> None:
    report = validate_lora(*text_pair(tmp_path, lora=TEXT_LORA))
    errors = {module.block: module.relative_error for module in report.modules}
    assert errors == {"text_encoder.0": pytest.approx(0.25), "conv_out": pytest.approx(0.0, abs=1e-6)}
    assert (report.success_rate, report.findings) == (100.0, ())


def test_a_text_encoder_that_changed_without_the_lora_is_told(tmp_path: Path) -> None:
    lora = {"lora_unet_conv_out.diff": torch.ones(4, 16, 3, 3)}
    report = validate_lora(*text_pair(tmp_path, lora=lora))
    assert report.success_rate == 100.0
    assert [finding.id for finding in report.findings] == ["lora.other_parts_changed"]
    whole = validate_lora(*text_pair(tmp_path, lora=lora), PairOptions(parts=("denoiser", "text_encoder")))
    assert [failure.status for failure in whole.failures] == ["missing"]


def test_an_unknown_model_works_by_its_own_keys(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(6, 2, generator=generator), torch.randn(2, 9, generator=generator)
    base = {"net.7.fc.weight": torch.zeros(6, 9), "net.7.fc.bias": torch.zeros(6)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(base | {"net.7.fc.weight": up @ down}, tmp_path / "tuned.safetensors")
    save_file(
        {"net.7.fc.lora_up.weight": up, "net.7.fc.lora_down.weight": down}, tmp_path / "lora.safetensors"
    )
    base_path, tuned_path, lora_path = (
        tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "lora")
    )
    report = validate_lora(base_path, tuned_path, lora_path)
    assert (report.success_rate, report.band) == (100.0, "excellent")


def test_a_fused_module_is_measured_in_each_layer_that_it_is_of(tmp_path: Path) -> None:
    """FLUX' own files hold query, key and value as one matrix, diffusers as three."""
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(24, 2, generator=generator), torch.randn(2, 8, generator=generator)
    keys = {
        "x_embedder.weight": (8, 4),
        "time_text_embed.text_embedder.linear_1.weight": (8, 4),
        "single_transformer_blocks.0.proj_mlp.weight": (32, 8),
        **{f"transformer_blocks.0.attn.to_{part}.weight": (8, 8) for part in "qkv"},
    }
    base = {key: torch.randn(shape, generator=generator) for key, shape in keys.items()}
    tuned = dict(base)
    for part, rows in zip("qkv", torch.split(up @ down, 8), strict=True):
        key = f"transformer_blocks.0.attn.to_{part}.weight"
        tuned[key] = base[key] + rows
    lora = {"lora_up.weight": up, "lora_down.weight": down}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    save_file({f"{name}.{end}": value for end, value in lora.items()}, tmp_path / "lora.safetensors")
    base_path, tuned_path, lora_path = (
        tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "lora")
    )
    report = validate_lora(base_path, tuned_path, lora_path)
    assert [module.name for module in report.modules] == [
        f"transformer_blocks.0.attn.to_{part}" for part in "kqv"
    ]
    assert (report.success_rate, report.band) == (100.0, "excellent")


def test_a_lora_for_quite_another_model_matches_nothing(folder: Path, tmp_path: Path) -> None:
    save_file(
        {"blocks.0.x.lora_up.weight": torch.ones(4, 1), "blocks.0.x.lora_down.weight": torch.ones(1, 4)},
        tmp_path / "other.safetensors",
    )
    report = validate_lora(
        folder / "base" / "unet", folder / "tuned" / "unet", tmp_path / "other.safetensors"
    )
    assert report.applied == 0
    assert {failure.status for failure in report.failures} == {"missing", "unmatched"}
    with pytest.raises(ModelMismatchError):
        validate_lora(
            folder / "base" / "unet", tmp_path / "other.safetensors", tmp_path / "other.safetensors"
        )
