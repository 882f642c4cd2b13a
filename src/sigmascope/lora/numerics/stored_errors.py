"""The true error of rounded factors at every rank, without forming their product.

‖A − L·X‖² = ‖A‖² − 2·tr(LᵀA·Xᵀ) + tr((LᵀL)(X·Xᵀ)), and LᵀA is at hand. For L and X cut to their first r columns
and rows, the traces are sums over the leading r×r parts, so one pass gives the error of every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.numerics.projection import Projection
from sigmascope.lora.precision import in_double

_CANCELLED: Final = 1e-2
"""Share of ‖A‖² that the error must keep: below, float32's rounding of the products (10⁻⁷ of ‖A‖²) would show."""
_NOTHING_LEFT: Final = 1e-9
"""The same of float64 products, whose sums over millions of values are off by up to 10⁻¹³ of ‖A‖²."""
_ROWS: Final = 1 << 20  # elements widened at a time


@dataclass(frozen=True, eq=False)
class StoredFactors:
    """L (m, r) and X (r, n) as they are read back from the file, widened to the matrix's dtype."""

    left: Float[Tensor, "m r"]
    right: Float[Tensor, "r n"]


def stored_errors(
    matrix: Float[Tensor, "m n"], factors: StoredFactors, projection: Projection, total_energy: float
) -> Float[Tensor, " ranks"]:
    """‖A − L·X‖² for the first 0 … r columns of L and rows of X, float64, where the matrix lies.

    Where little is left, the products are formed again in float64; where next to nothing is, what is left is
    formed itself. So each is right to 10⁻⁴ of itself, or as far as `total_energy` is.

    Args:
        matrix: A.
        factors: L and X.
        projection: Of A onto L's columns.
        total_energy: ‖A‖².
    """
    errors = _errors(factors, projection, total_energy)
    if float(errors[-1]) < _CANCELLED * total_energy:
        precise = _project_in_double(matrix, factors.left)
        errors = _errors(factors, precise, frobenius_norm(matrix) ** 2)
    if float(errors[-1]) < _NOTHING_LEFT * total_energy:
        errors = _errors_of_rest(matrix, factors)
    return errors.clamp_min(0.0)


def _errors(factors: StoredFactors, projection: Projection, total_energy: float) -> Tensor:
    right = in_double(factors.right)
    shared = (projection.products * right).sum(dim=1).cumsum(0)
    own = (projection.gram * (right @ right.mT)).cumsum(0).cumsum(1).diagonal()
    start = torch.full((1,), total_energy, dtype=torch.float64, device=right.device)
    return torch.cat([start, total_energy - 2.0 * shared + own])


def _errors_of_rest(matrix: Tensor, factors: StoredFactors) -> Tensor:
    """From E = A − L·X itself: without the last columns of L and rows of X it grows by L₊X₊, and nothing cancels.

    ‖E + L₊X₊‖² = ‖E‖² + 2·tr(L₊ᵀE·X₊ᵀ) + tr((L₊ᵀL₊)(X₊X₊ᵀ)).
    """
    left, right = in_double(factors.left), in_double(factors.right)
    energy, products = left.new_zeros(1), torch.zeros_like(right)
    for part in _parts(matrix):
        rest = torch.addmm(in_double(matrix[part]), left[part], right, alpha=-1.0)
        energy += rest.square().sum()
        products += left[part].mT @ rest
    shared = (products * right).sum(dim=1).flip(0).cumsum(0)
    own = ((left.mT @ left) * (right @ right.mT)).flip(0, 1).cumsum(0).cumsum(1).diagonal()
    return torch.cat([energy, energy + 2.0 * shared + own]).flip(0)


def _project_in_double(matrix: Tensor, left: Tensor) -> Projection:
    """LᵀA in float64, widening a few rows at a time."""
    wide = in_double(left)
    products = wide.new_zeros(left.shape[1], matrix.shape[1])
    for part in _parts(matrix):
        products += wide[part].mT @ in_double(matrix[part])
    return Projection(wide.mT @ wide, products)


def _parts(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, _ROWS // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)
