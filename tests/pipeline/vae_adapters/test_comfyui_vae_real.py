"""ComfyUI's own `VAE` objects, where a checkout is at hand."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor, nn

from sigmascope import decode_latents, encode_latents

IMAGES = torch.rand(2, 32, 48, 3, generator=torch.Generator().manual_seed(1))


def _with_random_weights(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(one.shape, generator=generator) * 0.05 for name, one in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def image_vae(comfy: Checkout) -> Any:
    """ComfyUI's own AutoencoderKL, small, in its own `VAE`."""
    options = {"double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32}
    layers = {"ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
    config = {"params": {"ddconfig": options | layers, "embed_dim": 4}}
    model = comfy.module("comfy.ldm.models.autoencoder").AutoencoderKL(**config["params"])
    return comfy.module("comfy.sd").VAE(sd=_with_random_weights(model), config=config)


@pytest.fixture(scope="module")
def video_vae(comfy: Checkout) -> Any:
    """ComfyUI's own WAN VAE, of the one width that all versions load: the first ones do not read it."""
    if not (comfy.folder / "comfy" / "ldm" / "wan").is_dir():
        pytest.skip(f"ComfyUI {comfy.version} has no WAN")
    if importlib.util.find_spec("einops") is None or not hasattr(sys.modules["einops"], "__version__"):
        pytest.skip("einops, which ComfyUI's WAN needs, is not installed")
    options = {"num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True]}
    wan = comfy.module("comfy.ldm.wan.vae").WanVAE(dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], **options)
    return comfy.module("comfy.sd").VAE(sd=_with_random_weights(wan))


def _as_comfyui_does(compute: Callable[[], Tensor]) -> Tensor:
    """Old versions draw their latents at random."""
    torch.manual_seed(0)
    with torch.inference_mode():
        return compute()


@pytest.mark.comfyui
@pytest.mark.parametrize("strategy", ["direct", "cpu"])
def test_the_real_one_encodes_and_decodes_the_same(image_vae: Any, strategy: Any) -> None:
    expected = _as_comfyui_does(lambda: image_vae.encode(IMAGES))
    torch.manual_seed(0)
    latent, _ = encode_latents(image_vae, IMAGES, strategies=strategy)
    assert torch.equal(latent, expected)
    frames, _ = decode_latents(image_vae, latent, strategies=strategy)
    assert torch.equal(frames, _as_comfyui_does(lambda: image_vae.decode(latent)))


@pytest.mark.comfyui
@pytest.mark.parametrize("batch", [1, 3])
def test_pictures_with_alpha_are_encoded_as_vae_encode_does(image_vae: Any, batch: int) -> None:
    images = torch.rand(batch, 32, 48, 4)
    expected = _as_comfyui_does(lambda: image_vae.encode(images[:, :, :, :3]))
    torch.manual_seed(0)
    latent, record = encode_latents(image_vae, images)
    assert torch.equal(latent, expected)
    assert [finding.id for finding in record.findings] == ["alpha_dropped"]


@pytest.mark.comfyui
def test_the_real_ones_tiles_are_its_own(image_vae: Any) -> None:
    images = torch.rand(1, 96, 96, 3)
    expected = _as_comfyui_does(lambda: image_vae.encode_tiled(images, tile_x=64, tile_y=64, overlap=16))
    torch.manual_seed(0)
    latent, _ = encode_latents(image_vae, images, strategies="tiled", tile=64, overlap=16)
    assert torch.equal(latent, expected)


@pytest.mark.comfyui
@pytest.mark.parametrize(("tile", "overlap"), [(48, 8), (80, 16)])
def test_the_real_ones_tiles_cover_all_whatever_their_size(image_vae: Any, tile: int, overlap: int) -> None:
    pictures = torch.rand(1, 96, 104, 3, generator=torch.Generator().manual_seed(1))
    latent, record = encode_latents(image_vae, pictures, strategies="tiled", tile=tile)
    assert torch.isfinite(latent).all()
    tiles = record.attempts[-1].tile
    assert tiles is not None
    assert tiles.overlap_height == overlap  # a quarter, in whole latent elements


@pytest.mark.comfyui
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_the_real_ones_silent_fallback_is_told(
    image_vae: Any, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(image_vae.first_stage_model, direction)
    failures = [torch.OutOfMemoryError("CUDA out of memory.")]

    def once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return own(*args, **kwargs)

    monkeypatch.setattr(image_vae.first_stage_model, direction, once)
    before = dict(vars(image_vae))
    if direction == "encode":
        _, record = encode_latents(image_vae, IMAGES, tile=32, predict=False)
    else:
        _, record = decode_latents(image_vae, torch.zeros(1, 4, 8, 8), tile=32, predict=False)
    assert [(one.name, one.outcome) for one in record.attempts] == [
        ("direct", "failed"),
        ("tiled", "succeeded"),
    ]
    assert vars(image_vae) == before


@pytest.mark.comfyui
@pytest.mark.parametrize("strategy", ["direct", "tiled", "cpu"])
def test_the_real_wan_encodes_frames_as_a_video(video_vae: Any, strategy: Any) -> None:
    frames = torch.rand(5, 96, 96, 3)
    latent, _ = encode_latents(video_vae, frames, strategies=strategy, tile=64)
    expected = _as_comfyui_does(lambda: video_vae.encode(frames))
    assert latent.shape == expected.shape == (1, 16, 2, 12, 12)
    if strategy != "tiled":
        assert torch.equal(latent, expected)
