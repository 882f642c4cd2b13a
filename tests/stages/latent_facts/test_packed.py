"""Packed latents, held against the packing of diffusers' pipelines."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sigmascope.records.latents import VaeFacts
from sigmascope.stages.latent_facts import Unpacked, unpacked

FLUX = VaeFacts("AutoencoderKL", 16, 3, 8, 1, is_video=False)
QWEN = VaeFacts("AutoencoderKLQwenImage", 16, 3, 8, 4, first_frame_apart=True, is_video=True)
LTX = VaeFacts("AutoencoderKLLTXVideo", 128, 3, 32, 8, first_frame_apart=True, is_video=True)
FLUX2 = VaeFacts("AutoencoderKLFlux2", 32, 3, 8, 1, is_video=False)


@pytest.fixture(scope="module")
def pipelines() -> Any:
    import diffusers

    return diffusers


def unpack(latent: Tensor, sizes: Unpacked) -> Tensor:
    """From (batch, tokens, channels·p²): a token's values are channel, row, column; tokens frame, row, column."""
    p, frames = sizes.patch, sizes.frames or 1
    high, wide = sizes.height // p, sizes.width // p
    grid = latent.reshape(sizes.batch, frames, high, wide, sizes.channels, p, p)
    return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(sizes.shape)


def test_flux(pipelines: Any) -> None:
    latent = torch.arange(2 * 16 * 6 * 10.0).reshape(2, 16, 6, 10)
    packed = pipelines.FluxPipeline._pack_latents(latent, 2, 16, 6, 10)
    sizes = unpacked(packed.shape, FLUX, None, 48, 80)
    assert sizes is not None
    assert (sizes.shape, sizes.patch) == ((2, 16, 6, 10), 2)
    assert torch.equal(unpack(packed, sizes), latent)


def test_qwen_image_has_an_axis_of_one_frame(pipelines: Any) -> None:
    latent = torch.arange(16 * 6 * 10.0).reshape(1, 16, 1, 6, 10)
    packed = pipelines.QwenImagePipeline._pack_latents(latent, 1, 16, 6, 10)
    sizes = unpacked(packed.shape, QWEN, 1, 48, 80)
    assert sizes is not None
    assert sizes.shape == (1, 16, 1, 6, 10)
    assert torch.equal(unpack(packed, sizes), pipelines.QwenImagePipeline._unpack_latents(packed, 48, 80, 8))


def test_ltx_packs_single_latent_pixels_of_a_video(pipelines: Any) -> None:
    latent = torch.arange(128 * 3 * 4 * 5.0).reshape(1, 128, 3, 4, 5)
    packed = pipelines.LTXPipeline._pack_latents(latent, 1, 1)
    sizes = unpacked(packed.shape, LTX, 17, 128, 160)
    assert sizes is not None
    assert (sizes.shape, sizes.patch) == ((1, 128, 3, 4, 5), 1)
    assert torch.equal(unpack(packed, sizes), latent)


def test_flux2_patchifies_and_packs(pipelines: Any) -> None:
    latent = torch.arange(32 * 6 * 10.0).reshape(1, 32, 6, 10)
    patches = pipelines.Flux2Pipeline._patchify_latents(latent)
    packed = pipelines.Flux2Pipeline._pack_latents(patches)
    sizes = unpacked(packed.shape, FLUX2, None, 48, 80)
    assert sizes is not None
    assert torch.equal(unpack(packed, sizes), latent)


def test_without_a_vae_flux_is_known_by_its_tokens() -> None:
    sizes = unpacked((1, 4096, 64), None, None, 1024, 1024)
    assert sizes is not None
    assert sizes.shape == (1, 16, 128, 128)


def test_sides_that_two_does_not_divide_are_cut_as_flux_does(pipelines: Any) -> None:
    sizes = unpacked((1, 12, 64), FLUX, None, 56, 72)
    assert sizes is not None
    expected = pipelines.FluxPipeline._unpack_latents(torch.zeros(1, 12, 64), 56, 72, 8)
    assert sizes.shape == tuple(expected.shape)


@pytest.mark.parametrize(
    ("shape", "height"), [((1, 4095, 64), 1024), ((1, 4096, 60), 1024), ((4096, 64), 1024), ((1, 0, 64), 0)]
)
def test_what_does_not_fit_is_not_packed(shape: tuple[int, ...], height: int) -> None:
    assert unpacked(shape, FLUX, None, height, height) is None


def test_without_the_pictures_size_nothing_is_unpacked() -> None:
    assert unpacked((1, 4096, 64), FLUX, None, None, 1024) is None
