"""How far tiles are from the whole, on real VAEs at small size: what is exact, and what can only be near."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, AutoencoderTiny
from tests.families.vaes import parameters, pixels_of, relative_error, three_level_vae
from torch import Tensor, nn

from sigmascope.pipeline.tile_plan import TilePlan, plan
from sigmascope.pipeline.tiling import tiled_map

SEEN_BY_TINY = 8
"""Latent elements beside a tile's inner edge that the layers of the tiny VAE below see across it."""
SEEN_BY_KL = 16
"""The same of the KL below."""


def tiny() -> AutoencoderTiny:
    torch.manual_seed(0)
    return AutoencoderTiny(num_encoder_blocks=(1, 2, 2, 2), num_decoder_blocks=(2, 2, 2, 1)).eval()


def without_normalisation(vae: AutoencoderKL) -> AutoencoderKL:
    """The same layers, each of which sees its neighbourhood only."""
    for module in list(vae.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GroupNorm):
                setattr(module, name, nn.Identity())
    return vae


def latents(vae: Any, pixels: Tensor) -> Tensor:
    made: Tensor = vae.encode(pixels).latents
    return made


def noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


@torch.no_grad()
def both(function: Callable[[Tensor], Tensor], tensor: Tensor, tiles: TilePlan) -> tuple[Tensor, Tensor]:
    return tiled_map(function, tensor, tiles), function(tensor)


def away(tiles: TilePlan, reach: int, *, latents: bool) -> Tensor:
    """Columns farther from every inner edge than `reach` latent elements."""
    axis = tiles.columns
    spans = [axis.span(index, latents=latents) for index in range(len(axis.starts))]
    edges = {edge for span in spans for edge in (span.start, span.stop)} - {0, axis.size(latents=latents)}
    columns = torch.arange(axis.size(latents=latents)) + 0.5
    distance = torch.stack([(columns - edge).abs() for edge in edges]).amin(0)
    found = distance > reach * (1 if latents else axis.factor)
    assert 0.2 < found.float().mean() < 0.9
    return found


def check_away_from_seams(
    function: Callable[[Tensor], Tensor], tensor: Tensor, tiles: TilePlan, reach: int, *, latents: bool
) -> None:
    tiled, direct = both(function, tensor, tiles)
    columns = away(tiles, reach, latents=latents)
    torch.testing.assert_close(tiled[..., columns], direct[..., columns], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tiled, direct, rtol=1e-4, atol=1e-5)


def test_tiles_of_a_vae_without_norms_are_encoded_as_the_whole_away_from_seams() -> None:
    tiles = plan(32, 1024, 512, 64, 8, rounding="up")
    encode = functools.partial(latents, tiny())
    check_away_from_seams(encode, noise(1, 3, 32, 1024), tiles, SEEN_BY_TINY, latents=True)


@pytest.mark.slow
def test_tiles_of_a_vae_without_norms_are_decoded_as_the_whole_away_from_seams() -> None:
    tiles = plan(32, 1024, 512, 64, 8)
    decode = functools.partial(pixels_of, tiny())
    check_away_from_seams(decode, noise(1, 4, 4, 128), tiles, SEEN_BY_TINY, latents=False)


@pytest.mark.parametrize("encodes", [True, False])
def test_what_a_kls_convolutions_make_is_that_of_the_whole_away_from_seams(encodes: bool) -> None:
    vae = without_normalisation(three_level_vae(attention=False))
    function = functools.partial(parameters if encodes else pixels_of, vae)
    tensor = noise(1, 3, 32, 1024) if encodes else noise(1, 4, 8, 256)
    check_away_from_seams(function, tensor, plan(32, 1024, 512, 64, 4), SEEN_BY_KL, latents=encodes)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("encodes", [True, False])
def test_norms_and_attention_by_tile_are_near_where_the_picture_is_alike(
    attention: bool, encodes: bool
) -> None:
    function = functools.partial(parameters if encodes else pixels_of, three_level_vae(attention=attention))
    tensor = noise(1, 3, 128, 512) if encodes else noise(1, 4, 32, 128)
    tiles = plan(128, 512, 256, 64, 4)
    tiled, direct = both(function, tensor, tiles)
    columns = away(tiles, SEEN_BY_KL, latents=encodes)
    assert relative_error(tiled[..., columns], direct[..., columns]) < 0.12


def shares_over_what_was_asked_for(length: int, tile: int, overlap: int) -> Tensor:
    """Of the first of two tiles, if it fell over `overlap` places and from the picture's border as well."""

    def rise(start: int) -> Tensor:
        place = torch.arange(length, dtype=torch.float32) - start
        end = torch.minimum(place + 1, tile - place)
        return (end / (overlap + 1)).clamp(0, 1)

    return rise(0) / (rise(0) + rise(length - tile))


@torch.no_grad()
@pytest.mark.parametrize("encodes", [True, False])
def test_a_ramp_over_all_that_tiles_share_is_nearer_to_the_whole(encodes: bool) -> None:
    vae = without_normalisation(three_level_vae(attention=False))
    function = functools.partial(parameters if encodes else pixels_of, vae)
    tensor = noise(1, 3, 32, 264) if encodes else noise(1, 4, 8, 66)
    tiled, direct = both(function, tensor, plan(32, 264, 256, 64, 4))
    step, scale = (8, 1) if encodes else (2, 4)
    parts = [function(tensor[..., : -step if encodes else -2]), function(tensor[..., step:])]
    length, tile, overlap = 66 * scale, 64 * scale, 16 * scale
    first = shares_over_what_was_asked_for(length, tile, overlap)
    blended = torch.zeros_like(direct)
    blended[..., :tile] += parts[0] * first[:tile]
    blended[..., -tile:] += parts[1] * (1 - first)[-tile:]
    assert 2.5 * relative_error(tiled, direct) < relative_error(blended, direct)


@pytest.mark.slow
def test_a_causal_video_is_tiled_in_space_alone() -> None:
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2, 4, 4], num_res_blocks=1).eval()
    tiles = plan(32, 384, 256, 64, 8)
    tiled, direct = both(functools.partial(parameters, vae), noise(1, 3, 5, 32, 384), tiles)
    assert tiled.shape == direct.shape == (1, 8, 2, 4, 48)
    assert relative_error(tiled, direct) < 0.05
