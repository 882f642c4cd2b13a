import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn

from sigmascope.lbm.config import VaeConfig
from sigmascope.lbm.model import LbmModel, LbmVae
from sigmascope.pipeline.tile_plan import tile_starts

SEAM = 12
"""Latent elements beside a tile's inner edge that the tiny VAE's convolutions see across it."""


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1


@torch.no_grad()
def test_latents_are_the_shifted_and_scaled_mode(tiny_model: LbmModel, images: torch.Tensor) -> None:
    theirs = tiny_model.vae.vae_model.encode(images).latent_dist.mode()
    expected = (theirs - 0.25) * 0.5
    torch.testing.assert_close(tiny_model.vae.encode(images), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_sampled_latents_are_the_posteriors(tiny_model: LbmModel, images: torch.Tensor) -> None:
    posterior = tiny_model.vae.vae_model.encode(images).latent_dist
    expected = (posterior.sample(generator=torch.Generator().manual_seed(5)) - 0.25) * 0.5
    ours = tiny_model.vae.encode(images, sample=True, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_decode_undoes_shift_and_scaling(tiny_model: LbmModel) -> None:
    z = torch.randn(1, 4, 8, 8)
    expected = tiny_model.vae.vae_model.decode(z).sample
    torch.testing.assert_close(tiny_model.vae.decode((z - 0.25) * 0.5), expected, rtol=0, atol=1e-5)


def test_factor_follows_the_blocks() -> None:
    assert VaeConfig().factor == 8
    assert VaeConfig(block_out_channels=(32, 32), norm_num_groups=8).factor == 2


def test_architecture_reaches_diffusers() -> None:
    config: dict[str, Any] = {"norm_num_groups": 8, "block_out_channels": (32, 64), "latent_channels": 6}
    vae: AutoencoderKL = LbmVae(VaeConfig(**config, layers_per_block=3, use_quant_conv=False)).vae_model
    assert vae.config.latent_channels == 6
    assert vae.config.norm_num_groups == 8
    assert len(vae.encoder.down_blocks[0].resnets) == 3
    assert vae.quant_conv is None


@pytest.fixture(scope="module")
def local_vae(tiny_model: LbmModel) -> LbmVae:
    """A VAE without group normalisation: an output depends on its neighbourhood only."""
    vae = copy.deepcopy(tiny_model.vae)
    for module in vae.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.Identity())
    return vae


def far_from_seams(width: int, tile: int) -> torch.Tensor:
    """Which columns lie farther than `SEAM` from the inner edges of all tiles."""
    starts = tile_starts(width, tile, tile // 4)
    edges = {edge for start in starts for edge in (start, start + tile)} - {0, width}
    columns = torch.arange(width)
    return torch.stack([(columns - edge).abs() > SEAM for edge in sorted(edges)]).all(0)


@torch.no_grad()
def test_tiled_decoding_is_direct_decoding_away_from_seams(local_vae: LbmVae) -> None:
    latents = torch.randn(1, 4, 8, 256, generator=torch.Generator().manual_seed(3))
    direct, tiled = local_vae.decode(latents), local_vae.decode(latents, tile_size=256)
    away = far_from_seams(256, 128).repeat_interleave(2)
    assert 0.4 < away.float().mean() < 1
    torch.testing.assert_close(tiled[..., away], direct[..., away], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tiled, direct, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tiled_encoding_is_direct_encoding_away_from_seams(local_vae: LbmVae) -> None:
    images = torch.rand(1, 3, 16, 512, generator=torch.Generator().manual_seed(3)) * 2 - 1
    direct, tiled = local_vae.encode(images), local_vae.encode(images, tile_size=256)
    away = far_from_seams(256, 128)
    torch.testing.assert_close(tiled[..., away], direct[..., away], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_normalisation_by_tile_costs_little_where_the_picture_is_alike(tiny_model: LbmModel) -> None:
    latents = torch.randn(1, 4, 32, 64, generator=torch.Generator().manual_seed(3))
    direct, tiled = tiny_model.vae.decode(latents), tiny_model.vae.decode(latents, tile_size=64)
    assert ((tiled - direct).norm() / direct.norm()).item() < 0.1


@torch.no_grad()
def test_one_tile_is_the_direct_way(tiny_model: LbmModel, images: torch.Tensor) -> None:
    torch.testing.assert_close(tiny_model.vae.encode(images, tile_size=64), tiny_model.vae.encode(images))
