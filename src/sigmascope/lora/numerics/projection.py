"""What a matrix does to a few given left directions: the singular values of its projection onto their span."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.numerics.small_matrices import symmetric_eigen
from sigmascope.lora.precision import gram_in_double, in_double


@dataclass(frozen=True, eq=False)
class Projection:
    """P·A with P the orthogonal projection onto the span of L's columns, all in float64.

    The directions' Gram matrix G = LᵀL is taken into account exactly: with Tᵀ·G·T = 1 the columns of L·T are
    orthonormal whatever rounding did to L, so the energies are those that the span really holds.

    Attributes:
        gram: (j, j), G.
        products: (j, n), LᵀA.
    """

    gram: Float[Tensor, "j j"]
    products: Float[Tensor, "j n"]

    @cached_property
    def white(self) -> Float[Tensor, "j r"]:
        """T, leaving out directions that depend on others."""
        values, vectors = symmetric_eigen(self.gram)
        kept = values > torch.finfo(torch.float32).eps ** 2 * values[0]
        white: Tensor = vectors[:, kept] * values[kept].clamp_min(torch.finfo(torch.float64).tiny).rsqrt()
        return white

    @property
    def energies(self) -> Float[Tensor, " r"]:
        """The squared singular values of P·A, falling."""
        return self._eigen[0]

    @property
    def coordinates(self) -> Float[Tensor, "j r"]:
        """L·coordinates are the left singular vectors of P·A."""
        return self.white @ self._eigen[1]

    @property
    def images(self) -> Float[Tensor, "r n"]:
        """σᵢvᵢᵀ: the right singular vectors, each times its singular value."""
        return self.coordinates.mT @ self.products

    @property
    def least_squares(self) -> Float[Tensor, "j n"]:
        """The X with the smallest ‖A − L·X‖: G⁻¹LᵀA."""
        return self.white @ (self.white.mT @ self.products)

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        rows = self.white.mT @ self.products
        energies, turn = symmetric_eigen(rows @ rows.mT)
        return energies.clamp_min(0.0), turn


def project(matrix: Float[Tensor, "m n"], left: Float[Tensor, "m j"]) -> Projection:
    """Project a matrix onto the span of some directions, which need not be orthogonal.

    Args:
        matrix: A, float32 or float64. The product LᵀA runs in that precision.
        left: L, in the same dtype.
    """
    return Projection(gram_in_double(left), in_double(left.mT @ matrix))
