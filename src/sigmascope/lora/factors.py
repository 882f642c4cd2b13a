"""The two factors of a low-rank weight change, and their algebra.

LoRA (Hu et al., arXiv 2106.09685) writes the change of a weight W (out, in) as

    ΔW = s · up · down,    up (out, r),  down (r, in),  s = alpha / r.

Whatever r×r matrices suffice for is computed from them, without forming ΔW. A
convolution weight (out, in, kh, kw) is treated as the matrix (out, in·kh·kw). Sums run in float64: a
float32 dot over millions of values is low by about 0.1 %, which makes errors look better than they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import frexp, isfinite, sqrt
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.linalg import (
    as_float64,
    at_least_float32,
    frobenius_norm,
    gram_in_double,
    in_dtype,
    matrix_shape,
)

# 9999 stored in bfloat16 reads back as 9984, in float16 as 10000.
_SMALLEST_STORED_FULL_RANK = 9984.0

NUMBER_FOR_ALPHA: Final = "Set alpha to the rank, or to what the LoRA was trained with."
_PIECE: Final = 1 << 20  # elements: 4 MiB in float32
# Between these, a library's product of matrices gathers its whole sum before it adds it to what was there.
_LARGEST_RANK_IN_ONE_PASS: Final = 128
_LEAST_SIDE_IN_ONE_PASS: Final = 32

_SMALLEST_PIVOT: Final = 1e-2
"""Of a Cholesky factor of unit columns: the factor's error is at most about its inverse square times float64's precision."""
CANCELLATION_SHARE: Final = 1e-10
"""Share of ‖ΔW‖² below which ‖a‖² − 2<a,b> + ‖b‖² is mostly rounding, though it is summed in float64."""


def scale_of_factors(alpha: float, rank: int, weight_shape: Sequence[int]) -> float:
    """As `LoraFactors.scale`."""
    if alpha > rank and alpha >= _SMALLEST_STORED_FULL_RANK and rank >= min(matrix_shape(weight_shape)):
        return 1.0
    return alpha / rank


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """ΔW = scale · up · down, for one weight.

    Attributes:
        up: (out, r), floating point. LoRA's B.
        down: (r, in·kh·kw), on the same device. LoRA's A.
        alpha: The numerator of the scale alpha / r.
        weight_shape: Shape of the weight that is changed: (out, in) or (out, in, kh, kw).

    Raises:
        LoraFormatError: The factors are not matrices of one rank ≥ 1, or do not fit `weight_shape`.
        NonFiniteError: alpha is NaN or infinite.
    """

    up: Tensor
    down: Tensor
    alpha: float
    weight_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        out_features, in_features = matrix_shape(self.weight_shape)
        if not (self.up.is_floating_point() and self.down.is_floating_point()):
            raise LoraFormatError(
                f"LoRA factors are {self.up.dtype} and {self.down.dtype}, not floating point."
            )
        if self.up.ndim != 2 or self.down.ndim != 2 or self.up.shape[1] != self.down.shape[0]:
            raise LoraFormatError(
                f"up {tuple(self.up.shape)} and down {tuple(self.down.shape)} are not matrices of one rank.",
                hint="Expected up (out, rank) and down (rank, in).",
            )
        if self.rank < 1:
            raise LoraFormatError("rank 0 changes nothing.", hint="Leave the module out of the LoRA.")
        if (self.up.shape[0], self.down.shape[1]) != (out_features, in_features):
            raise LoraFormatError(
                f"up {tuple(self.up.shape)} and down {tuple(self.down.shape)} change a weight of "
                f"({self.up.shape[0]}, {self.down.shape[1]}), but the weight is {self.weight_shape}.",
                hint=f"Expected up ({out_features}, rank) and down (rank, {in_features}).",
            )
        if not isfinite(self.alpha):
            raise NonFiniteError(f"alpha is {self.alpha}.", hint=NUMBER_FOR_ALPHA)

    @property
    def rank(self) -> int:
        """The inner dimension r, whatever the numerical rank of the product."""
        return self.up.shape[1]

    @property
    def scale(self) -> float:
        """The factor alpha / rank, or 1 for factors that are the whole ΔW with an alpha of 9999.

        Tools that are asked for "rank 9999" may store alpha 9999 with factors of rank min(out, in), the most that
        there is. Those factors are already the whole change.
        """
        return scale_of_factors(self.alpha, self.rank, self.weight_shape)

    @property
    def parameters(self) -> int:
        """Number of stored values: r·(out + in)."""
        return self.up.numel() + self.down.numel()

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW as a tensor of `weight_shape`.

        The product runs in float32 or wider and is then rounded once to `dtype`.
        """
        compute = at_least_float32(dtype)
        product = (self.up.to(compute) @ self.down.to(compute)).mul(self.scale)
        return product.to(dtype).reshape(self.weight_shape)

    def inner(self, other: "LoraFactors") -> float:
        """Frobenius inner product <ΔW₁, ΔW₂> of two changes of the same weight.

        tr(ΔW₁ᵀΔW₂) = s₁s₂ · Σᵢⱼ (up₁ᵀup₂)ᵢⱼ (down₁ down₂ᵀ)ᵢⱼ, two r₁×r₂ matrices, in float64. If the ranks
        exceed the weight's own size, the changes themselves are smaller and are formed.

        Raises:
            ModelMismatchError: The two change weights of different shape.
        """
        _require_same_weight([self, other])
        if self.rank * other.rank > self.up.shape[0] * self.down.shape[1]:
            changes = [as_float64(pair.up) @ as_float64(pair.down) for pair in (self, other)]
            return self.scale * other.scale * float((changes[0] * changes[1]).sum())
        ups = as_float64(self.up).mT @ as_float64(other.up)
        downs = as_float64(self.down) @ as_float64(other.down).mT
        return self.scale * other.scale * float((ups * downs).sum())

    def frobenius_norm(self) -> float:
        """‖ΔW‖, from ‖ΔW‖² = s²·tr((upᵀup)(down downᵀ)), in float64."""
        return sqrt(max(self.inner(self), 0.0))

    def cosine(self, other: "LoraFactors") -> float:
        """<ΔW₁, ΔW₂> / (‖ΔW₁‖·‖ΔW₂‖), 0 when either change is zero.

        Raises:
            ModelMismatchError: The two change weights of different shape.
        """
        norms = self.frobenius_norm() * other.frobenius_norm()
        return self.inner(other) / norms if norms > 0.0 else 0.0

    def grams(self) -> "tuple[Float[Tensor, 'r r'], Float[Tensor, 'r r']]":
        """upᵀup and down·downᵀ, in float64."""
        return gram_in_double(self.up), gram_in_double(self.down.mT)

    def singular_values(self, grams: tuple[Tensor, Tensor] | None = None) -> Float[Tensor, " k"]:
        """The min(r, out, in) largest singular values of ΔW, falling, in float64; any others are zero.

        up = Q₁R₁ and downᵀ = Q₂R₂ give ΔW = Q₁ (s·R₁R₂ᵀ) Q₂ᵀ, so they are those of the small middle, for which
        neither Q is formed. R₁ and R₂ are the Cholesky factors of the Gram matrices, which is several times as fast as
        Householder QR; where squaring would cost more than four digits, it is QR.

        Args:
            grams: As `grams` gives them, if the caller has them.
        """
        cores: list[Tensor] = []
        for place, columns in enumerate((self.up, self.down.mT)):
            is_tall = (
                columns.shape[0] >= columns.shape[1]
            )  # of a wide one the Gram matrix may be larger than all else
            gram = None if not is_tall else gram_in_double(columns) if grams is None else grams[place]
            triangle = None if gram is None else _triangle(gram)
            cores.append(_by_householder(columns) if triangle is None else triangle)
        values: Tensor = torch.linalg.svdvals((cores[0] @ cores[1].mT).mul(self.scale))
        return values

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "LoraFactors":
        """The same factors on another device or in another dtype; float64 as `in_dtype` makes it."""
        up, down = (factor if dtype is None else in_dtype(factor, dtype) for factor in (self.up, self.down))
        return replace(self, up=up.to(device), down=down.to(device))

    @staticmethod
    def concatenate(parts: "Sequence[LoraFactors]", weights: Sequence[float] | None = None) -> "LoraFactors":
        """Give Σ wᵢΔWᵢ exactly, as one pair of the summed rank: up = [w₁s₁up₁ … ], down = [down₁; … ].

        Args:
            parts: Changes of one weight, at least one.
            weights: A factor for each; 1 when left out.

        Returns:
            Factors with alpha = rank, in the widest dtype of the parts but no less than float32.

        Raises:
            LoraFormatError: No parts, or not one weight for each.
            ModelMismatchError: The parts change weights of different shape.
        """
        factors = [1.0] * len(parts) if weights is None else list(weights)
        if not parts or len(factors) != len(parts):
            raise LoraFormatError(f"{len(parts)} LoRAs with {len(factors)} weights cannot be added.")
        _require_same_weight(parts)
        dtype = at_least_float32(*(factor.dtype for part in parts for factor in (part.up, part.down)))
        scaled = [
            part.up.to(dtype) * (weight * part.scale) for part, weight in zip(parts, factors, strict=True)
        ]
        up = torch.cat(scaled, dim=1)
        down = torch.cat([part.down.to(dtype) for part in parts], dim=0)
        return LoraFactors(up, down, float(up.shape[1]), parts[0].weight_shape)

    def orthogonal_form(
        self,
    ) -> tuple[Float[Tensor, "out k"], Float[Tensor, "k l"], Float[Tensor, "inner l"]]:
        """Give Q₁, s·R₁R₂ᵀ, Q₂ in float64, with ΔW = Q₁ (s·R₁R₂ᵀ) Q₂ᵀ and orthonormal columns in both Q.

        k = min(r, out) and l = min(r, in·kh·kw): a matrix no larger than r×r holds all that there is to know about ΔW.
        """
        left, left_core = torch.linalg.qr(as_float64(self.up))
        right, right_core = torch.linalg.qr(as_float64(self.down).mT)
        return left, (left_core @ right_core.mT).mul(self.scale), right


def singular_values_together(stacked: "Float[Tensor, 'n 2 r r']") -> "list[Float[Tensor, ' r'] | None]":
    """What `LoraFactors.singular_values` gives for several pairs of factors of one rank at a scale of 1, in few operations.

    Args:
        stacked: Pairs as `LoraFactors.grams` gives them, of factors no wider than the weight.

    Returns:
        The values of each; None where squaring would cost more than four digits, so that each must be asked by itself.
    """
    lengths = stacked.diagonal(dim1=-2, dim2=-1).sqrt()
    units = lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
    lower, failed = torch.linalg.cholesky_ex(stacked / (units.unsqueeze(-1) * units.unsqueeze(-2)))
    pivots = lower.diagonal(dim1=-2, dim2=-1).amin(dim=-1)
    is_exact = ((lengths.amin(dim=-1) > 0.0) & (failed == 0) & (pivots >= _SMALLEST_PIVOT)).all(dim=1).cpu()
    triangles = lower.mT * lengths.unsqueeze(-2)
    exact = iter(torch.linalg.svdvals((triangles[:, 0] @ triangles[:, 1].mT)[is_exact.to(stacked.device)]))
    return [next(exact) if good else None for good in is_exact.tolist()]


def _triangle(gram: Float[Tensor, "r r"]) -> Tensor | None:
    """R with RᵀR = `gram`; None where the columns, scaled to length 1, are too dependent for it to be accurate."""
    lengths = gram.diagonal().sqrt()
    if not bool((lengths > 0.0).all()):
        return None
    lower, failed = torch.linalg.cholesky_ex(gram / torch.outer(lengths, lengths))
    if int(failed) or float(lower.diagonal().min()) < _SMALLEST_PIVOT:
        return None
    triangle: Tensor = lower.mT * lengths
    return triangle


def _by_householder(columns: Tensor) -> Tensor:
    core: Tensor = torch.linalg.qr(as_float64(columns), mode="r").R
    return core


def _require_same_weight(parts: Sequence[LoraFactors]) -> None:
    shapes = sorted({part.weight_shape for part in parts})
    if len(shapes) > 1:
        raise ModelMismatchError(
            f"the LoRAs change weights of different shapes: {', '.join(map(str, shapes))}.",
            hint="Combine LoRAs of the same base model, module by module.",
        )


def difference_norm(one: LoraFactors, other: LoraFactors) -> float:
    """‖ΔW₁ − ΔW₂‖ of two changes of one weight, without forming either.

    ‖a‖² − 2<a,b> + ‖b‖² from Gram matrices loses what is below 10⁻⁸ of the norms; there the difference is
    written as one pair of factors, whose QR does not cancel.

    Raises:
        ModelMismatchError: They change weights of different shape.
    """
    energies = one.inner(one), other.inner(other)
    squared = energies[0] - 2.0 * one.inner(other) + energies[1]
    if squared > CANCELLATION_SHARE * max(energies):
        return sqrt(squared)
    wide = [pair.to(dtype=torch.float64) for pair in (one, other)]
    _, core, _ = LoraFactors.concatenate(wide, [1.0, -1.0]).orthogonal_form()
    return float(torch.linalg.matrix_norm(core))


def norm_bound(factors: LoraFactors) -> float:
    """An upper bound of ‖ΔW‖: the scale times ‖up‖·‖down‖."""
    return abs(factors.scale) * frobenius_norm(factors.up) * frobenius_norm(factors.down)


def row_pieces(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of several matrices side by side, on the CPU few enough to stay in the processor's cache.

    Args:
        matrices: Of as many rows each; the first says how long rows are, and where.
    """
    rows, inner = matrices[0].shape
    size = max(_PIECE // max(inner, 1), 1) if matrices[0].device.type == "cpu" else rows
    for start in range(0, rows, size):
        yield tuple(matrix[start : start + size] for matrix in matrices)


def add_product(total: Tensor, up: Tensor, down: Tensor, strength: float) -> None:
    """Total += strength · up·down, rounded as if the product were formed first.

    One pass does both if that changes no bit: the strength must be a power of two, so that scaling a factor is exact,
    and the sum over the rank must be complete before `total` is added. With a large rank or a narrow matrix it would
    not be, and would be rounded several times at the size of `total`.

    Args:
        total: A matrix, changed in place.
        up: (out, r), of its dtype and on its device, as the next.
        down: (r, in).
        strength: A finite factor.
    """
    sides = (*total.shape, _LEAST_SIDE_IN_ONE_PASS)
    exact = abs(frexp(strength)[0]) == 0.5
    if exact and up.shape[1] <= _LARGEST_RANK_IN_ONE_PASS and min(sides) == _LEAST_SIDE_IN_ONE_PASS:
        total.addmm_(up, down, alpha=strength)
    else:
        total.add_(torch.mm(up, down), alpha=strength)
