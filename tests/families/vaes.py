"""The VAEs of diffusers at small size: of images at half the size, of videos at an eighth as in the full models."""

from typing import Any

import torch
from tests.families.weights import built, copied
from torch import Tensor, nn


@copied
def image_vae(latent_channels: int = 4) -> nn.Module:
    """AutoencoderKL of two levels: latents of half the image's height and width."""
    from diffusers import AutoencoderKL

    return built(
        lambda: AutoencoderKL(
            latent_channels=latent_channels,
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=32,
            # FLUX and SD3 leave both out
            use_quant_conv=latent_channels == 4,
            use_post_quant_conv=latent_channels == 4,
            shift_factor=None if latent_channels == 4 else 0.0609,
        )
    )


@copied
def video_vae(*, qwen: bool = False) -> nn.Module:
    """AutoencoderKLWan or Qwen-Image's: 16 channels, an eighth in space, a fourth in time."""
    from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

    kind = AutoencoderKLQwenImage if qwen else AutoencoderKLWan
    return built(lambda: kind(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1))


def three_level_vae(*, attention: bool = True, seed: int = 0) -> Any:
    """AutoencoderKL with latents of a quarter of the image's height and width, and group norms on all levels."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    return AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=8,
        mid_block_add_attention=attention,
    ).eval()


def parameters(vae: Any, pixels: Tensor) -> Tensor:
    """Mean and logarithm of the variance of the latent's distribution."""
    made: Tensor = vae.encode(pixels).latent_dist.parameters
    return made


def pixels_of(vae: Any, latent: Tensor) -> Tensor:
    """What the latent is decoded to."""
    made: Tensor = vae.decode(latent).sample
    return made


def relative_error(tiled: Tensor, direct: Tensor) -> float:
    """Norm of the difference by the norm of what was made at once."""
    return float((tiled - direct).norm() / direct.norm())
