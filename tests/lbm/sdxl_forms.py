"""SDXL in small: its kinds of blocks, text wider than the hidden states, an added embedding; in every form."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from tests.sdxl_in_small import sdxl_models
from torch import Tensor

from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lora.layer_names import blocks_of, to_sgm

DENOISER: dict[str, Any] = {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 2],
    "attention_head_dim": [2, 4],
    "norm_num_groups": 8,
}
VAE: dict[str, Any] = {"block_out_channels": [16, 16], "layers_per_block": 1, "norm_num_groups": 8}
REFINER: dict[str, Any] = {
    "block_out_channels": [8, 16, 24, 24],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 2,
    "transformer_layers_per_block": 2,
    "attention_head_dim": [2, 2, 4, 4],
    "norm_num_groups": 4,
}
"""The SDXL refiner's kinds of blocks; its own widths are 384, 768, 1536 and 1536."""
TEXT_WIDTH = 40  # wider than the hidden states, as SDXL's: keys and values are cut

Form = Literal["folder", "sharded", "variant", "safetensors", "ckpt"]


@pytest.fixture(scope="session")
def sdxl_config() -> LbmConfig:
    """An LBM with a mask beside the latent: its first convolution is wider than the backbone's."""
    return parse_config(
        {
            "unet_input_channels": 5,
            "conditioning_masks_keys": ["mask"],
            "resolution": 64,
            "denoiser": DENOISER,
            "vae": VAE,
        }
    )


@pytest.fixture(scope="session")
def sdxl() -> tuple[UNet2DConditionModel, AutoencoderKL]:
    """The models that every form of the backbone holds. Never to be changed."""
    return sdxl_models(DENOISER, VAE, text_width=TEXT_WIDTH)


@pytest.fixture(scope="session")
def sdxl_folder(
    sdxl: tuple[UNet2DConditionModel, AutoencoderKL], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Plain files; never to be changed."""
    folder = tmp_path_factory.mktemp("sdxl")
    for part, model in zip(("unet", "vae"), sdxl, strict=True):
        model.save_pretrained(folder / part)
    return folder


@pytest.fixture
def make_form(
    sdxl: tuple[UNet2DConditionModel, AutoencoderKL], sdxl_folder: Path, tmp_path: Path
) -> Callable[[Form], Path]:
    """Save the same models in another form."""

    def make(form: Form) -> Path:
        path = tmp_path / "backbone"
        if form == "folder":
            return sdxl_folder
        if form in ("sharded", "variant"):
            options: dict[str, Any] = (
                {"max_shard_size": "100KB"} if form == "sharded" else {"variant": "fp16"}
            )
            for part, model in zip(("unet", "vae"), sdxl, strict=True):
                model.save_pretrained(path / part, **options)
            return path
        path = path.with_suffix(f".{form}")
        state = single_file_state(sdxl[0].state_dict(), sdxl[1].state_dict())
        if form == "ckpt":
            torch.save({"state_dict": state}, path)
        else:
            save_file(state, path)
        return path

    return make


@pytest.fixture(scope="session")
def refiner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an SDXL refiner in small: diffusers' folder `unets`, and `refiner.safetensors`."""
    folder = tmp_path_factory.mktemp("refiner")
    unet, vae = sdxl_models(REFINER, VAE, text_width=TEXT_WIDTH)
    unet.save_pretrained(folder / "unets" / "unet")
    vae.save_pretrained(folder / "unets" / "vae")
    state = single_file_state(unet.state_dict(), vae.state_dict())
    state = {key: tensor for key, tensor in state.items() if not key.startswith("conditioner.")}
    for name in ("ln_final.weight", "transformer.resblocks.0.attn.in_proj_weight"):
        state[f"conditioner.embedders.0.model.{name}"] = torch.ones(8)
    save_file(state, folder / "refiner.safetensors")
    return folder


def single_file_state(unet: dict[str, Tensor], vae: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name weights as SDXL's single files do, with some of a text encoder beside them.

    The UNet's names are the project's own table, which knows nothing of diffusers' converter.
    """
    blocks = blocks_of(key.rpartition(".")[0] for key in unet)
    state = {"conditioner.embedders.0.transformer.text_model.final_layer_norm.weight": torch.ones(8)}
    for key, tensor in unet.items():
        module, _, kind = key.rpartition(".")
        name = to_sgm(module, blocks)
        assert name is not None, key
        state[f"model.diffusion_model.{name}.{kind}"] = tensor
    depth = len({key.split(".")[2] for key in vae if key.startswith("decoder.up_blocks.")})
    for key, tensor in vae.items():
        name = vae_name(key, depth)
        projection = re.search(r"attn_1\.(q|k|v|proj_out)\.weight", name)
        state[f"first_stage_model.{name}"] = tensor[:, :, None, None] if projection else tensor
    return {key: tensor.contiguous() for key, tensor in state.items()}


def vae_name(key: str, depth: int) -> str:
    """The name that a VAE's weight has in single files, written out."""
    key = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{depth - 1 - int(match[1])}", key)
    key = re.sub(r"down_blocks\.(\d+)", r"down.\1", key)
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", key)
    for ours, theirs in (
        ("mid_block.attentions.0", "mid.attn_1"),
        ("attn_1.group_norm", "attn_1.norm"),
        ("attn_1.to_q", "attn_1.q"),
        ("attn_1.to_k", "attn_1.k"),
        ("attn_1.to_v", "attn_1.v"),
        ("attn_1.to_out.0", "attn_1.proj_out"),
        ("resnets", "block"),
        ("conv_shortcut", "nin_shortcut"),
        ("downsamplers.0", "downsample"),
        ("upsamplers.0", "upsample"),
        ("conv_norm_out", "norm_out"),
    ):
        key = key.replace(ours, theirs)
    return key
