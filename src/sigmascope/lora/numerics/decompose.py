"""One layer's change as factors in storage precision, with the error of what is really stored."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.numerics.full_rank import factors_full_rank
from sigmascope.lora.numerics.projection import project
from sigmascope.lora.numerics.stored_errors import StoredFactors, stored_errors
from sigmascope.lora.numerics.subspace import leading_images, left_directions, to_ordinary_scale
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.shapes import matrix_shape, max_rank


@dataclass(frozen=True, slots=True, eq=False)
class StoredChange:
    """Factors as they go into the file, on the device where they were made.

    Attributes:
        factors: In storage dtype, alpha = rank; their columns go by falling singular value.
        spectrum: The singular values found, and ‖ΔW‖². None of them at full rank, which needs no SVD.
        errors: (r + 1,), float64: ‖ΔW − up·down‖² of the rounded factors cut to their first 0 … r columns.
            At full rank only the last is known, and the others are NaN.
    """

    factors: LoraFactors
    spectrum: Spectrum
    errors: Float[Tensor, " ranks"]

    @property
    def error_norm(self) -> float:
        """‖ΔW − up·down‖ of the rounded factors."""
        return math.sqrt(max(float(self.errors[-1]), 0.0))

    def cut(self, rank: int) -> "StoredChange":
        """Keep the first `rank` columns, at least one: the best of that rank, since singular values fall."""
        if rank >= self.factors.rank:
            return self
        up, down = self.factors.up[:, :rank], self.factors.down[:rank]
        factors = LoraFactors(up, down, float(rank), self.factors.weight_shape)
        return replace(self, factors=factors, errors=self.errors[: rank + 1])


def decompose(
    delta: Float[Tensor, "*shape"],
    rank: int,
    dtype: torch.dtype,
    *,
    norm: float | None = None,
    rounded: Float[Tensor, "*shape"] | None = None,
    with_spectrum: bool = False,
    seed: int = 0,
) -> StoredChange:
    """Factorise ΔW at a rank and round the factors to their storage dtype.

    At full rank there is nothing to choose, so ΔW itself is stored beside a scaled identity: exact up to the
    storage dtype, and without the rounding that the singular vectors on either side would add.

    Below it, up is rounded first and down is then the least-squares answer to the rounded up, which takes back
    what the first rounding cost.

    Args:
        delta: Change of a weight, (out, in) or (out, in, kh, kw), float32 or float64, finite.
        rank: How many singular values to keep; the layer's own limit when it is larger. Fewer are kept where
            the change has no more.
        dtype: Storage dtype.
        norm: ‖ΔW‖ where it is known, to 10⁻⁶ of itself or better.
        rounded: ΔW in bfloat16, where it is at hand.
        with_spectrum: Decompose at full rank too, to have the singular values.
        seed: Of the iteration's random start.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
        SigmascopeError: The decomposition does not converge.
    """
    shape = tuple(delta.shape)
    if rank >= max_rank(shape) and not with_spectrum:
        return at_full_rank(delta, dtype)
    work, unit = to_ordinary_scale(delta.reshape(matrix_shape(shape)), norm)
    coarse = rounded.reshape(work.shape) if rounded is not None and unit == 1.0 else None
    total = (frobenius_norm(work) if norm is None else norm / unit) ** 2
    images = leading_images(work, rank, total_energy=total, seed=seed, rounded=coarse)
    share = math.sqrt(unit)
    up = (left_directions(images, rank) * share).to(dtype)
    _require_storable(delta, up)
    wide_up = up.to(work.dtype) / share  # what is stored, on the scale of the work
    found = project(work, wide_up)
    down = (found.least_squares.to(work.dtype) * share).to(dtype)
    _require_storable(delta, down)
    errors = stored_errors(work, StoredFactors(wide_up, down.to(work.dtype) / share), found, total)
    values = found.energies.sqrt() * unit
    if len(values) < min(rank, max_rank(shape)):
        values = torch.cat([values, values.new_zeros(1)])  # no more can be stored, and a zero says so
    spectrum = Spectrum(values, total * unit**2, shape)
    return StoredChange(LoraFactors(up, down, float(up.shape[1]), shape), spectrum, errors.cpu() * unit**2)


def at_full_rank(delta: Float[Tensor, "*shape"], dtype: torch.dtype) -> StoredChange:
    """ΔW itself beside a scaled identity, without an SVD.

    Args:
        delta: As for `decompose`.
        dtype: Storage dtype.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
    """
    factors = factors_full_rank(delta).to(dtype=dtype)
    _require_storable(delta, factors.up, factors.down)
    errors = torch.full((factors.rank + 1,), math.nan, dtype=torch.float64)
    errors[-1] = _full_rank_error(delta.reshape(matrix_shape(delta.shape)), factors) ** 2
    spectrum = Spectrum(errors.new_empty(0), frobenius_norm(delta) ** 2, tuple(delta.shape))
    return StoredChange(factors, spectrum, errors)


def _full_rank_error(matrix: Tensor, factors: LoraFactors) -> float:
    """‖ΔW − up·down‖ where one of the two is a power of two on the diagonal, so that nothing is to multiply."""
    values, diagonal = (factors.up, factors.down) if _is_tall(matrix) else (factors.down, factors.up)
    scale = float(diagonal[0, 0])
    error = torch.empty_like(matrix)
    torch.mul(values.to(matrix.dtype), scale, out=error)
    return frobenius_norm(error.sub_(matrix))


def _is_tall(matrix: Tensor) -> bool:
    """Whether `factors_full_rank` puts the values into `up`."""
    return matrix.shape[1] <= matrix.shape[0]


def _require_storable(delta: Tensor, *factors: Tensor) -> None:
    if not all(bool(torch.isfinite(factor).all()) for factor in factors):
        raise NonFiniteError(
            f"the factors of a change of size {float(delta.abs().max()):.3g} do not fit {factors[0].dtype}.",
            hint="Use --save_precision float or bf16.",
        )
