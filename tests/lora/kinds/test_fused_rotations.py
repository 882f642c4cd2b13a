"""OFT of a fused matrix of an original file on the parts of a diffusers model, against the rotation of the whole in float64."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.alignment import changed_keys
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.checkpoint_merge import merge_into_checkpoint
from sigmascope.lora.convert import convert_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.reader import load_lora, open_lora

QKV = [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
LINEAR1 = [
    *(f"single_transformer_blocks.0.attn.to_{name}" for name in "qkv"),
    "single_transformer_blocks.0.proj_mlp",
]
Z_QKV = [f"layers.0.attention.to_{name}" for name in "qkv"]
FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 6, "pooled_projection_dim": 10, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)}  # fmt: skip
Z_IMAGE = {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 24, "n_layers": 2,
           "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": 12, "axes_dims": [4, 2, 2],
           "axes_lens": [8, 8, 8]}  # fmt: skip

CASES: dict[str, tuple[str, list[str], str, Any, float | None]] = {
    "peft": ("flux", QKV, "base_model.model.double_blocks.0.img_attn.qkv.oft_R", [(4, 6)], None),
    "peft_z_image": ("z_image", Z_QKV, "base_model.model.layers.0.attention.qkv.oft_R", [(6, 6)], None),
    "rows": ("flux", QKV, "lora_unet_double_blocks_0_img_attn_qkv.oft_blocks", [(12, 4, 4)], None),
    "rows_limited": ("flux", QKV, "lora_unet_double_blocks_0_img_attn_qkv.oft_blocks", [(12, 4, 4)], 1e-2),
    "rows_of_four": ("flux", LINEAR1, "lora_unet_single_blocks_0_linear1.oft_blocks", [(28, 4, 4)], 1e-2),
    "rows_z_image": ("z_image", Z_QKV, "lora_unet_layers_0_attention_qkv.oft_blocks", [(18, 4, 4)], None),
    "kohya": ("flux", LINEAR1, "oft_unet_single_blocks_0_linear1.oft_blocks.", [(4, 4, 4)] * 3 + [(16, 4, 4)], 1e-2),
    "across": ("flux", QKV, "lora_unet_double_blocks_0_img_attn_qkv.oft_blocks", [(2, 24, 24)], None),
}  # fmt: skip


def model_of(family: str, folder: Path) -> Any:
    made: Any = (
        diffusers.FluxTransformer2DModel(**FLUX)
        if family == "flux"
        else diffusers.ZImageTransformer2DModel(**Z_IMAGE)
    )
    made.save_pretrained(folder)
    return made


def on_diagonal(blocks: list[Tensor]) -> Tensor:
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def turned(weight: Tensor, blocks: Tensor, alpha: float | None) -> Tensor:
    """As the papers and LyCORIS have it: rows for square blocks, columns for PEFT's triangles."""
    if blocks.ndim == 2:
        skew = torch.zeros(len(blocks), 4, 4, dtype=torch.float64)
        skew[:, *torch.triu_indices(4, 4, 1)] = blocks.double()
        skew = skew - skew.mT
        eye = torch.eye(4, dtype=torch.float64)
        return weight @ on_diagonal([(eye - q) @ torch.linalg.inv(eye + q) for q in skew]).mT
    skew = blocks.double() - blocks.double().mT
    if alpha is not None:
        skew = skew * min(1.0, alpha * len(weight) / float(skew.norm()))
    eye = torch.eye(skew.shape[-1], dtype=torch.float64)
    return on_diagonal([(eye + q) @ torch.linalg.inv(eye - q) for q in skew]).mT @ weight


@pytest.mark.parametrize("case", CASES)
def test_a_rotation_of_a_fused_matrix_turns_its_parts_as_the_whole(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    family, layers, key, shapes, alpha = CASES[case]
    model = model_of(family, tmp_path / "model")
    weights = {layer: model.get_submodule(layer).weight.detach().double() for layer in layers}
    parts = [torch.randn(shape) * 0.3 for shape in shapes]
    state = {f"{key}{number}" if len(parts) > 1 else key: part for number, part in enumerate(parts)}
    if "oft_R" in key:
        state = {f"{key}.weight": parts[0]}
    if alpha is not None:
        state[f"{key.partition('.oft_blocks')[0]}.alpha"] = torch.tensor(alpha)
    file = tmp_path / "adapter_model.safetensors"
    save_file(state, file)
    if "oft_R" in key:
        settings = {"peft_type": "OFT", "use_cayley_neumann": False}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    if len(parts) > 1:
        whole = torch.cat(
            [turned(weights[layer], part, alpha) for layer, part in zip(layers, parts, strict=True)]
        )
    else:
        whole = turned(torch.cat(list(weights.values())), parts[0], alpha)
    expected = dict(zip(layers, torch.split(whole, [len(w) for w in weights.values()]), strict=True))
    assert all((expected[layer] - weights[layer]).norm() > 1e-2 * weights[layer].norm() for layer in layers)

    for format, rank in (("native", None), ("peft", 9999)):
        made = tmp_path / "made.safetensors"
        report = convert_lora(file, made, format, model=tmp_path / "model", rank=rank)
        assert report.left_out == ()
        with open_lora(made) as lora:
            found = {name.removeprefix("transformer."): name for name in lora.names}
            for layer in layers:
                base = weights[layer].float()
                change = lora.change(found[layer])
                delta = change.delta() if isinstance(change, LoraFactors) else change.delta(base)
                torch.testing.assert_close(base + delta, expected[layer].float(), rtol=1e-4, atol=1e-5)
    merge_into_checkpoint([file], tmp_path / "model", tmp_path / "merged.safetensors")
    with open_checkpoint(tmp_path / "merged.safetensors") as merged, attach_lora(model, load_lora(file)):
        for layer in layers:
            module = model.get_submodule(layer)
            torch.testing.assert_close(
                merged.tensor(f"{layer}.weight"), expected[layer].float(), rtol=1e-4, atol=1e-5
            )
            live = (module(torch.eye(module.in_features)) - (0 if module.bias is None else module.bias)).mT
            torch.testing.assert_close(live, expected[layer].float(), rtol=1e-4, atol=1e-5)


def test_rotations_of_parts_turn_the_rows_of_a_fused_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    triangles = {name: torch.randn(4, 6) * 0.3 for name in ("q", "v")}
    start = "transformer.transformer_blocks.0.attn.to_"
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"{start}{name}.oft_R.weight": part for name, part in triangles.items()}, file)
    settings = {"peft_type": "OFT", "use_cayley_neumann": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    key, weight = "double_blocks.0.img_attn.qkv.weight", torch.randn(48, 16)
    with open_lora(file) as lora:
        changed = changed_keys(lora, [key], ModelLayout("flux", "original", {"denoiser": ""}))
        assert changed.unmatched == ()
        change = changed.change(key)
        assert not isinstance(change, LoraFactors)
        delta = change.delta(weight, torch.float64)
    query, middle, value = torch.split(weight.double(), 16)
    expected = [turned(query, triangles["q"], None), middle, turned(value, triangles["v"], None)]
    torch.testing.assert_close(weight.double() + delta, torch.cat(expected), rtol=1e-9, atol=1e-9)
