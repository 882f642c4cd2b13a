"""Tiles that VAEs cut themselves, and ours beside them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from sigmascope import decode_latents, encode_latents


def test_a_vae_that_can_only_work_in_its_own_tiles_keeps_them() -> None:
    """Allegro raises NotImplementedError without."""
    import diffusers

    options = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 32}
    vae = diffusers.AutoencoderKLAllegro(**options).eval().requires_grad_(False)
    vae.enable_tiling()
    pixels = torch.rand(1, 3, 24, 32, 32) * 2 - 1
    latent, _ = encode_latents(vae, pixels, strategies="direct", predict=False)
    assert torch.equal(latent, vae.encode(pixels).latent_dist.mode())


def _minimax_h3() -> Any:
    """diffusers ships it with tiling on; its tiles are made small here, as its layers are."""
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = diffusers.AutoencoderKLMiniMaxH3(
            latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1,
            spatial_downsample_factors=(2, 2, 2), temporal_downsample_factors=(1, 2, 2), norm_num_groups=4,
            decoder_num_layers=1, decoder_num_attention_heads=2, decoder_attention_head_dim=16,
            decoder_num_register_tokens=1,
            latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4,
        ).eval().requires_grad_(False)  # fmt: skip
    assert vae.use_tiling
    vae.tile_sample_min_height = vae.tile_sample_min_width = 32
    vae.tile_sample_min_overlap_height = vae.tile_sample_min_overlap_width = 8
    return vae


@pytest.mark.slow
def test_minimax_h3_s_own_tiles_are_what_directly_means() -> None:
    """deepbeepmeep/Wan2GP#2367: 36.4 dB in its tiles of 256 pixels, 21.5 dB without."""
    vae = _minimax_h3()
    pixels = torch.rand(1, 3, 22, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    theirs = vae.encode(pixels).latent_dist.mode()
    latent, _ = encode_latents(vae, pixels, strategies="direct")
    assert torch.equal(latent, theirs)
    frames, _ = decode_latents(vae, latent, strategies="direct")
    assert torch.equal(frames, vae.decode(theirs).sample)
    vae.disable_tiling()
    assert not torch.equal(latent, vae.encode(pixels).latent_dist.mode())


def _photograph(side: int) -> Tensor:
    """What is large is strong, and what is small is weak, as in photographs."""
    generator = torch.Generator().manual_seed(3)
    scales = {4: 1.0, 16: 0.5, 64: 0.25, side: 0.05}
    parts = (
        strength
        * interpolate(torch.randn(1, 3, size, size, generator=generator), (side, side), mode="bicubic")
        for size, strength in scales.items()
    )
    picture: Tensor = sum(parts, start=torch.zeros(1, 3, side, side))
    return picture / picture.abs().max()


def _noise(side: int) -> Tensor:
    return torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.slow
@pytest.mark.parametrize("picture", [_photograph(192), _noise(192)], ids=["photograph", "noise"])
def test_a_kls_tiles_are_nearer_to_the_whole_than_diffusers_own(picture: Tensor) -> None:
    """Tiles of one size that overlap by a quarter; both ways, group norms and attention included."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        }
        vae = AutoencoderKL(**blocks, block_out_channels=(16, 16, 32, 32), norm_num_groups=8).eval()
    vae.requires_grad_(False)
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = 128, 16, 0.25
    latent = vae.encode(picture).latent_dist.mode()
    whole = vae.decode(latent).sample
    vae.enable_tiling()
    theirs = vae.encode(picture).latent_dist.mode(), vae.decode(latent).sample
    ours = (
        encode_latents(vae, picture, strategies="tiled", tile=128, predict=False)[0],
        decode_latents(vae, latent, strategies="tiled", tile=128, predict=False)[0],
    )
    for our, their, direct in zip(ours, theirs, (latent, whole), strict=True):
        assert (our - direct).norm() < (their - direct).norm()
