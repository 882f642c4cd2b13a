"""ComfyUI's `VAE`: a stand-in that behaves as the real one does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import ConfigError
from sigmascope.records.latents import TileFacts


class FirstStage(nn.Module):
    """A VAE with a factor of 8 that runs out of memory as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 8, stride=8)
        self.back = nn.ConvTranspose2d(4, 3, 8, stride=8)
        self.fails = 0

    def _may_fail(self) -> None:
        self.fails -= 1
        if self.fails >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def encode(self, pixels: Tensor) -> Tensor:
        self._may_fail()
        return self.convolution(pixels)  # type: ignore[no-any-return]

    def decode(self, latents: Tensor) -> Tensor:
        self._may_fail()
        return self.back(latents)  # type: ignore[no-any-return]


class ComfyVae:
    """Where memory runs out, `encode` and `decode` go on with their private tiles and say nothing to the caller."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first_stage_model = FirstStage()
        self.downscale_ratio = self.upscale_ratio = 8
        self.latent_channels, self.output_channels, self.latent_dim = 4, 3, 2
        self.vae_dtype = torch.float32
        self.device = self.output_device = torch.device("cpu")
        self.patcher = object()
        self.tiled: list[tuple[int, int, int]] = []
        self.process_input: Callable[[Tensor], Tensor] = lambda pixels: pixels * 2 - 1
        self.process_output: Callable[[Tensor], Tensor] = lambda pixels: ((pixels + 1) / 2).clamp(0, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        prepared = self.process_input(pixels.movedim(-1, 1))
        try:
            return self.first_stage_model.encode(prepared)
        except torch.OutOfMemoryError:
            return self.encode_tiled_(prepared)

    def encode_tiled_(self, prepared: Tensor, tile: int = 512, overlap: int = 64) -> Tensor:
        self.tiled.append((tile, tile, overlap))
        return self.first_stage_model.encode(prepared)

    def encode_tiled(self, pixels: Tensor, tile_x: int, tile_y: int, overlap: int) -> Tensor:
        return self.encode_tiled_(self.process_input(pixels.movedim(-1, 1)), tile_x, overlap)

    def decode(self, latents: Tensor) -> Tensor:
        try:
            return self.process_output(self.first_stage_model.decode(latents)).movedim(1, -1)
        except torch.OutOfMemoryError:
            return self.decode_tiled_(latents)

    def decode_tiled_(self, latents: Tensor, tile: int = 64, overlap: int = 16) -> Tensor:
        self.tiled.append((tile, tile, overlap))
        return self.process_output(self.first_stage_model.decode(latents)).movedim(1, -1)

    def decode_tiled(self, latents: Tensor, tile_x: int, tile_y: int, overlap: int) -> Tensor:
        return self.decode_tiled_(latents, tile_x, overlap)


IMAGES = torch.rand(2, 32, 48, 3, generator=torch.Generator().manual_seed(1))


def test_images_go_in_as_nodes_hand_them_over() -> None:
    vae = ComfyVae()
    latent, record = encode_latents(vae, IMAGES)
    torch.testing.assert_close(latent, vae.encode(IMAGES))
    assert record.strategy == "direct"


def test_pictures_come_out_as_nodes_take_them() -> None:
    vae = ComfyVae()
    latent = vae.encode(IMAGES).detach()
    frames, record = decode_latents(vae, latent)
    torch.testing.assert_close(frames, vae.decode(latent).detach())
    assert record.output is not None
    assert record.output.layout == "BHWC"


def test_the_silent_fallback_is_told_as_what_it_is() -> None:
    vae = ComfyVae()
    vae.first_stage_model.fails = 1
    _, record = encode_latents(vae, IMAGES, tile=32, predict=False)
    assert [(one.name, one.outcome) for one in record.attempts] == [
        ("direct", "failed"),
        ("tiled", "succeeded"),
    ]
    assert "about to go on in tiles" in (record.attempts[0].reason or "")


def test_its_own_tiles_are_used_and_told() -> None:
    vae = ComfyVae()
    _, record = encode_latents(vae, IMAGES, strategies="tiled", tile=32, overlap=8)
    assert vae.tiled == [(32, 32, 8)]
    assert record.attempts[0].tile is not None
    assert record.attempts[0].tile.by == "vae"


def test_tiles_for_decoding_are_in_latent_pixels() -> None:
    vae = ComfyVae()
    decode_latents(vae, torch.zeros(1, 4, 8, 8), strategies="tiled", tile=32, overlap=8)
    assert vae.tiled == [(4, 4, 1)]


@pytest.mark.parametrize("fails", [0, 1])
def test_its_methods_are_its_own_again(fails: int) -> None:
    vae = ComfyVae()
    before = dict(vars(vae))
    vae.first_stage_model.fails = fails
    encode_latents(vae, IMAGES, tile=32, predict=False)
    assert vars(vae) == before


def test_on_the_cpu_it_computes_the_same_past_its_own_placement() -> None:
    vae = ComfyVae()
    expected = vae.encode(IMAGES).detach()
    vae.device = torch.device("meta")  # stands for a device that the CPU is not
    latent, _ = encode_latents(vae, IMAGES, strategies="cpu")
    torch.testing.assert_close(latent, expected)


def test_halves_of_tiles_that_are_all_overlap_are_refused() -> None:
    """PEERS: ComfyUI divides by zero there."""
    with pytest.raises(ConfigError, match="Take 8 at most"):
        encode_latents(ComfyVae(), IMAGES, tile=32, overlap=16)


def test_an_object_without_a_vae_is_refused() -> None:
    vae: Any = ComfyVae()
    vae.first_stage_model = None
    with pytest.raises(ConfigError, match="loaded no VAE"):
        encode_latents(vae, IMAGES)


@pytest.mark.parametrize("encodes", [True, False])
def test_its_own_tiles_that_fail_are_told_as_its_own_and_those_on_the_cpu_as_ours(encodes: bool) -> None:
    vae = ComfyVae()
    side = 32 if encodes else 4
    given: Any = torch.zeros(1, side, side, 3) if encodes else torch.zeros(1, 4, side, side)
    vae.first_stage_model.fails = 1
    work = encode_latents if encodes else decode_latents
    _, record = work(vae, given, strategies=("tiled", "cpu"), tile=16, overlap=0, predict=False)
    failed, succeeded = record.attempts
    assert (failed.name, failed.outcome, succeeded.name) == ("tiled", "failed", "cpu")
    assert failed.tile == TileFacts(16, 16, 0, 0, by="vae")


class Casting(ComfyVae):
    """Casts what goes in to its own type, as ComfyUI's does."""

    def encode(self, pixels: Tensor) -> Tensor:
        prepared = self.process_input(pixels.movedim(-1, 1)).to(self.vae_dtype)
        return self.first_stage_model.encode(prepared).float()


@torch.no_grad()
def test_what_overflows_in_float16_is_encoded_in_float32() -> None:
    vae = Casting()
    vae.first_stage_model.half().convolution.weight.data.fill_(60_000)
    vae.vae_dtype = torch.float16
    assert not vae.encode(IMAGES).isfinite().all()
    latent, record = encode_latents(vae, IMAGES, predict=False)
    pixels = IMAGES.movedim(-1, 1) * 2 - 1
    bias = vae.first_stage_model.convolution.bias
    assert bias is not None
    sums = torch.nn.functional.avg_pool2d(pixels, 8, divisor_override=1).sum(1, keepdim=True) * 60_000
    torch.testing.assert_close(latent, sums + bias.float()[:, None, None], rtol=1e-4, atol=10)
    assert [one.name for one in record.attempts] == ["direct", "cpu"]
    assert (vae.vae_dtype, vae.first_stage_model.convolution.weight.dtype) == (torch.float16,) * 2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_is_no_picture_however_many_there_are(batch: int) -> None:
    """Three masks have the shape of a picture with its channels first, which ComfyUI has not."""
    vae, masks = ComfyVae(), torch.rand(batch, 64, 64)
    with pytest.raises(ConfigError, match="mask"):
        encode_latents(vae, masks)
    if batch == 3:
        as_told, _ = encode_latents(vae, masks, layout="CHW", values="unit")
        assert torch.equal(as_told, vae.encode(masks.movedim(0, -1)[None]))
