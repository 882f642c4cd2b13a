"""Planted changes of a weight: how their singular values fall is chosen, their directions are random."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """How the singular values of a change fall.

    A fine-tune's change looks like a head whose singular values follow a power law, over a floor of full rank.

    Attributes:
        alpha: The head's values are i^-alpha, i = 1, 2, …
        head: Their number, or the matrix's smaller side when that is less.
        noise: Share of the energy ‖Δ‖² that a full-rank Gaussian floor holds, 0 to 1.
        exact: When above 0, the change has this rank and no floor, as a merged LoRA has.
    """

    alpha: float = 0.7
    head: int = 256
    noise: float = 0.3
    exact: int = 0


SPECTRA = {
    "default": Spectrum(),
    "noisy": Spectrum(noise=0.9),
    "flat": Spectrum(alpha=0.3, noise=0.1),
    "exact": Spectrum(exact=16),
}


def planted_change(
    shape: tuple[int, ...], spectrum: Spectrum, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """A change of norm 1, in float32.

    Args:
        shape: (out, in) or (out, in, kh, kw).
        spectrum: How its singular values fall.
        generator: Where the directions come from.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(spectrum.exact or spectrum.head, rows, columns)
    # Gaussian columns are orthogonal up to 1/√length: near enough for a spectrum, and far cheaper than QR.
    left = torch.randn(rows, rank, generator=generator).div_(math.sqrt(rows))
    right = torch.randn(columns, rank, generator=generator).div_(math.sqrt(columns))
    values = torch.arange(1, rank + 1, dtype=torch.float32).pow(-spectrum.alpha)
    change = (left * values) @ right.T
    change.div_(change.norm())
    if spectrum.exact == 0 and spectrum.noise > 0:
        floor = torch.randn(rows, columns, generator=generator)
        scale = math.sqrt(spectrum.noise) / float(floor.norm())
        change.mul_(math.sqrt(1 - spectrum.noise)).add_(floor, alpha=scale)
        change.div_(change.norm())
    return change.view(shape)
