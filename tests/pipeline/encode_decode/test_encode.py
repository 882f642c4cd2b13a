from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sigmascope import encode_latents
from sigmascope.errors import ConfigError
from sigmascope.records.latents import findings_of_record

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


def test_encoding_directly_is_what_diffusers_does(sample: "Sample") -> None:
    latent, record = encode_latents(sample.vae, sample.pixels)
    assert torch.equal(latent, sample.latent)
    assert record.strategy == "direct"


def test_encoding_on_the_cpu_is_what_diffusers_does(sample: "Sample") -> None:
    latent, record = encode_latents(sample.vae, sample.pixels, strategies="cpu")
    assert torch.equal(latent, sample.latent)
    assert record.strategy_label == "CPU Fallback Encoding"


@pytest.mark.slow
def test_encoding_in_tiles_gives_the_same_shape_and_dtype(sample: "Sample") -> None:
    latent, record = encode_latents(sample.vae, sample.pixels, strategies=("tiled",), tile=32, overlap=0)
    assert (latent.shape, latent.dtype) == (sample.latent.shape, sample.latent.dtype)
    assert record.attempts[0].tile is not None
    assert record.attempts[0].tile.count == 2


def test_a_single_tile_is_what_diffusers_does(sample: "Sample") -> None:
    latent, _ = encode_latents(sample.vae, sample.pixels[:1], strategies=("tiled",), tile=128)
    torch.testing.assert_close(latent, sample.latent[:1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_of_colours_and_alpha_the_colours_are_encoded(kl: "Sample", batch: int) -> None:
    shown = torch.rand(batch, 16, 24, 4)
    expected, without = encode_latents(kl.vae, shown[..., :3])
    latent, record = encode_latents(kl.vae, shown)
    assert torch.equal(latent, expected)
    assert record.input is not None
    assert (record.input.layout, record.input.channels) == ("BHWC", 4)
    assert [finding.id for finding in record.findings] == ["alpha_dropped"]
    assert not without.findings


def test_the_alpha_of_an_image_is_said_to_be_dropped(kl: "Sample") -> None:
    shown = Image.fromarray((np.random.default_rng(0).random((16, 24, 4)) * 255).astype(np.uint8), "RGBA")
    expected, without = encode_latents(kl.vae, shown.convert("RGB"))
    latent, record = encode_latents(kl.vae, [shown])
    assert torch.equal(latent, expected)
    assert [finding.id for finding in record.findings] == ["alpha_dropped"]
    assert not without.findings


def test_a_mask_beside_the_pictures_is_left_out(kl: "Sample") -> None:
    shown = torch.rand(1, 16, 24, 3)
    expected, _ = encode_latents(kl.vae, shown)
    for given in ((shown, torch.zeros(1, 16, 24)), (torch.zeros(1, 16, 24), shown)):
        latent, _ = encode_latents(kl.vae, given)
        assert torch.equal(latent, expected)


def test_bytes_are_the_same_pictures_in_another_range(kl: "Sample") -> None:
    shown = (torch.rand(1, 3, 16, 24) * 255).to(torch.uint8)
    expected, _ = encode_latents(kl.vae, shown.float() / 127.5 - 1)
    latent, _ = encode_latents(kl.vae, shown)
    torch.testing.assert_close(latent, expected, rtol=0, atol=1e-6)


def test_floats_with_channels_last_are_from_0_to_1(kl: "Sample") -> None:
    latent, _ = encode_latents(kl.vae, (kl.pixels.movedim(1, -1) + 1) / 2)
    torch.testing.assert_close(latent, kl.latent, rtol=0, atol=1e-5)


def test_the_caller_may_say_what_floats_mean(kl: "Sample") -> None:
    latent, _ = encode_latents(kl.vae, (kl.pixels + 1) / 2, values="unit")
    torch.testing.assert_close(latent, kl.latent, rtol=0, atol=1e-5)


def test_images_and_arrays_are_the_same_pictures(kl: "Sample") -> None:
    shown = (np.random.default_rng(0).random((2, 16, 24, 3)) * 255).astype(np.uint8)
    from_array, _ = encode_latents(kl.vae, shown)
    from_images, record = encode_latents(kl.vae, [Image.fromarray(one) for one in shown])
    assert torch.equal(from_images, from_array)
    assert record.input is not None
    assert record.input.form == "list of PIL images"


@pytest.mark.parametrize("axes", ["BCFHW", "BFCHW", "BFHWC", "CFHW", "FCHW", "FHWC"])
def test_a_video_may_have_its_axes_in_any_order(wan: "Sample", axes: str) -> None:
    video = wan.pixels[:1] if "B" in axes else wan.pixels[0]
    own = "BCFHW" if "B" in axes else "CFHW"
    turned = video.permute([own.index(axis) for axis in axes])
    latent, _ = encode_latents(wan.vae, turned, values="signed")
    torch.testing.assert_close(latent, wan.latent[:1], rtol=0, atol=1e-5)


def test_a_video_goes_through_a_vae_of_pictures_frame_by_frame(kl: "Sample") -> None:
    video = kl.pixels.movedim(0, 1)[None]
    latent, _ = encode_latents(kl.vae, video)
    assert torch.equal(latent, kl.latent.movedim(0, 1)[None])


def test_pictures_stay_apart_in_a_vae_of_pictures_with_an_axis_for_frames(qwen: "Sample") -> None:
    pictures = qwen.pixels[:, :, 0]
    latent, _ = encode_latents(qwen.vae, pictures)
    assert torch.equal(latent, encode_latents(qwen.vae, pictures[:, :, None])[0])
    assert latent.shape == (2, 4, 1, 4, 8)


@pytest.mark.parametrize(("frames", "latent_frames"), [(1, 1), (81, 21)])
@pytest.mark.parametrize("strategy", ["direct", "tiled", "cpu"])
def test_wan_gives_a_latent_frame_for_the_first_and_for_every_4(
    wan: "Sample", frames: int, latent_frames: int, strategy: Any
) -> None:
    latent, _ = encode_latents(
        wan.vae, torch.zeros(1, 3, frames, 16, 16), strategies=(strategy,), tile=8, predict=False
    )
    assert latent.shape == (1, 4, latent_frames, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["direct", "tiled", "cpu"])
def test_an_odd_size_gives_what_the_vae_makes_of_it(sample: "Sample", strategy: Any) -> None:
    pixels = sample.pixels[:1, ..., :41, :51]
    try:
        expected = encode_latents(sample.vae, pixels, predict=False)[0]
    except (RuntimeError, ValueError) as refusal:  # some refuse such sizes, and do so in every way
        with pytest.raises(type(refusal)):
            encode_latents(sample.vae, pixels, strategies=(strategy,), tile=32, predict=False)
        return
    latent, _ = encode_latents(sample.vae, pixels, strategies=(strategy,), tile=32, predict=False)
    assert latent.shape == expected.shape


@pytest.mark.parametrize("strategy", ["direct", "cpu"])
def test_tiling_that_was_switched_on_is_part_of_what_directly_means(kl: "Sample", strategy: str) -> None:
    vae = type(kl.vae).from_config(kl.vae.config).eval()
    vae.load_state_dict(kl.vae.state_dict())
    vae.enable_slicing()
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 4
    with torch.no_grad():
        theirs = vae.encode(kl.pixels).latent_dist.mode()
    latent, record = encode_latents(vae, kl.pixels, strategies=strategy, predict=False)
    assert torch.equal(latent, theirs)
    assert not torch.allclose(latent, kl.latent, atol=1e-3)
    assert (vae.use_tiling, vae.use_slicing) == (True, True)
    tile = record.attempts[0].tile
    assert tile is not None
    assert (tile.height, tile.width, tile.overlap_height, tile.by) == (32, 32, 8, "vae")
    (finding,) = findings_of_record(record)
    assert finding.id == "vae_tiles_differ"
    assert "vae.disable_tiling()" in (finding.advice or "")


def test_a_picture_of_one_tile_is_not_cut(kl: "Sample") -> None:
    vae = type(kl.vae).from_config(kl.vae.config).eval()
    with torch.no_grad():
        whole = vae.encode(kl.pixels).latent_dist.mode()
    vae.enable_tiling()
    vae.tile_sample_min_size = max(kl.pixels.shape[-2:])
    latent, record = encode_latents(vae, kl.pixels, strategies="direct", predict=False)
    assert torch.equal(latent, whole)
    assert record.attempts[0].tile is None
    assert list(findings_of_record(record)) == []


def test_a_vae_in_training_encodes_as_one_that_is_not_and_trains_on(kl: "Sample") -> None:
    vae = type(kl.vae).from_config(kl.vae.config).train()
    vae.load_state_dict(kl.vae.state_dict())
    vae.decoder.eval()
    encode_latents(vae, kl.pixels, predict=False)
    assert [vae.training, vae.encoder.training, vae.decoder.training] == [True, True, False]


def test_a_draw_is_the_one_that_diffusers_makes(kl: "Sample") -> None:
    with torch.no_grad():
        posterior = kl.vae.encode(kl.pixels).latent_dist
    expected = posterior.sample(generator=torch.Generator().manual_seed(3))
    latent, _ = encode_latents(kl.vae, kl.pixels, sample=True, generator=torch.Generator().manual_seed(3))
    assert torch.equal(latent, expected)


def test_a_draw_from_a_vae_without_a_distribution_is_refused() -> None:
    class Plain:
        def encode(self, pixels: Tensor) -> Tensor:
            return pixels[:, :, ::8, ::8]

    with pytest.raises(ConfigError, match="no distribution"):
        encode_latents(Plain(), torch.zeros(1, 3, 16, 16), sample=True)


def test_any_object_with_encode_is_cut_into_tiles_by_the_factor_that_it_shows() -> None:
    class Pooling:
        def encode(self, pixels: Tensor) -> Tensor:
            return torch.nn.functional.avg_pool2d(pixels, 4)

    pixels = torch.rand(1, 3, 64, 96)
    latent, record = encode_latents(Pooling(), pixels, strategies=("tiled",), tile=32)
    torch.testing.assert_close(latent, Pooling().encode(pixels))
    assert record.attempts[0].tile is not None
    assert record.attempts[0].tile.count == 12


def test_numbers_out_of_range_are_encoded_as_they_are_and_shown(kl: "Sample") -> None:
    pixels = torch.full((1, 3, 16, 16), 7.0)
    latent, record = encode_latents(kl.vae, pixels)
    with torch.no_grad():
        assert torch.equal(latent, kl.vae.encode(pixels).latent_dist.mode())
    assert record.input is not None
    assert record.input.tensor.max == 7.0


def test_half_precision_goes_in_and_comes_out(kl: "Sample") -> None:
    vae = type(kl.vae).from_config(kl.vae.config).to(torch.bfloat16).eval()
    latent, _ = encode_latents(vae, kl.pixels)
    assert latent.dtype == torch.bfloat16


def test_no_graph_is_recorded_and_gradients_stay_possible(kl: "Sample") -> None:
    latent, _ = encode_latents(kl.vae, kl.pixels.clone().requires_grad_())
    assert not latent.requires_grad
    assert torch.is_grad_enabled()
