"""Where two changes of one weight act: the spaces that their columns and rows span.

The columns of ΔW (its left singular vectors) are what the change can write, its rows (the right ones) what it
reads. For orthonormal bases U₁ (m, r₁) and U₂ (m, r₂) the singular values of U₁ᵀU₂ are the cosines of the
principal angles between the spaces (Björck and Golub, Math. Comp. 27, 1973).
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.factors import LoraFactors

_NOISE: Final = 1e-6
"""Singular values below this share of the largest are rounding of the stored factors, not directions."""


@dataclass(frozen=True, eq=False)
class ChangeBases:
    """Orthonormal bases of the space a change writes to and of the one it reads from.

    Attributes:
        columns: (out, r), left singular vectors.
        rows: (in·kh·kw, r), right singular vectors.
        values: (r,), the singular values, falling and above rounding.
    """

    columns: Float[Tensor, "out r"]
    rows: Float[Tensor, "inner r"]
    values: Float[Tensor, " r"]


def bases_of(factors: LoraFactors) -> ChangeBases:
    """Give the singular vectors of ΔW that are more than rounding, in float64."""
    left, core, right = factors.orthogonal_form()
    u, sigma, vh = torch.linalg.svd(core, full_matrices=False)
    kept = kept_values(sigma)
    return ChangeBases(left @ u[:, :kept], right @ vh[:kept].mT, sigma[:kept])


def kept_values(sigma: Float[Tensor, " k"]) -> int:
    """How many of falling singular values are more than rounding."""
    return int((sigma > _NOISE * sigma[0]).sum()) if float(sigma[0]) > 0.0 else 0


def subspace_overlap(one: Float[Tensor, "n r"], other: Float[Tensor, "n s"]) -> float:
    """‖U₁ᵀU₂‖² / min(r, s), the mean squared cosine of the principal angles.

    1 where one space holds the other, 0 where they are orthogonal (the measure of section 7.2 of Hu et al.,
    arXiv 2106.09685); 0 too when either is empty. Two random spaces have max(r, s) / n.

    Args:
        one: Orthonormal columns.
        other: The same, of the same length.
    """
    smaller = min(one.shape[1], other.shape[1])
    return float((one.mT @ other).square().sum()) / smaller if smaller else 0.0
