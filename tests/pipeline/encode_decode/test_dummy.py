from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from sigmascope import encode_latents
from sigmascope.errors import ConfigError, EveryStrategyFailedError

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


class Full:
    """Its memory is full whatever it is asked."""

    def encode(self, pixels: Tensor) -> Tensor:
        raise MemoryError


def test_dummies_are_shaped_as_the_real_ones(sample: "Sample") -> None:
    latent, _ = encode_latents(sample.vae, sample.pixels, strategies="dummy")
    real = sample.latent
    assert (latent.shape, latent.dtype, latent.device) == (real.shape, real.dtype, real.device)
    assert not latent.any()


def test_the_record_says_in_plain_words_that_they_are_none(kl: "Sample") -> None:
    _, record = encode_latents(kl.vae, kl.pixels, strategies="dummy")
    assert record.dummy
    assert record.strategy_label == "Emergency Dummy Latents"
    assert [finding.severity for finding in record.findings] == ["critical"]
    assert "no picture was encoded" in record.findings[0].message


@pytest.mark.slow
def test_they_are_not_given_unless_asked_for() -> None:
    with pytest.raises(EveryStrategyFailedError):
        encode_latents(Full(), torch.zeros(1, 3, 16, 16))


def test_dummies_of_an_unknown_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="latent_channels"):
        encode_latents(Full(), torch.zeros(1, 3, 16, 16), dummy=True)


def test_a_video_through_a_vae_of_pictures_has_its_frames_again(kl: "Sample") -> None:
    latent, _ = encode_latents(kl.vae, torch.zeros(1, 3, 7, 16, 24), dummy=True, strategies="dummy")
    assert latent.shape == (1, 4, 7, 2, 3)


@pytest.mark.parametrize("frames", [8, 9, 16])
def test_dummies_have_as_many_frames_as_the_real_ones_whatever_the_config_claims(frames: int) -> None:
    """Cosmos makes 3 latent frames of 16 as of 17, where one in 8 would make 2."""
    import diffusers

    widths = {"encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4}
    options = {"num_layers": 1, "resolution": 64, "attention_resolutions": (8,)}
    vae = diffusers.AutoencoderKLCosmos(latent_channels=4, **widths, **options).eval()
    pixels = torch.zeros(2, 3, frames, 32, 32)
    dummy, _ = encode_latents(vae, pixels, strategies="dummy")
    real, _ = encode_latents(vae, pixels, strategies="direct", predict=False)
    assert dummy.shape == real.shape
