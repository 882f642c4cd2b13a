"""VAEs whose results are not what a VAE's should be."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import ModelMismatchError

PIXELS = torch.rand(2, 3, 32, 64)


class Strange(nn.Module):
    """Sound inside; what comes out is up to `make`."""

    def __init__(self, make: Callable[[Tensor], Any], config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.convolution, self.make = nn.Conv2d(3, 4, 8, stride=8), make
        if config is not None:
            self.config = config

    def encode(self, pixels: Tensor) -> Any:
        return self.make(self.convolution(pixels))

    def decode(self, latents: Tensor) -> Any:
        return self.make(latents)


OF_PICTURES = {"in_channels": 3, "latent_channels": 4, "block_out_channels": (8, 8, 8, 8)}


@pytest.mark.parametrize("wrap", [
    lambda latent: torch.distributions.Normal(latent, torch.ones_like(latent)),
    lambda latent: {"latent_dist": torch.distributions.Laplace(latent, torch.ones_like(latent))},
    lambda latent: torch.distributions.Independent(torch.distributions.Normal(latent, torch.ones_like(latent)), 1),
])  # fmt: skip
@pytest.mark.parametrize("strategy", ["direct", "tiled"])
def test_of_torchs_distributions_the_mode_is_taken(wrap: Callable[[Tensor], Any], strategy: str) -> None:
    vae = Strange(wrap)
    latent, _ = encode_latents(vae, PIXELS, strategies=strategy, predict=False)
    assert torch.allclose(latent, vae.convolution(PIXELS), atol=1e-6)


@pytest.mark.parametrize("strategy", ["direct", "tiled", "cpu"])
@pytest.mark.parametrize("made", [None, (), "x", torch.distributions.Bernoulli])
def test_what_holds_no_tensor_is_refused(made: Any, strategy: str) -> None:
    with pytest.raises(ModelMismatchError, match="no tensor"):
        encode_latents(Strange(lambda latent: made), PIXELS, strategies=strategy, predict=False)


@pytest.mark.parametrize("strategy", ["direct", "tiled", "cpu"])
@pytest.mark.parametrize(
    "make", [Tensor.mean, Tensor.flatten, lambda latent: latent[:0]], ids=["0-D", "1-D", "none"]
)
def test_shapes_that_are_no_latents_of_these_pictures_are_refused(make: Any, strategy: str) -> None:
    with pytest.raises(ModelMismatchError):
        encode_latents(Strange(make, OF_PICTURES), PIXELS, strategies=strategy, tile=16, predict=False)


def test_frames_of_a_video_that_are_lost_are_told() -> None:
    vae = Strange(lambda latent: latent[:3], OF_PICTURES)
    with pytest.raises(ModelMismatchError, match="for 5 pictures"):
        encode_latents(vae, torch.rand(1, 5, 3, 32, 64), strategies="direct", predict=False)
    with pytest.raises(ModelMismatchError, match="for 5 latents"):
        decode_latents(vae, torch.rand(5, 4, 4, 8), strategies="direct", predict=False)


def test_tiles_of_no_size_at_all_are_refused_without_a_config() -> None:
    with pytest.raises(ModelMismatchError, match="not a whole number"):
        encode_latents(Strange(Tensor.flatten), PIXELS, strategies="tiled", predict=False)


def test_tiles_that_do_not_fit_each_other_are_refused() -> None:
    numbers = count(1)
    vae = Strange(lambda latent: latent[:, : next(numbers)], OF_PICTURES)
    with pytest.raises(ModelMismatchError, match="expected 1×1×2×2"):
        encode_latents(vae, PIXELS, strategies="tiled", tile=16, overlap=0, predict=False)


def test_pictures_of_one_size_whose_latents_differ_are_refused() -> None:
    numbers = count(1)
    vae = Strange(lambda latent: latent[:, : next(numbers)], OF_PICTURES)
    with pytest.raises(ModelMismatchError, match="for another of its size"):
        encode_latents(vae, PIXELS, strategies="tiled", tile=64, predict=False)
