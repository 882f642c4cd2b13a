"""How much two changes of one weight share, from Gram matrices as small as their ranks.

With up = Q·R and downᵀ = P·S, the spaces that ΔW = up·down acts in are those of Q·U and P·V for R·Sᵀ = U·Σ·Vᵀ. R and
S come from the Cholesky factors of upᵀup and down·downᵀ, and the cosines of two changes from upₐᵀup_b and
downₐ·down_bᵀ: no basis as long as the weight is formed (CholeskyQR; Yamamoto et al., ETNA 44, 2015). Squares cost
digits, so factors that are nearly dependent are compared by `subspaces.bases_of`.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspection.subspaces import bases_of, kept_values, subspace_overlap
from sigmascope.lora.precision import in_double

_WORST_CONDITION: Final = 1e3
"""The bases are off by its square times float64's precision: 10⁻¹⁰ here."""


@dataclass(frozen=True, slots=True)
class SharedSpaces:
    """Two changes A and B of one weight.

    Attributes:
        columns: `subspace_overlap` of the spaces that they write to, 0 to 1.
        rows: The same of those that they read from.
        ranks: How many directions each has.
        norms: ‖ΔA‖ and ‖ΔB‖.
        inner: <ΔA, ΔB>.
    """

    columns: float
    rows: float
    ranks: tuple[int, int]
    norms: tuple[float, float]
    inner: float


def shared_spaces(a: LoraFactors, b: LoraFactors) -> SharedSpaces:
    """Compare two changes of one weight, on the device of the first.

    Raises:
        ModelMismatchError: They change weights of different shape.
    """
    one, two = _Spaces.of(a), _Spaces.of(b)
    inner = a.inner(b)
    if one is None or two is None:
        return _by_bases(a, b, inner)
    columns = one.columns.mT @ (in_double(a.up).mT @ in_double(b.up)) @ two.columns
    rows = one.rows.mT @ (in_double(a.down) @ in_double(b.down).mT) @ two.rows
    ranks = len(one.values), len(two.values)
    return SharedSpaces(_share(columns), _share(rows), ranks, (one.norm, two.norm), inner)


def _share(cosines: Tensor) -> float:
    return min(1.0, float(cosines.square().sum()) / min(cosines.shape))


@dataclass(frozen=True, slots=True, eq=False)
class _Spaces:
    """up·columns and downᵀ·rows are orthonormal bases, of as many directions as there are values."""

    columns: Tensor
    rows: Tensor
    values: Tensor

    @property
    def norm(self) -> float:
        return float(self.values.norm())

    @classmethod
    def of(cls, factors: LoraFactors) -> "_Spaces | None":
        """None if the factors are too nearly dependent, or zero."""
        up, down = in_double(factors.up), in_double(factors.down)
        left, right = _triangle(up.mT @ up), _triangle(down @ down.mT)
        if left is None or right is None:
            return None
        u, values, vh = torch.linalg.svd((left[0] @ right[0].mT).mul(factors.scale))
        kept = kept_values(values)
        if kept == 0:
            return None
        return cls(left[1] @ u[:, :kept], right[1] @ vh[:kept].mT, values[:kept])


def _triangle(gram: Tensor) -> tuple[Tensor, Tensor] | None:
    """R and R⁻¹ for Gram = RᵀR, with the lengths of the vectors taken out before the condition is looked at."""
    lengths = gram.diagonal().sqrt()
    if not bool((lengths > 0.0).all()):
        return None
    lower, failed = torch.linalg.cholesky_ex(gram / torch.outer(lengths, lengths))
    if int(failed):
        return None
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower.mT, identity, upper=True)
    if not float(lower.norm() * inverse.norm()) < _WORST_CONDITION * len(gram):
        return None
    return lower.mT * lengths, inverse / lengths[:, None]


def _by_bases(a: LoraFactors, b: LoraFactors, inner: float) -> SharedSpaces:
    one, two = bases_of(a), bases_of(b)
    columns, rows = (
        min(1.0, subspace_overlap(*pair)) for pair in ((one.columns, two.columns), (one.rows, two.rows))
    )
    norms = float(one.values.norm()), float(two.values.norm())
    return SharedSpaces(columns, rows, (len(one.values), len(two.values)), norms, inner)
