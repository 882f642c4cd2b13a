"""A weight change as factors in storage precision, with the true error of what is stored at every rank.

By Eckart and Young (1936), of all matrices of rank r the one nearest to A in Frobenius norm is
A_r = Σ_{i≤r} σᵢ uᵢ vᵢᵀ, and its error is ‖A − A_r‖² = Σ_{i>r} σᵢ²: the energy that is discarded. The leading
singular vectors are found exactly where that is cheap, else by block Krylov iteration.

The error of whatever subspace is found is known exactly: with orthonormal columns U,
‖A − U Uᵀ A‖² = ‖A‖² − ‖Uᵀ A‖². Only its distance from the optimum is an estimate.

The error of the rounded factors L and X that are stored is known too, without forming their product:
‖A − L·X‖² = ‖A‖² − 2·tr(LᵀA·Xᵀ) + tr((LᵀL)(X·Xᵀ)), and LᵀA is at hand. For L and X cut to their first r columns
and rows, the traces are sums over the leading r×r parts, so one pass gives the error of every rank.

This module reads no files and chooses no device: the work is done on the matrix's device.

`truncatable` chooses the quicker way: QR of both factors and the SVD of their small core, or forming ΔW and
decomposing it as far as needed. With a metric, the factors are weighed first, then cut, then mapped back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod, sqrt
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.factors import CANCELLATION_SHARE, LoraFactors, difference_norm, norm_bound
from sigmascope.lora.linalg import (
    ALL_VALUES_FROM_ONE_IN,
    Spectrum,
    as_float64,
    at_least_float32,
    blocked_norm,
    frobenius_norm,
    gram_in_double,
    leading_subspace,
    matrix_shape,
    max_rank,
    symmetric_eigen,
)
from sigmascope.lora.parallel import require_wanted
from sigmascope.lora.statistics import LayerMetric

_MAX_EXCESS_ERROR: Final = 1e-3
"""Largest excess of the error over its optimum, as a share of the optimum."""
_ALL_VALUES_UP_TO_SIDE: Final = 128  # up to this min(m, n) all singular values cost no more than some
_ORDINARY_EXPONENT: Final = 20  # powers of two around 1 in which a typical entry needs no rescaling


_NotConverged: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined] # not in its __all__
LAPACK_UP_TO = 256
"""min(m, n) up to which LAPACK's SVD takes no longer than a Gram matrix and its eigenvectors."""


_MIN_ERROR_SHARE_IN_FLOAT32: Final = 1e-2
"""Below this share of ‖A‖², the rounding of float32 products (10⁻⁷ of ‖A‖²) would show in the error."""
_MIN_ERROR_SHARE_IN_FLOAT64: Final = 1e-9
"""The same for float64 products, whose sums over millions of values are off by up to 10⁻¹³ of ‖A‖²."""
_WIDENED_ELEMENTS: Final = 1 << 18  # elements widened at a time, which a core's cache holds

# For `truncatable` and what it gives.
_MAX_FACTOR_ROUNDING: Final = 0.5
"""Largest error of rounding both factors, in eps of the dtype; it is about 0.3."""
_ROUNDED_ZERO_SHARE: Final = 1e-12
"""Singular values below this share of the largest are zeros, rounded by float64 arithmetic."""
_FORMED_ABOVE_RANK: Final = 256  # rank of factors from which ΔW may be formed, where few values are wanted


@dataclass(frozen=True, slots=True, eq=False)
class RoundedFactors:
    """Factors as they go into the file, on the device where they were made.

    Attributes:
        factors: In storage dtype, alpha = rank; their columns go by falling singular value.
        spectrum: The singular values found, and ‖ΔW‖². At full rank there are no values, since no SVD is needed.
        errors: (r + 1,), float64: ‖ΔW − up·down‖² of the rounded factors cut to their first 0 … r columns.
            At full rank, only the last is known; the others are NaN.
        weighted: The same errors in the metric, if one was given (the spectrum is then in that metric too); otherwise
            `errors`.
    """

    factors: LoraFactors
    spectrum: Spectrum
    errors: Float[Tensor, " ranks"]
    weighted: Float[Tensor, " ranks"]

    @property
    def error_norm(self) -> float:
        """‖ΔW − up·down‖ of the rounded factors."""
        return math.sqrt(max(float(self.errors[-1]), 0.0))

    def cut(self, rank: int) -> "RoundedFactors":
        """Keep the first `rank` columns, at least one: the best of that rank, since singular values fall."""
        if rank >= self.factors.rank:
            return self
        up, down = self.factors.up[:, :rank], self.factors.down[:rank]
        factors = LoraFactors(up, down, float(rank), self.factors.weight_shape)
        return replace(
            self, factors=factors, errors=self.errors[: rank + 1], weighted=self.weighted[: rank + 1]
        )


def decompose(
    delta: Float[Tensor, "*shape"],
    rank: int,
    dtype: torch.dtype,
    *,
    norm: float | None = None,
    rounded: Float[Tensor, "*shape"] | None = None,
    with_spectrum: bool = False,
    metric: LayerMetric | None = None,
    memory: Float[Tensor, "m n"] | None = None,
) -> RoundedFactors:
    """Factorise ΔW at a rank and round the factors to their storage dtype.

    At full rank there is nothing to choose, so ΔW itself is stored, with a scaled identity as the other factor. This is
    exact up to the storage dtype, and avoids the rounding of singular vectors on both sides.

    Below full rank, up is rounded first. Then down is the least-squares solution for the rounded up, which makes up for
    that rounding.

    With a metric, the nearest matrix of a rank is that of SᵀΔW·R, mapped back; least squares are taken there too.

    Args:
        delta: Change of a weight, (out, in) or (out, in, kh, kw), float32 or float64, finite.
        rank: How many singular values to keep, at most the layer's own limit. Fewer are kept if the change has fewer.
        dtype: Storage dtype.
        norm: ‖ΔW‖ if it is known, to 10⁻⁶ of itself or better.
        rounded: ΔW in bfloat16, if the caller has it.
        with_spectrum: Decompose at full rank too, to get the singular values.
        metric: The metric in which the error is minimised; by default the Frobenius norm.
        memory: A buffer for SᵀΔW·R, of the matrix's shape and dtype, if the caller has one to reuse.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
        SigmascopeError: The decomposition does not converge.
    """
    shape = tuple(delta.shape)
    if rank >= max_rank(shape) and not with_spectrum:
        return at_full_rank(delta, dtype, metric)
    if metric is not None:
        return _decompose_weighted(delta, rank, dtype, metric, norm, memory)
    work, unit = to_ordinary_scale(delta.reshape(matrix_shape(shape)), norm)
    coarse = rounded.reshape(work.shape) if rounded is not None and unit == 1.0 else None
    total = (frobenius_norm(work) if norm is None else norm / unit) ** 2
    _, images = leading_vectors(work, rank, total_energy=total, rounded=coarse)
    share = math.sqrt(unit)
    up = (left_directions(images, rank) * share).to(dtype)
    _require_storable(delta, up)
    wide_up = up.to(work.dtype) / share  # what is stored, on the scale of the work
    factors = project(work, wide_up)
    down = (factors.least_squares.to(work.dtype) * share).to(dtype)
    _require_storable(delta, down)
    errors = stored_errors(work, wide_up, down.to(work.dtype) / share, factors, total)
    spectrum = _spectrum(factors, rank, unit, total, shape)
    errors = errors.cpu() * unit**2
    return RoundedFactors(LoraFactors(up, down, float(up.shape[1]), shape), spectrum, errors, errors)


def _decompose_weighted(
    delta: Tensor,
    rank: int,
    dtype: torch.dtype,
    metric: LayerMetric,
    norm: float | None,
    memory: Tensor | None,
) -> RoundedFactors:
    """`decompose` in a metric."""
    shape = tuple(delta.shape)
    plain = delta.reshape(matrix_shape(shape))
    weighed = metric.weigh(plain, memory)
    weighed_norm = blocked_norm(weighed)
    work, unit = to_ordinary_scale(weighed, weighed_norm)
    total = (weighed_norm / unit) ** 2
    if total == 0.0:
        raise NonFiniteError("these statistics give its change no weight.")
    vectors, images = leading_vectors(work, rank, total_energy=total, steep=True)
    turn, values = _singular_directions(images, rank)
    # Mapped back, left and right vectors may be of any length: both get the same, which rounding needs.
    up = metric.unweigh_up(images @ turn) * unit
    down = metric.unweigh_down((vectors @ turn * values).mT)
    lengths = torch.linalg.vector_norm(up, dim=0), torch.linalg.vector_norm(down, dim=1)
    tiny = torch.finfo(work.dtype).tiny
    up = (up * (lengths[1].clamp_min(tiny) / lengths[0].clamp_min(tiny)).sqrt()).to(dtype)
    _require_storable(delta, up)
    wide_up = up.to(work.dtype)
    weighed_up = metric.weigh_up(wide_up) / unit
    little_is_left = total - float(as_float64(values).square().sum()) < _MIN_ERROR_SHARE_IN_FLOAT32 * total
    factors = (_project_in_double if little_is_left else project)(work, weighed_up)
    down = metric.unweigh_down(factors.least_squares.to(work.dtype)).to(dtype)
    _require_storable(delta, down)
    wide_down = down.to(work.dtype)
    weighted = stored_errors(work, weighed_up, metric.weigh_down(wide_down), factors, total)
    energy = (frobenius_norm(plain) if norm is None else norm) ** 2
    errors = stored_errors(plain, wide_up, wide_down, project(plain, wide_up), energy)
    spectrum = _spectrum(factors, rank, unit, total, shape)
    stored = LoraFactors(up, down, float(up.shape[1]), shape)
    return RoundedFactors(stored, spectrum, errors.cpu(), weighted.cpu() * unit**2)


def _spectrum(
    projection: "Projection", rank: int, unit: float, total: float, shape: tuple[int, ...]
) -> Spectrum:
    values = projection.energies.sqrt() * unit
    if len(values) < min(rank, max_rank(shape)):
        values = torch.cat([values, values.new_zeros(1)])  # no more can be stored, and a zero says so
    return Spectrum(values, total * unit**2, shape)


def _require_storable(delta: Tensor, *factors: Tensor) -> None:
    if not all(bool(torch.isfinite(factor).all()) for factor in factors):
        raise NonFiniteError(
            f"the factors of a change of size {float(delta.abs().max()):.3g} do not fit {factors[0].dtype}.",
            hint="Use --save_precision float or bf16.",
        )


def at_full_rank(
    delta: Float[Tensor, "*shape"], dtype: torch.dtype, metric: LayerMetric | None = None
) -> RoundedFactors:
    """ΔW itself and a scaled identity as factors, without an SVD.

    Args:
        delta: As for `decompose`.
        dtype: Storage dtype.
        metric: The metric of the reported size and rounding error; by default the Frobenius norm.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
    """
    factors = factors_full_rank(delta).to(dtype=dtype)
    _require_storable(delta, factors.up, factors.down)
    matrix = delta.reshape(matrix_shape(delta.shape))
    # One of the two is a power of two on the diagonal, so that nothing is to multiply.
    is_tall = matrix.shape[1] <= matrix.shape[0]
    values, diagonal = (factors.up, factors.down) if is_tall else (factors.down, factors.up)
    rest = values.to(matrix.dtype).mul(float(diagonal[0, 0])).sub_(matrix)
    errors = torch.full((factors.rank + 1,), math.nan, dtype=torch.float64)
    errors[-1] = frobenius_norm(rest) ** 2
    weighted, energy = errors, frobenius_norm(delta) ** 2
    if metric is not None:
        weighted = errors.clone()
        weighted[-1] = frobenius_norm(metric.weigh(rest)) ** 2
        energy = frobenius_norm(metric.weigh(matrix)) ** 2
    spectrum = Spectrum(errors.new_empty(0), energy, tuple(delta.shape))
    return RoundedFactors(factors, spectrum, errors, weighted)


def factors_full_rank(delta: Tensor) -> LoraFactors:
    """Write ΔW as factors without loss and without an SVD: ΔW·c times identity/c on the smaller side.

    c is a power of two, so that no bit is lost in any binary format. It brings the largest value near its own
    square root, which keeps a ΔW of 10⁻⁵ out of the range where float16 loses bits.

    Args:
        delta: The change of a weight, (out, in) or (out, in, kh, kw), floating point.

    Returns:
        Factors of rank min(out, in·kh·kw) with alpha = rank, in delta's dtype.

    Raises:
        LoraFormatError: `delta` is not a matrix or convolution.
        NonFiniteError: `delta` holds NaN or Inf.
    """
    require_finite(delta)
    shape = tuple(delta.shape)
    out_features, in_features = matrix_shape(shape)
    matrix = delta.detach().reshape(out_features, in_features)
    gain = _balancing_power(float(matrix.abs().max()))
    size = min(out_features, in_features)
    identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device) / gain
    up, down = (matrix * gain, identity) if in_features <= out_features else (identity, matrix * gain)
    return LoraFactors(up, down, float(size), shape)


def _balancing_power(largest: float) -> float:
    """The power of two nearest to 1/√largest, between 1 and 2¹⁰."""
    if largest <= 0.0:
        return 1.0
    return float(2.0 ** min(max(round(-math.log2(largest) / 2), 0), 10))


def to_ordinary_scale(work: Float[Tensor, "m n"], norm: float | None = None) -> tuple[Tensor, float]:
    """Divide by a power of four if the squares of the entries would leave the range of float32.

    Args:
        work: float32 or float64, finite.
        norm: ‖work‖ if it is known, which saves a pass over the entries.

    Returns:
        The matrix, unchanged if its scale is ordinary, and the power that it was divided by.
    """
    typical = frobenius_norm(work) if norm is None else norm
    if typical == 0.0 or not math.isfinite(typical):
        return work, 1.0
    exponent = math.frexp(typical / math.sqrt(work.numel()))[1]
    if abs(exponent) <= _ORDINARY_EXPONENT:
        return work, 1.0
    half = exponent // 2
    # In two: of a subnormal change, 4^-half may be more than float32 holds.
    return work * 2.0**-half * 2.0**-half, 4.0**half


def leading_vectors(
    work: Float[Tensor, "m n"],
    rank: int,
    *,
    total_energy: float,
    rounded: Float[Tensor, "m n"] | None = None,
    steep: bool = False,
) -> tuple[Float[Tensor, "n k"], Float[Tensor, "m k"]]:
    """The leading right singular vectors V, or a basis of an equally good subspace, and their images A·V.

    The images approximate the leading left singular vectors better than V approximates the right ones, because A damps
    all others. There are at most `rank` columns.

    Args:
        work: float32 or float64, finite, of ordinary scale (see `to_ordinary_scale`).
        rank: At least 1.
        total_energy: ‖work‖², summed in float64.
        rounded: `work` in bfloat16, if the caller has it.
        steep: Whether its singular values are likely to fall fast, as those of a weighed change do.
    """
    smaller = min(work.shape)
    kept = min(rank, smaller)
    few = smaller > _ALL_VALUES_UP_TO_SIDE and kept * ALL_VALUES_FROM_ONE_IN <= smaller
    if few and work.dtype == torch.float32 and total_energy > 0.0:
        subspace = leading_subspace(
            work,
            kept,
            total_energy=total_energy,
            tolerance=_MAX_EXCESS_ERROR,
            rounded=rounded,
            steep=steep,
        )
        if subspace.converged:
            return subspace.vectors, subspace.images
    vectors = exact_right_subspace(work, kept)
    return vectors, work @ vectors


def left_directions(images: Float[Tensor, "m k"], rank: int) -> Float[Tensor, "m r"]:
    """The leading left directions among images, each times √σ, by falling σ.

    Directions that are only rounding are left out. At least one column is returned: zeros if the images are zero.
    """
    directions: Tensor = images @ _singular_directions(images, rank)[0]
    return directions


def _singular_directions(
    images: Float[Tensor, "m k"], rank: int
) -> tuple[Float[Tensor, "k r"], Float[Tensor, " r"]]:
    """T and σ: of images A·V, with V orthonormal, A·V·T are left singular vectors times √σ, and V·T right ones over √σ."""
    energies, vectors = symmetric_eigen(gram_in_double(images))
    real = energies > _rounding(images.dtype) * energies.sum()
    kept = max(1, min(rank, int(real.sum())))
    leading = torch.where(real[:kept], energies[:kept], 1.0)
    return (vectors[:, :kept] * leading**-0.25).to(images), leading.sqrt().to(images)


def _rounding(dtype: torch.dtype) -> float:
    """Share of the energy below which a squared singular value is rounding, which scales with ‖A‖, not with σ₁."""
    return torch.finfo(dtype).eps ** 2 if dtype == torch.float32 else torch.finfo(dtype).eps


@dataclass(frozen=True, eq=False)
class Projection:
    """P·A with P the orthogonal projection onto the span of L's columns, all in float64.

    The directions' Gram matrix G = LᵀL is taken into account exactly: with Tᵀ·G·T = 1 the columns of L·T are
    orthonormal whatever rounding did to L, so the energies are those that the span really holds.

    Attributes:
        gram: (j, j), G.
        products: (j, n), LᵀA.
        energy: ‖A‖² in float64, where LᵀA was computed in float64 too.
    """

    gram: Float[Tensor, "j j"]
    products: Float[Tensor, "j n"]
    energy: float | None = None

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
    return Projection(gram_in_double(left), as_float64(left.mT @ matrix))


def stored_errors(
    matrix: Float[Tensor, "m n"],
    left: Float[Tensor, "m r"],
    right: Float[Tensor, "r n"],
    projection: Projection,
    total_energy: float,
) -> Float[Tensor, " ranks"]:
    """‖A − L·X‖² for the first 0 … r columns of L and rows of X, float64, where the matrix lies.

    If little is left, the products are formed again in float64; if almost nothing is, the remainder itself is formed.
    So each error is right to 10⁻⁴ of itself, or as far as `total_energy` is.

    Args:
        matrix: A.
        left: L as it is read back from the file, widened to the matrix's dtype.
        right: X, the same.
        projection: Of A onto L's columns.
        total_energy: ‖A‖².
    """
    errors = _errors(right, projection, total_energy)
    if float(errors[-1]) < _MIN_ERROR_SHARE_IN_FLOAT32 * total_energy:
        exact = _project_in_double(matrix, left) if projection.energy is None else projection
        assert exact.energy is not None
        errors = _errors(right, exact, exact.energy)
    if float(errors[-1]) < _MIN_ERROR_SHARE_IN_FLOAT64 * total_energy:
        errors = _errors_of_rest(matrix, left, right)
    return errors.clamp_min(0.0)


def _errors(right: Tensor, projection: Projection, total_energy: float) -> Tensor:
    right = as_float64(right)
    shared = (projection.products * right).sum(dim=1).cumsum(0)
    own = (projection.gram * (right @ right.mT)).cumsum(0).cumsum(1).diagonal()
    start = torch.full((1,), total_energy, dtype=torch.float64, device=right.device)
    return torch.cat([start, total_energy - 2.0 * shared + own])


def _project_in_double(matrix: Tensor, left: Tensor) -> Projection:
    """LᵀA and ‖A‖² in float64, widening a few rows at a time."""
    wide = as_float64(left)
    products, energy = wide.new_zeros(left.shape[1], matrix.shape[1]), wide.new_zeros(())
    for part in _parts(matrix):
        piece = as_float64(matrix[part])
        products.addmm_(wide[part].mT, piece)
        energy += torch.linalg.vector_norm(piece).square()
    return Projection(wide.mT @ wide, products, float(energy))


def _parts(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, _WIDENED_ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


def _errors_of_rest(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """From E = A − L·X itself: without the last columns of L and rows of X it grows by L₊X₊, and nothing cancels.

    ‖E + L₊X₊‖² = ‖E‖² + 2·tr(L₊ᵀE·X₊ᵀ) + tr((L₊ᵀL₊)(X₊X₊ᵀ)).
    """
    left, right = as_float64(left), as_float64(right)
    energy, products = left.new_zeros(1), torch.zeros_like(right)
    for part in _parts(matrix):
        rest = torch.addmm(as_float64(matrix[part]), left[part], right, alpha=-1.0)
        energy += rest.square().sum()
        products += left[part].mT @ rest
    shared = (products * right).sum(dim=1).flip(0).cumsum(0)
    own = ((left.mT @ left) * (right @ right.mT)).flip(0, 1).cumsum(0).cumsum(1).diagonal()
    return torch.cat([energy, energy + 2.0 * shared + own]).flip(0)


def exact_right_subspace(matrix: Float[Tensor, "m n"], rank: int) -> Float[Tensor, "n r"]:
    """The `rank` leading right singular vectors, orthonormal columns in the matrix's dtype.

    A large float32 matrix goes through the Gram matrix of its smaller side in float64: squaring the condition
    number there costs the singular values below 10⁻⁸ of the largest, which float32 does not hold either.

    Raises:
        SigmascopeError: The decomposition does not converge.
    """
    if matrix.dtype == torch.float64 or min(matrix.shape) <= LAPACK_UP_TO:
        _, _, vh = full_svd(matrix)
        exact: Tensor = vh[:rank].mT
        return exact
    wide = as_float64(matrix)
    rows, columns = wide.shape
    gram = wide @ wide.mT if rows < columns else wide.mT @ wide
    require_wanted()
    right = torch.linalg.eigh(gram)[1][:, -rank:].flip(1)
    if rows < columns:
        right, _ = torch.linalg.qr(wide.mT @ right)
    narrowed: Tensor = right.to(matrix)
    return narrowed


def full_svd(work: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor, Tensor]:
    """All of U, Σ, Vᵀ; if the quick driver does not converge, the robust one is used.

    Raises:
        SigmascopeError: Neither converges.
    """
    try:
        u, sigma, vh = torch.linalg.svd(work, full_matrices=False)
    except _NotConverged:
        u, sigma, vh = _robust_svd(work)
    return u, sigma, vh


def _robust_svd(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """QR iteration on CUDA, float64 on the CPU: slower, but it converges where divide and conquer does not."""
    try:
        if work.is_cuda:
            u, sigma, vh = torch.linalg.svd(work, full_matrices=False, driver="gesvd")
        else:
            u, sigma, vh = torch.linalg.svd(work.cpu().double(), full_matrices=False)
    except _NotConverged as error:
        raise SigmascopeError(
            f"the SVD of a {work.shape[0]}×{work.shape[1]} matrix did not converge: {error}",
            hint="Run the extraction on another device, or at rank 9999, which needs no SVD.",
        ) from error
    return u.to(work), sigma.to(work), vh.to(work)


def require_finite(matrix: Tensor) -> None:
    """Refuse NaN and Inf.

    Raises:
        NonFiniteError: With how many of them there are.
    """
    if not bool(torch.isfinite(matrix).all()):
        bad = int((~torch.isfinite(matrix)).sum())
        raise NonFiniteError(
            f"{bad} of {matrix.numel()} values of the matrix are NaN or Inf.",
            hint="Check the two checkpoints; diverged training leaves such weights.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Truncated:
    """A change at a lower rank, as it goes into a file.

    Attributes:
        factors: In storage dtype, alpha = rank.
        error_norm: ‖ΔW − up·down‖ of these rounded factors.
        kept_energy: Share of ‖ΔW‖², in the metric if there is one, in the singular values that were kept, 0 to 1,
            before rounding.
        weighted_error: `error_norm` in the metric; None without one.
    """

    factors: LoraFactors
    error_norm: float
    kept_energy: float
    weighted_error: float | None = None


def truncatable(
    factors: LoraFactors, wanted: int, dtype: torch.dtype, metric: LayerMetric | None = None
) -> "Truncatable":
    """Take the quicker way to `wanted` singular values of a change given by factors.

    QR of factors of rank 1280 (a LoRA at full rank) takes a second per layer. If only a few of many values are wanted,
    ΔW is formed and decomposed as in an extraction.

    Args:
        factors: The change.
        wanted: How many singular values are likely to be needed.
        dtype: Storage dtype.
        metric: In which the error is least, in float64; Frobenius norm without.
    """
    if metric is not None:
        return WeighedChange(factors, dtype, metric)
    formed_is_small = prod(factors.weight_shape) <= 4 * factors.parameters
    if factors.rank > _FORMED_ABOVE_RANK and 4 * wanted <= factors.rank and formed_is_small:
        return FormedChange(factors.delta(), dtype)
    return FactoredChange(factors, dtype)


class FactoredChange:
    """A change given by LoRA factors, decomposed by QR of both and the SVD of their small core, in float64.

    Args:
        factors: The change.
        dtype: Storage dtype.
    """

    def __init__(self, factors: LoraFactors, dtype: torch.dtype) -> None:
        self.factors = factors
        self.dtype = dtype
        self.weight_shape = factors.weight_shape
        self.weighted_norm: float | None = None

    def spectrum(self, wanted: int) -> Spectrum:
        """Complete and exact, whatever is wanted."""
        return Spectrum.of_factors(self._decomposed[2], self.weight_shape)

    def cut(self, rank: int) -> Truncated:
        """The nearest change of this rank, at least 1; the unchanged factors if nothing has to be cut.

        Raises:
            NonFiniteError: The factors do not fit the storage dtype.
        """
        if self.factors.rank <= min(rank, max_rank(self.weight_shape)):
            same = self._uncut()
            if same is not None:
                return same
        left, u, sigma = self._decomposed
        kept = max(1, min(rank, int((sigma > _ROUNDED_ZERO_SHARE * sigma[0]).sum())))
        energy = float(sigma.square().sum())
        share = float(sigma[:kept].square().sum()) / energy if energy > 0.0 else 1.0
        stored, error = self._projected((left @ u[:, :kept]) * sigma[:kept].sqrt())
        return Truncated(stored, error, share)

    def _uncut(self) -> Truncated | None:
        """The same factors with the scale in up; None if storing them so would round them too much.

        What is lost is a product of factors itself, [E_up, up]·[down; E_down] with the rounding errors E, so that
        its Gram matrices cancel nothing.
        """
        exact_up, exact_down = as_float64(self.factors.up) * self.factors.scale, as_float64(self.factors.down)
        up, down = exact_up.to(self.dtype), exact_down.to(self.dtype)
        left, right = exact_up - as_float64(up), exact_down
        lost_down = exact_down - as_float64(down)
        if bool(lost_down.any()):
            left, right = torch.cat([left, as_float64(up)], dim=1), torch.cat([right, lost_down])
        squared = float(((left.mT @ left) * (right @ right.mT)).sum())
        error = sqrt(max(squared, 0.0)) if isfinite(squared) else squared
        if not error <= _MAX_FACTOR_ROUNDING * torch.finfo(self.dtype).eps * self.norm:
            return None  # scales far from 1 run out of float16's exponents
        stored = LoraFactors(
            up.to(self.factors.up.device),
            down.to(self.factors.down.device),
            float(self.factors.rank),
            self.weight_shape,
        )
        return Truncated(stored, error, 1.0)

    def _projected(self, wide_up: Float[Tensor, "out r"]) -> tuple[LoraFactors, float]:
        """Round up, then take for down the least-squares answer to the rounded up, L.

        X = (LᵀL)⁻¹·LᵀΔW needs no right singular vectors. The error of the X that is stored is exact:
        ‖ΔW − L·X‖² = ‖ΔW‖² − 2·tr(LᵀΔW·Xᵀ) + tr(LᵀL·X·Xᵀ).
        """
        up = wide_up.to(self.factors.up.device, self.dtype)
        left, own_up, own_down = as_float64(up), as_float64(self.factors.up), as_float64(self.factors.down)
        shared = (left.mT @ own_up).mul(self.factors.scale)
        gram = left.mT @ left
        down = (_solve(gram, shared) @ own_down).to(self.factors.down.device, self.dtype)
        stored = _storable(up, down, self.weight_shape)
        right = as_float64(down)
        agreement = float((shared * (right @ own_down.mT)).sum())
        squared = self.norm**2 - 2.0 * agreement + float((gram * (right @ right.mT)).sum())
        if squared <= CANCELLATION_SHARE * self.norm**2:
            return stored, difference_norm(self.factors, stored)
        return stored, sqrt(squared)

    @cached_property
    def norm(self) -> float:
        """‖ΔW‖, from the singular values if they are computed already, otherwise from Gram matrices.

        0 if the columns cancel, as in a LoRA minus itself: what is left is rounding.
        """
        bound = norm_bound(self.factors)
        norm = 0.0 if "_decomposed" in vars(self) else self.factors.frobenius_norm()
        if norm <= sqrt(CANCELLATION_SHARE) * bound:
            norm = float(self._decomposed[2].norm())
        return norm if norm > _ROUNDED_ZERO_SHARE * bound else 0.0

    @cached_property
    def _decomposed(self) -> tuple[Float[Tensor, "out k"], Float[Tensor, "k l"], Float[Tensor, " l"]]:
        """Q, U, Σ such that the columns of Q·U are the left singular vectors; the right ones are not needed."""
        left, left_core = torch.linalg.qr(as_float64(self.factors.up))
        _, right_core = torch.linalg.qr(as_float64(self.factors.down).mT, mode="r")
        u, sigma, _ = torch.linalg.svd((left_core @ right_core.mT) * self.factors.scale, full_matrices=False)
        return left, u, sigma


def _solve(gram: Float[Tensor, "r r"], right: Float[Tensor, "r k"]) -> Float[Tensor, "r k"]:
    """Solve gram·x = right for columns that differ in length by orders of magnitude.

    Scaled to unit columns the matrix is near the identity, since the columns were orthogonal before rounding.
    """
    lengths = gram.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    scaled = gram / lengths[:, None] / lengths
    scaled.diagonal().fill_(1.0)  # also for a column that rounded to nothing
    answer: Tensor = torch.linalg.solve(scaled, right / lengths[:, None])
    return answer / lengths[:, None]


def _storable(up: Tensor, down: Tensor, weight_shape: tuple[int, ...]) -> LoraFactors:
    if not bool(torch.isfinite(up).all() and torch.isfinite(down).all()):
        raise NonFiniteError(
            f"the factors do not fit {str(up.dtype).removeprefix('torch.')}.",
            hint="Use --save_precision float or bf16.",
        )
    return LoraFactors(up, down, float(up.shape[1]), weight_shape)


class WeighedChange:
    """A change given by factors, cut in a metric: SᵀΔW·R = (Sᵀ·up)·(down·R) is cut and mapped back.

    Args:
        factors: The change.
        dtype: Storage dtype.
        metric: In float64.
    """

    def __init__(self, factors: LoraFactors, dtype: torch.dtype, metric: LayerMetric) -> None:
        self._factors = factors.to(dtype=torch.float64)
        self._metric = metric
        self._weighed = FactoredChange(self._in_metric(self._factors), torch.float64)
        self.dtype = dtype
        self.weight_shape = factors.weight_shape

    def spectrum(self, wanted: int) -> Spectrum:
        """In the metric; complete and exact, whatever is wanted."""
        return self._weighed.spectrum(wanted)

    @cached_property
    def norm(self) -> float:
        """‖ΔW‖."""
        return FactoredChange(self._factors, self.dtype).norm

    @property
    def weighted_norm(self) -> float | None:
        """‖SᵀΔW·R‖."""
        return self._weighed.norm

    def cut(self, rank: int) -> Truncated:
        """As in `FactoredChange`, but nearest in the metric."""
        if self._factors.rank <= min(rank, max_rank(self.weight_shape)):
            same = FactoredChange(self._factors, self.dtype).cut(rank)
            return replace(same, weighted_error=self._weighted_error(same.factors))
        weighed = self._weighed.cut(rank)
        up = self._metric.unweigh_up(weighed.factors.up * weighed.factors.scale)
        down = self._metric.unweigh_down(weighed.factors.down)
        tiny = torch.finfo(torch.float64).tiny
        ratio = (
            down.norm(dim=1).clamp_min(tiny) / up.norm(dim=0).clamp_min(tiny)
        ).sqrt()  # for float16's sake
        stored = _storable((up * ratio).to(self.dtype), (down.T / ratio).T.to(self.dtype), self.weight_shape)
        return Truncated(
            stored,
            difference_norm(self._factors, stored),
            weighed.kept_energy,
            self._weighted_error(stored),
        )

    def _weighted_error(self, stored: LoraFactors) -> float:
        return difference_norm(self._weighed.factors, self._in_metric(stored.to(dtype=torch.float64)))

    def _in_metric(self, factors: LoraFactors) -> LoraFactors:
        up, down = self._metric.weigh_up(factors.up), self._metric.weigh_down(factors.down)
        return replace(factors, up=up, down=down)


class FormedChange:
    """A change that is formed as a whole, and decomposed as far as needed.

    Args:
        delta: ΔW, (out, in) or (out, in, kh, kw), floating point and finite.
        dtype: Storage dtype.
        metric: The metric in which the error is minimised, in the precision of the change; by default the Frobenius
            norm.
        most_values: The most singular values above 0 that it can have; by default as many as its shape allows.
    """

    def __init__(
        self,
        delta: Float[Tensor, "*shape"],
        dtype: torch.dtype,
        metric: LayerMetric | None = None,
        most_values: int | None = None,
    ) -> None:
        self._most_values = most_values
        self._delta = delta.to(at_least_float32(delta.dtype))
        self.dtype = dtype
        self.weight_shape = tuple(self._delta.shape)
        self.norm = frobenius_norm(self._delta)
        self._metric = metric
        self._stored: RoundedFactors | None = None

    @cached_property
    def weighted_norm(self) -> float | None:
        """‖SᵀΔW·R‖; None without a metric."""
        if self._metric is None:
            return None
        return frobenius_norm(self._metric.weigh(self._delta.reshape(matrix_shape(self.weight_shape))))

    def spectrum(self, wanted: int) -> Spectrum:
        """At least the `wanted` largest singular values, or all that there are; in the metric if there is one."""
        return self._decomposed(wanted).spectrum

    def cut(self, rank: int) -> Truncated:
        """The best factors of this rank, as `FactoredChange.cut`; at full rank ΔW itself beside an identity."""
        rank = rank if self._most_values is None else min(rank, self._most_values)
        if rank >= max_rank(self.weight_shape):
            whole = decompose(self._delta, rank, self.dtype, metric=self._metric)
            return Truncated(whole.factors, whole.error_norm, 1.0, self._weighted_error(whole))
        decomposed = self._decomposed(rank)
        stored = decomposed.cut(rank)
        kept = float(decomposed.spectrum.values[: stored.factors.rank].square().sum())
        energy = decomposed.spectrum.total_energy
        share = min(kept / energy, 1.0) if energy > 0.0 else 1.0
        return Truncated(stored.factors, stored.error_norm, share, self._weighted_error(stored))

    def _weighted_error(self, stored: RoundedFactors) -> float | None:
        return None if self._metric is None else sqrt(max(float(stored.weighted[-1]), 0.0))

    def _decomposed(self, rank: int) -> RoundedFactors:
        if self._stored is None or (self._stored.factors.rank < rank and not self._stored.spectrum.complete):
            self._stored = decompose(
                self._delta, rank, self.dtype, norm=self.norm, with_spectrum=True, metric=self._metric
            )
        return self._stored


Truncatable = FactoredChange | WeighedChange | FormedChange
"""One weight's change, to be stored at a rank that its singular values decide."""
