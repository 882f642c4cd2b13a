"""Backbones of SDXL's shape with random weights, as a diffusers folder and as a single file."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor

from sigmascope.checkpoints import StreamingWriter, open_checkpoint
from sigmascope.lbm.config import LbmConfig
from sigmascope.lora.layer_names import SDXL_BLOCKS, to_sgm

SMALL: dict[str, Any] = {"block_out_channels": [64, 128, 256], "attention_head_dim": [2, 4, 8]}
_TEXT = {
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def make_folder(folder: Path, config: LbmConfig, dtype: torch.dtype, seed: int = 0) -> int:
    """Write `unet` and `vae`, a tensor at a time.

    Returns:
        The UNet's number of parameters: 2,567,463,684 at full size.
    """
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for part, model in models(config).items():
        (folder / part).mkdir(parents=True)
        model.save_config(str(folder / part))
        count = count or sum(weight.numel() for weight in model.parameters())
        path = folder / part / "diffusion_pytorch_model.safetensors"
        with StreamingWriter(path, {"format": "pt"}) as writer:
            for key, tensor in model.state_dict().items():
                values = torch.empty(tensor.shape, dtype=dtype).normal_(0, 0.02, generator=generator)
                writer.write(key, values)
    return count


def models(config: LbmConfig) -> dict[str, UNet2DConditionModel | AutoencoderKL]:
    """The UNet and the VAE that an LBM of this config begins as, without memory."""
    unet, vae = config.denoiser, config.vae
    with torch.device("meta"):
        return {
            "unet": UNet2DConditionModel(
                in_channels=config.vae_num_channels,
                out_channels=config.vae_num_channels,
                block_out_channels=unet.block_out_channels,
                down_block_types=unet.down_block_types,
                up_block_types=unet.up_block_types,
                layers_per_block=unet.layers_per_block,
                transformer_layers_per_block=unet.transformer_layers_per_block,
                attention_head_dim=unet.attention_head_dim,
                use_linear_projection=True,
                **_TEXT,
            ),
            "vae": AutoencoderKL(
                block_out_channels=vae.block_out_channels,
                layers_per_block=vae.layers_per_block,
                latent_channels=vae.latent_channels,
                down_block_types=["DownEncoderBlock2D"] * len(vae.block_out_channels),
                up_block_types=["UpDecoderBlock2D"] * len(vae.block_out_channels),
            ),
        }


def make_single_file(folder: Path, path: Path) -> None:
    """Write a folder's weights as SDXL's single files name them (the VAE's projections as 1×1 convolutions)."""
    with open_checkpoint(folder / "unet") as unet, StreamingWriter(path, {"format": "pt"}) as writer:
        for key in unet:
            module, _, kind = key.rpartition(".")
            writer.write(f"model.diffusion_model.{to_sgm(module, SDXL_BLOCKS)}.{kind}", unet.tensor(key))
        depth = len(json.loads((folder / "vae" / "config.json").read_text())["block_out_channels"])
        with open_checkpoint(folder / "vae") as vae:
            for key in vae:
                name, tensor = _vae_name(key, depth), vae.tensor(key)
                writer.write(f"first_stage_model.{name}", _as_convolution(name, tensor))


def _as_convolution(name: str, tensor: Tensor) -> Tensor:
    return tensor[:, :, None, None] if ".attn_1." in name and tensor.dim() == 2 else tensor


def _vae_name(key: str, depth: int) -> str:
    side, _, rest = key.partition(".")
    pieces = rest.split(".")
    if pieces[0] in ("down_blocks", "up_blocks"):
        number = int(pieces[1]) if pieces[0] == "down_blocks" else depth - 1 - int(pieces[1])
        start = f"{pieces[0].removesuffix('_blocks')}.{number}"
        inner = {"resnets": f"block.{pieces[3]}", "downsamplers": "downsample", "upsamplers": "upsample"}
        return f"{side}.{start}.{inner[pieces[2]]}.{'.'.join(pieces[4:]).replace('conv_shortcut', 'nin_shortcut')}"
    if pieces[0] == "mid_block" and pieces[1] == "resnets":
        return f"{side}.mid.block_{int(pieces[2]) + 1}.{'.'.join(pieces[3:])}"
    if pieces[0] == "mid_block":
        name = ".".join(pieces[3:-1])
        known = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
        return f"{side}.mid.attn_1.{known[name]}.{pieces[-1]}"
    return key.replace("conv_norm_out", "norm_out")
