"""A sampler in the style of k-diffusion, with a step around each turn of its loop.

As in k-diffusion, `model(x, sigma)` gives the denoised x, `sigmas` ends with 0, and `callback` gets a dict. The model
here is the ideal denoiser of a small set of pictures (Karras et al. 2022, arXiv 2206.00364, equation 57). It needs no
weights: sampling ends at one of the pictures.

python examples/k_diffusion_loop.py
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sigmascope

Callback = Callable[[dict[str, Any]], None]


class IdealDenoiser(nn.Module):
    """The mean of all pictures, weighted by how likely x is a noisy copy of each.

    Args:
        pictures: (number, channels, height, width).
    """

    pictures: Tensor

    def __init__(self, pictures: Tensor) -> None:
        super().__init__()
        self.register_buffer("pictures", pictures)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Denoise x, of shape (batch, channels, height, width), at sigma, of shape (batch,)."""
        distances = torch.cdist(x.flatten(1), self.pictures.flatten(1)) ** 2
        weights = torch.softmax(-distances / (2 * sigma[:, None] ** 2), dim=1)
        return torch.einsum("bn,nchw->bchw", weights, self.pictures)


def karras_sigmas(steps: int, largest: float = 20.0, smallest: float = 0.02, rho: float = 7.0) -> Tensor:
    """Noise levels by Karras et al. 2022, equation 5, and 0 at the end."""
    ramp = torch.linspace(0, 1, steps)
    sigmas = (largest ** (1 / rho) + ramp * (smallest ** (1 / rho) - largest ** (1 / rho))) ** rho
    return torch.cat([sigmas, torch.zeros(1)])


@torch.no_grad()
def sample_heun(model: nn.Module, x: Tensor, sigmas: Tensor, callback: Callback | None = None) -> Tensor:
    """Heun's method (Karras et al. 2022, algorithm 1): two calls of the model a step, one in the last."""
    ones = x.new_ones(x.shape[0])
    with sigmascope.stage("denoising") as stage:
        for index, (sigma, next_sigma) in enumerate(itertools.pairwise(sigmas)):
            with sigmascope.step():
                denoised = model(x, sigma * ones)
                slope = (x - denoised) / sigma
                moved = x + (next_sigma - sigma) * slope
                if next_sigma > 0:
                    slope = (slope + (moved - model(moved, next_sigma * ones)) / next_sigma) / 2
                    moved = x + (next_sigma - sigma) * slope
                x = moved
            if callback is not None:
                callback({"x": x, "i": index, "sigma": sigma, "denoised": denoised})
    stage.fact("sampler", "heun")
    stage.tensor("result", x)
    return x


def main() -> None:
    """Draw four samples and show where the time went."""
    torch.manual_seed(0)
    pictures = torch.rand(8, 3, 32, 32)
    sigmas = karras_sigmas(18)
    with sigmascope.watch(name="k-diffusion loop") as run:
        sample_heun(IdealDenoiser(pictures), torch.randn(4, 3, 32, 32) * sigmas[0], sigmas)
    run.print()
    run.to_trace("k_diffusion_loop.trace.json")


if __name__ == "__main__":
    main()
