"""Modules without a config: their layers are copied to be counted, and nothing that others have put on them."""

import gc
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sigmascope.pipeline.peak_prediction import dry_run


class Own(nn.Module):
    """A VAE of one's own that keeps tensors where no module keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 8, stride=8)
        self.cache: list[Tensor | None] = [torch.zeros(4), None]
        self.last = torch.zeros(4)

    def encode(self, pixels: Tensor) -> Tensor:
        self.last = self.convolution(pixels)
        self.cache[0] = self.last
        return self.last


def test_what_stands_in_the_place_of_a_method_is_not_called() -> None:
    vae: Any = Own()
    called, own = [], vae.encode

    def watched(pixels: Tensor) -> Tensor:
        called.append(pixels)
        return own(pixels)  # type: ignore[no-any-return]

    vae.encode = watched
    assert dry_run(vae, (1, 3, 64, 64), "encoding").output_shape == (1, 4, 8, 8)
    assert called == []
    assert vae.encode is watched


def test_the_vaes_own_caches_are_as_they_were() -> None:
    vae = Own()
    cache, last = vae.cache[0], vae.last
    dry_run(vae, (1, 3, 64, 64), "encoding")
    assert vae.cache[0] is cache
    assert vae.last is last


class Looking(Own):
    """Sees from inside its twin's run which large tensors there are in RAM."""

    found: ClassVar[list[int]] = []

    def encode(self, pixels: Tensor) -> Tensor:
        everything = (one for one in gc.get_objects() if type(one) is Tensor and not one.is_meta)
        self.found.append(len({one.data_ptr() for one in everything if one.numel() == 1 << 20}))
        return super().encode(pixels)


def test_no_tensor_is_copied_wherever_the_module_keeps_it() -> None:
    vae = Looking()
    vae.last, vae.cache = torch.zeros(1 << 20), [torch.zeros(1 << 20), None]
    dry_run(vae, (1, 3, 64, 64), "encoding")
    assert vae.found == [2]
