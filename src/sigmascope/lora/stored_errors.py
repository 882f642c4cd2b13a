"""The true error of rounded factors at every rank, without forming their product.

‖A − L·X‖² = ‖A‖² − 2·tr(LᵀA·Xᵀ) + tr((LᵀL)(X·Xᵀ)), and LᵀA is at hand. For L and X cut to their first r columns
and rows, the traces are sums over the leading r×r parts, so one pass gives the error of every rank.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.precision import in_double
from sigmascope.lora.projection import Projection

_CANCELLED: Final = 1e-2
"""Share of ‖A‖² that the error must keep: below, float32's rounding of the products (10⁻⁷ of ‖A‖²) would show."""
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

    Where little is left, the products are formed again in float64.

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
    return errors.clamp_min(0.0)


def _errors(factors: StoredFactors, projection: Projection, total_energy: float) -> Tensor:
    right = in_double(factors.right)
    shared = (projection.products * right).sum(dim=1).cumsum(0)
    own = (projection.gram * (right @ right.mT)).cumsum(0).cumsum(1).diagonal()
    start = torch.full((1,), total_energy, dtype=torch.float64, device=right.device)
    return torch.cat([start, total_energy - 2.0 * shared + own])


def _project_in_double(matrix: Tensor, left: Tensor) -> Projection:
    """LᵀA in float64, widening a few rows at a time."""
    wide = in_double(left)
    products = wide.new_zeros(left.shape[1], matrix.shape[1])
    rows = max(1, _ROWS // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        part = slice(start, start + rows)
        products += wide[part].mT @ in_double(matrix[part])
    return Projection(wide.mT @ wide, products)
