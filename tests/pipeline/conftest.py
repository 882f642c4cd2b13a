"""Real VAEs of diffusers at small size, with weights made here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.pipeline.warm_pipelines import clock, sd15
from torch import Tensor, nn

__all__ = ["clock", "sd15"]  # fixtures

FOUR = (8, 8, 8, 8)
DOWN, UP = ("DownEncoderBlock2D",), ("UpDecoderBlock2D",)


def _kl(d: Any, **options: Any) -> Any:
    widths = {"block_out_channels": FOUR, "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 32}
    blocks = {"down_block_types": DOWN * 4, "up_block_types": UP * 4}
    return d.AutoencoderKL(**widths, **blocks, latent_channels=4, **options)


def _tiny(d: Any) -> Any:
    ones = (1, 1, 1, 1)
    return d.AutoencoderTiny(
        encoder_block_out_channels=FOUR,
        decoder_block_out_channels=FOUR,
        num_encoder_blocks=ones,
        num_decoder_blocks=ones,
    )


def _vq(d: Any) -> Any:
    blocks = {"down_block_types": DOWN * 2, "up_block_types": UP * 2, "block_out_channels": (8, 16)}
    return d.VQModel(**blocks, norm_num_groups=4, latent_channels=3, num_vq_embeddings=16)


def _dc(d: Any) -> Any:
    blocks = ("ResBlock", "EfficientViTBlock")
    pairs = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in {
        "block_types": blocks, "block_out_channels": (8, 8), "qkv_multiscales": ((), (5,)), "layers_per_block": (1, 1),
    }.items()}  # fmt: skip
    return d.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        downsample_block_type="pixel_unshuffle",
        upsample_block_type="pixel_shuffle",
        **pairs,
    )


def _svd(d: Any) -> Any:
    widths = {"block_out_channels": (32, 32), "down_block_types": DOWN * 2, "layers_per_block": 1}
    return d.AutoencoderKLTemporalDecoder(**widths, latent_channels=4)


_CAUSAL = {
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
_VIDEO = {"block_out_channels": FOUR, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}


def _wan22(d: Any) -> Any:
    patches = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
    scales = {"scale_factor_spatial": 16, "scale_factor_temporal": 4}
    return d.AutoencoderKLWan(base_dim=8, decoder_base_dim=8, **patches, **scales, **_CAUSAL)


def _ltx(d: Any) -> Any:
    ones = (1, 1, 1, 1, 1)
    return d.AutoencoderKLLTXVideo(
        block_out_channels=FOUR,
        decoder_block_out_channels=FOUR,
        layers_per_block=ones,
        decoder_layers_per_block=ones,
        latent_channels=8,
    )


MAKERS: dict[str, Callable[[Any], Any]] = {
    "AutoencoderKL": _kl,
    "AutoencoderTiny": _tiny,
    "VQModel": _vq,
    "AutoencoderDC": _dc,
    "AutoencoderKLTemporalDecoder": _svd,
    "AutoencoderKLWan": lambda d: d.AutoencoderKLWan(base_dim=4, **_CAUSAL),
    "AutoencoderKLWan 2.2": _wan22,
    "AutoencoderKLQwenImage": lambda d: d.AutoencoderKLQwenImage(base_dim=4, **_CAUSAL),
    "AutoencoderKLCogVideoX": lambda d: d.AutoencoderKLCogVideoX(**_VIDEO),
    "AutoencoderKLHunyuanVideo": lambda d: d.AutoencoderKLHunyuanVideo(**_VIDEO),
    "AutoencoderKLLTXVideo": _ltx,
}
VIDEO_VAES = tuple(MAKERS)[5:]

_made: dict[str, nn.Module] = {}


@dataclass(frozen=True)
class Sample:
    """A real VAE, pictures that it takes, and what diffusers itself makes of them."""

    name: str
    vae: Any
    pixels: Tensor
    latent: Tensor

    @property
    def is_video(self) -> bool:
        return self.name in VIDEO_VAES

    @torch.no_grad()
    def decoded(self) -> Tensor:
        """What diffusers decodes the latent to."""
        counted = {"num_frames": len(self.latent)} if "Temporal" in self.name else {}
        return self.vae.decode(self.latent, **counted).sample  # type: ignore[no-any-return]


def _made_once(name: str) -> Any:
    """Every test leaves it as it was, which is what they test."""
    import diffusers

    if name not in _made:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _made[name] = MAKERS[name](diffusers).eval().requires_grad_(False)
    return _made[name]


@torch.no_grad()
def _mode(vae: Any, pixels: Tensor) -> Tensor:
    output = vae.encode(pixels)
    if hasattr(output, "latent_dist"):
        return output.latent_dist.mode()  # type: ignore[no-any-return]
    return output.latents if hasattr(output, "latents") else output.latent  # type: ignore[no-any-return]


def _sample(name: str) -> Sample:
    vae = _made_once(name)
    over_time = (5,) if name in VIDEO_VAES else ()
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 3, *over_time, 32, 64, generator=generator) * 2 - 1
    return Sample(name, vae, pixels, _mode(vae, pixels))


@pytest.fixture(params=tuple(MAKERS))
def sample(request: pytest.FixtureRequest) -> Sample:
    """Each VAE that is known."""
    return _sample(request.param)


@pytest.fixture
def kl() -> Sample:
    """An AutoencoderKL: a spatial factor of 8, a distribution to draw from."""
    return _sample("AutoencoderKL")


@pytest.fixture
def wan() -> Sample:
    """An AutoencoderKLWan: factors of 8 in space and 4 in time, the first frame apart."""
    return _sample("AutoencoderKLWan")


@pytest.fixture
def qwen() -> Sample:
    """An AutoencoderKLQwenImage: an axis for frames, and pictures."""
    return _sample("AutoencoderKLQwenImage")
