"""SDXL in small: a UNet that takes text and SDXL's added embedding, and a VAE."""

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel


def sdxl_models(
    denoiser: dict[str, Any], vae: dict[str, Any], *, text_width: int
) -> tuple[UNet2DConditionModel, AutoencoderKL]:
    """Make both with random weights, always the same.

    Args:
        denoiser: As the YAML of an LBM has it.
        vae: Likewise; two levels.
        text_width: What the cross attention takes.
    """
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        cross_attention_dim=text_width,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64,
        **denoiser,
    )
    decoder = AutoencoderKL(
        latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        **vae,
    )
    return unet, decoder
