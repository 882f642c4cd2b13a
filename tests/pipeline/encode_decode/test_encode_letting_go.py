import gc
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sigmascope import encode_latents

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample


def test_an_error_that_the_vae_keeps_holds_no_activation() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 8, stride=8)
            self.errors: list[BaseException] = []
            self.activations: list[weakref.ref[Tensor]] = []

        def encode(self, pixels: Tensor) -> Tensor:
            latent: Tensor = self.convolution(pixels)
            self.activations.append(weakref.ref(latent))
            if len(self.errors) == 0:
                try:
                    raise MemoryError
                except MemoryError as error:
                    self.errors.append(error)
                    raise
            return latent

    vae = Keeping()
    latent, _ = encode_latents(vae, torch.zeros(1, 3, 32, 32))
    gc.collect()
    assert [one() is not None for one in vae.activations] == [False, False, False, False, True][-len(vae.activations):]  # fmt: skip
    assert latent.shape == (1, 4, 4, 4)


def test_the_pictures_stay_as_they_are(kl: "Sample") -> None:
    shown = (torch.rand(1, 3, 32, 32) * 255).to(torch.uint8)
    before = shown.clone()
    encode_latents(kl.vae, shown, strategies=("tiled",), tile=16)
    assert torch.equal(shown, before)
