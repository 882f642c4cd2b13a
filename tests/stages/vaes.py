"""Real VAEs at small size, and ComfyUI's VAE as its code lays it out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_PICTURES = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4}
_BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_WAN = {"base_dim": 3, "dim_mult": [1] * 4, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
_COGVIDEOX = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    "norm_num_groups": 2,
}
_VIDEO = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1}
_TINY = {
    "encoder_block_out_channels": (8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8),
    "num_encoder_blocks": (1, 1, 1),
    "num_decoder_blocks": (1, 1, 1),
}
_LTX = {
    "latent_channels": 8,
    "block_out_channels": (8,) * 4,
    "decoder_block_out_channels": (8,) * 4,
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
}
_MOCHI = {
    "encoder_block_out_channels": (32,) * 4,
    "decoder_block_out_channels": (32,) * 4,
    "latent_channels": 4,
    "layers_per_block": (1,) * 5,
}

VAES: dict[str, tuple[str, dict[str, Any]]] = {
    "kl": ("AutoencoderKL", {**_PICTURES, **_BLOCKS}),
    "vq": ("VQModel", {**_PICTURES, **_BLOCKS, "num_vq_embeddings": 8}),
    "tiny": ("AutoencoderTiny", _TINY),
    "flux2": ("AutoencoderKLFlux2", {**_PICTURES, **_BLOCKS}),
    "wan": ("AutoencoderKLWan", {**_WAN, "z_dim": 16}),
    "wan22": (
        "AutoencoderKLWan",
        {**_WAN, "z_dim": 8, "patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True},
    ),
    "qwen": ("AutoencoderKLQwenImage", {**_WAN, "base_dim": 12, "z_dim": 16}),
    "cogvideox": ("AutoencoderKLCogVideoX", {**_VIDEO, **_COGVIDEOX}),
    "hunyuan": ("AutoencoderKLHunyuanVideo", {**_VIDEO, "norm_num_groups": 4}),
    "ltx": ("AutoencoderKLLTXVideo", _LTX),
    "mochi": ("AutoencoderKLMochi", _MOCHI),
    "magvit": ("AutoencoderKLMagvit", {**_VIDEO, "norm_num_groups": 4}),
}

MakeVae = Callable[[str], nn.Module]


@pytest.fixture(scope="session")
def make_vae() -> MakeVae:
    """A real VAE of diffusers with few channels; one object of each kind."""
    made: dict[str, nn.Module] = {}

    def make(kind: str) -> nn.Module:
        import diffusers

        if kind not in made:
            torch.manual_seed(0)
            class_name, config = VAES[kind]
            made[kind] = getattr(diffusers, class_name)(**config).eval()
        return made[kind]

    return make


@pytest.fixture(scope="session")
def encode_pixels() -> Callable[[nn.Module, Tensor], Tensor]:
    """The latent that a VAE gives, whatever its class calls it."""

    def run(vae: Any, pictures: Tensor) -> Tensor:
        with torch.no_grad():
            output = vae.encode(pictures)
        if hasattr(output, "latent_dist"):
            mean: Tensor = output.latent_dist.mean
            return mean
        latents: Tensor = output.latents
        return latents

    return run


class ComfyVae:
    """ComfyUI's VAE, as far as it tells its shapes: WAN's by default."""

    def __init__(self, *, video: bool = True) -> None:
        self.first_stage_model = nn.Conv3d(3, 16, 1) if video else nn.Conv2d(3, 4, 1)
        self.latent_channels = 16 if video else 4
        self.latent_dim = 3 if video else 2
        self.output_channels = 3
        causal = (lambda frames: max(0, math.floor((frames + 3) / 4)), 8, 8)
        self.downscale_ratio = causal if video else 8
        self.upscale_ratio = (lambda frames: max(0, frames * 4 - 3), 8, 8) if video else 8


@pytest.fixture
def make_comfy_vae() -> type[ComfyVae]:
    return ComfyVae
