"""Take what a LoRA adds to a weight off ΔW, a few rows at a time, and say how far rounding may be off."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors

Change = LoraFactors | WeightChange

_MOST_ROWS: Final = 256
_UNIT_ROUNDOFF: Final = 2.0**-24  # of float32
_ROUNDINGS_OF_OTHER_KINDS: Final = (
    100.0  # unit roundoffs of its size that such a change may be off by, and more
)


@dataclass(frozen=True, slots=True, eq=False)
class Subtraction:
    """How ΔW becomes ΔW − s·B·A.

    Attributes:
        take_off: Changes a block of rows in place; called with which rows they are, and the block.
        rows: The least number of rows at which the product is efficient.
        magnitude: m of `rounding_bound`.
        roundings: k of `rounding_bound`.
    """

    take_off: Callable[[slice, Tensor], object]
    rows: int
    magnitude: float
    roundings: float

    def rounding_bound(self, delta_norm: float) -> float:
        """Norm that the rounding of float32 products may reach: k·u·(‖ΔW‖ + m), with u = 2⁻²⁴.

        For factors of rank r, m = |s|·Σᵢ‖bᵢ‖‖aᵢ‖ and k = √(r + 1): rounding errors of r summands behave as a
        random walk (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
        Comput. 41, 2019), and the sum bounds ‖|B||A|‖.
        """
        return self.roundings * _UNIT_ROUNDOFF * (delta_norm + self.magnitude)


def subtraction(change: Change, base: Tensor, dtype: torch.dtype) -> Subtraction:
    """Prepare a change for a calculation in `dtype`.

    Args:
        change: Factors, or any other kind, which is formed as a whole here.
        base: The weight that is changed, in any floating-point dtype; only some kinds look at its values.
        dtype: float32 or float64.

    Raises:
        ModelMismatchError: The change is none of such a weight.
        LoraFormatError: The change cannot be formed.
    """
    if isinstance(change, LoraFactors):
        return _of_factors(change, dtype)
    formed = change.delta(base, dtype)
    whole = formed.reshape(formed.shape[0] if formed.ndim > 1 else 1, -1)
    magnitude = float(torch.linalg.vector_norm(whole))
    return Subtraction(lambda rows, block: block.sub_(whole[rows]), 1, magnitude, _ROUNDINGS_OF_OTHER_KINDS)


def _of_factors(factors: LoraFactors, dtype: torch.dtype) -> Subtraction:
    up, down, scale = factors.up.to(dtype), factors.down.to(dtype), factors.scale
    for one, other in ((up, down), (down, up)):
        gain = _scaled_identity(one)
        if gain is not None:
            return _of_one_matrix(other, gain * scale)

    def take_off(rows: slice, block: Tensor) -> None:
        block.addmm_(up[rows], down, alpha=-scale)

    sizes = torch.linalg.vector_norm(up, dim=0) * torch.linalg.vector_norm(down, dim=1)
    magnitude = abs(scale) * float(sizes.sum())
    return Subtraction(take_off, min(factors.rank, _MOST_ROWS), magnitude, math.sqrt(factors.rank + 1))


def _of_one_matrix(matrix: Tensor, gain: float) -> Subtraction:
    """A LoRA of full rank is often ΔW itself beside a scaled identity: no product is needed, and none rounds."""
    magnitude = abs(gain) * float(torch.linalg.vector_norm(matrix))
    return Subtraction(lambda rows, block: block.sub_(matrix[rows], alpha=gain), 1, magnitude, 2.0)


def _scaled_identity(matrix: Tensor) -> float | None:
    """The number c of a matrix that is c times the identity."""
    size = matrix.shape[0]
    if matrix.shape[1] != size:
        return None
    diagonal = matrix.diagonal()
    gain = diagonal[0]
    is_one = bool((diagonal == gain).all()) and int(matrix.count_nonzero()) == size
    return float(gain) if is_one else None
