from inspect import unwrap  # the tests' own checks of types would refuse these sizes first
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import ConfigError, ModelMismatchError

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "empty"),
        (torch.zeros(0, 3, 16, 16), "no picture"),
        (np.zeros((0, 16, 16, 3), np.uint8), "no picture"),
        ([torch.zeros(3, 16, 16), torch.zeros(3, 16, 24)], "picture 1 is 3×16×24"),
        (torch.zeros(1, 5, 16, 16), "channels"),
        (torch.zeros(1, 4, 16, 16), "4 channels"),
        (torch.zeros(1, 16, 16), "holds the 3 channels"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.int32), "int32"),
        ("a.png", "str"),
    ],
    ids=[
        "empty list",
        "zero frames",
        "zero frames in an array",
        "mixed sizes",
        "channels",
        "a latent",
        "a mask",
        "integers",
        "text",
    ],
)
def test_pictures_that_are_none_are_refused(kl: "Sample", frames: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_latents(kl.vae, frames)


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ((), "empty"),
        (("direct", "direct"), "names a strategy twice"),
        (("magic",), "'magic'"),
        ("tile", "'tile'"),
    ],
)
def test_strategies_that_make_no_sense_are_refused(kl: "Sample", strategies: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        encode_latents(kl.vae, kl.pixels, strategies=strategies)


@pytest.mark.parametrize("size", [64.0, "64", (64, 64), [64], float("nan")])
@pytest.mark.parametrize("name", ["tile", "overlap"])
def test_a_size_that_is_no_whole_number_is_refused_by_name(kl: "Sample", name: str, size: Any) -> None:
    for work, given in ((encode_latents, kl.pixels), (decode_latents, kl.latent)):
        with pytest.raises(ConfigError, match=rf"^{name}: .* is no whole number of pixels"):
            unwrap(work)(kl.vae, given, **{name: size})


def test_a_size_may_be_a_whole_number_of_numpy(kl: "Sample") -> None:
    sizes: dict[str, Any] = {"tile": np.int64(32), "overlap": np.int32(8)}
    _, record = unwrap(encode_latents)(kl.vae, kl.pixels, strategies="tiled", **sizes)
    tile = record.attempts[0].tile
    assert tile is not None
    assert (tile.height, tile.width, type(tile.height)) == (32, 32, int)


def test_tiles_that_cannot_work_are_refused_before_anything_is_tried(kl: "Sample") -> None:
    with pytest.raises(ConfigError, match="multiple of the VAE's factor 8"):
        encode_latents(kl.vae, kl.pixels, tile=60)


def test_a_vae_without_encode_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no encode"):
        encode_latents(object(), torch.zeros(1, 3, 16, 16))


def test_a_vae_that_gives_no_tensor_is_said_so() -> None:
    class Mute:
        def encode(self, pixels: Tensor) -> str:
            return "latent"

    with pytest.raises(ModelMismatchError, match="str"):
        encode_latents(Mute(), torch.zeros(1, 3, 16, 16))


def test_a_vae_of_odd_shapes_is_not_cut_into_tiles() -> None:
    class Odd:
        def encode(self, pixels: Tensor) -> Tensor:
            return pixels[..., :5, :7]

    with pytest.raises(ModelMismatchError, match="not a whole number"):
        encode_latents(Odd(), torch.zeros(1, 3, 64, 64), strategies=("tiled",))
