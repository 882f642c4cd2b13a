from typing import TYPE_CHECKING, Any

import pytest
import torch

from sigmascope import decode_latents
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


@pytest.mark.parametrize("strategy", ["direct", "cpu"])
def test_decoding_is_what_diffusers_does(sample: "Sample", strategy: Any) -> None:
    frames, record = decode_latents(sample.vae, sample.latent, strategies=strategy, predict=False)
    assert torch.equal(frames, sample.decoded())
    assert (record.direction, record.strategy) == ("decoding", strategy)


@pytest.mark.slow
def test_decoding_in_tiles_gives_the_same_shape(sample: "Sample") -> None:
    frames, record = decode_latents(sample.vae, sample.latent, strategies="tiled", tile=32, overlap=0)
    assert frames.shape == sample.decoded().shape
    assert record.attempts[0].tile is not None
    assert record.attempts[0].tile.count == 2


def test_latents_of_a_video_go_through_a_vae_of_pictures_frame_by_frame(kl: "Sample") -> None:
    frames, _ = decode_latents(kl.vae, kl.latent.movedim(0, 1)[None], predict=False)
    assert torch.equal(frames, kl.decoded().movedim(0, 1)[None])


def test_a_video_may_have_its_frames_before_its_channels(wan: "Sample") -> None:
    frames, _ = decode_latents(wan.vae, wan.latent[:, :, :1].movedim(2, 1), predict=False)
    expected, _ = decode_latents(wan.vae, wan.latent[:, :, :1], predict=False)
    assert torch.equal(frames, expected)


def test_a_picture_of_a_vae_of_videos_is_a_video_of_one_frame(wan: "Sample") -> None:
    frames, _ = decode_latents(wan.vae, wan.latent[:, :, 0], predict=False)
    assert frames.shape == (2, 3, 1, 32, 64)


@pytest.mark.parametrize("latents", [torch.zeros(1, 64, 16), torch.zeros(0, 4, 8, 8)], ids=["packed", "none"])
def test_latents_that_are_none_are_refused(kl: "Sample", latents: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="Unpack"):
        decode_latents(kl.vae, latents)


def test_there_are_no_dummy_frames(kl: "Sample") -> None:
    with pytest.raises(ConfigError, match="dummy"):
        decode_latents(kl.vae, kl.latent, strategies=("direct", "dummy"))
