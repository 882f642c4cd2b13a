"""A weight change as factors in storage precision, with the true error of what is stored at every rank.

By Eckart and Young (1936), of all matrices of rank r the one nearest to A in Frobenius norm is
A_r = Σ_{i≤r} σᵢ uᵢ vᵢᵀ, and its error is ‖A − A_r‖² = Σ_{i>r} σᵢ²: the energy that is discarded. The leading
singular vectors are found exactly where that is cheap, else by block Krylov iteration.

Whatever subspace is found, its error is known and not estimated: with orthonormal columns U,
‖A − U Uᵀ A‖² = ‖A‖² − ‖Uᵀ A‖². Only how near that is to the optimum is an estimate.

The error of the rounded factors L and X that are stored is known too, without forming their product:
‖A − L·X‖² = ‖A‖² − 2·tr(LᵀA·Xᵀ) + tr((LᵀL)(X·Xᵀ)), and LᵀA is at hand. For L and X cut to their first r columns
and rows, the traces are sums over the leading r×r parts, so one pass gives the error of every rank.

No files and no choice of device here: the work is done where the matrix lies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError, NonFiniteError, SigmascopeError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.linalg import (
    Spectrum,
    as_float64,
    frobenius_norm,
    gram_in_double,
    leading_subspace,
    matrix_shape,
    max_rank,
    symmetric_eigen,
)
from sigmascope.lora.statistics import LayerMetric

TOLERANCE: Final = 1e-3
"""By default the error may exceed the optimum by at most this share of it."""
_SMALL: Final = 128  # min(m, n) up to which all singular values cost no more than some
_MANY: Final = 5  # so do they where more than one in this many is wanted
_ORDINARY: Final = 20  # powers of two around 1 in which a typical entry needs no rescaling

_NotConverged: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined] # not in its __all__
LAPACK_UP_TO = 256
"""min(m, n) up to which LAPACK's SVD takes no longer than a Gram matrix and its eigenvectors."""

_CANCELLED: Final = 1e-2
"""Share of ‖A‖² that the error must keep: below, float32's rounding of the products (10⁻⁷ of ‖A‖²) would show."""
_NOTHING_LEFT: Final = 1e-9
"""The same of float64 products, whose sums over millions of values are off by up to 10⁻¹³ of ‖A‖²."""
_ROWS: Final = 1 << 20  # elements widened at a time


@dataclass(frozen=True, slots=True, eq=False)
class RoundedFactors:
    """Factors as they go into the file, on the device where they were made.

    Attributes:
        factors: In storage dtype, alpha = rank; their columns go by falling singular value.
        spectrum: The singular values found, and ‖ΔW‖². None of them at full rank, which needs no SVD.
        errors: (r + 1,), float64: ‖ΔW − up·down‖² of the rounded factors cut to their first 0 … r columns.
            At full rank only the last is known, and the others are NaN.
        weighted: The same errors in the metric that was asked for, in which the spectrum is too; `errors` without.
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
    seed: int = 0,
) -> RoundedFactors:
    """Factorise ΔW at a rank and round the factors to their storage dtype.

    At full rank there is nothing to choose, so ΔW itself is stored beside a scaled identity: exact up to the
    storage dtype, and without the rounding that the singular vectors on either side would add.

    Below it, up is rounded first and down is then the least-squares answer to the rounded up, which takes back
    what the first rounding cost.

    In a metric, the nearest matrix of a rank is that of SᵀΔW·R, mapped back; least squares are taken there too.

    Args:
        delta: Change of a weight, (out, in) or (out, in, kh, kw), float32 or float64, finite.
        rank: How many singular values to keep; the layer's own limit when it is larger. Fewer are kept where
            the change has no more.
        dtype: Storage dtype.
        norm: ‖ΔW‖ where it is known, to 10⁻⁶ of itself or better.
        rounded: ΔW in bfloat16, where it is at hand.
        with_spectrum: Decompose at full rank too, to have the singular values.
        metric: In which the error is least; Frobenius norm without.
        seed: Of the iteration's random start.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
        SigmascopeError: The decomposition does not converge.
    """
    shape = tuple(delta.shape)
    if rank >= max_rank(shape) and not with_spectrum:
        return at_full_rank(delta, dtype, metric)
    if metric is not None:
        return _decompose_weighted(delta, rank, dtype, metric, norm=norm, seed=seed)
    work, unit = to_ordinary_scale(delta.reshape(matrix_shape(shape)), norm)
    coarse = rounded.reshape(work.shape) if rounded is not None and unit == 1.0 else None
    total = (frobenius_norm(work) if norm is None else norm / unit) ** 2
    images = leading_images(work, rank, total_energy=total, seed=seed, rounded=coarse)
    share = math.sqrt(unit)
    up = (left_directions(images, rank) * share).to(dtype)
    _require_storable(delta, up)
    wide_up = up.to(work.dtype) / share  # what is stored, on the scale of the work
    factors = project(work, wide_up)
    down = (factors.least_squares.to(work.dtype) * share).to(dtype)
    _require_storable(delta, down)
    errors = stored_errors(work, StoredFactors(wide_up, down.to(work.dtype) / share), factors, total)
    values = factors.energies.sqrt() * unit
    if len(values) < min(rank, max_rank(shape)):
        values = torch.cat([values, values.new_zeros(1)])  # no more can be stored, and a zero says so
    spectrum = Spectrum(values, total * unit**2, shape)
    errors = errors.cpu() * unit**2
    return RoundedFactors(LoraFactors(up, down, float(up.shape[1]), shape), spectrum, errors, errors)


def _decompose_weighted(
    delta: Tensor, rank: int, dtype: torch.dtype, metric: LayerMetric, *, norm: float | None, seed: int
) -> RoundedFactors:
    """`decompose` in a metric."""
    shape = tuple(delta.shape)
    plain = delta.reshape(matrix_shape(shape))
    work, unit = to_ordinary_scale(metric.weigh(plain))
    total = frobenius_norm(work) ** 2
    if total == 0.0:
        raise NonFiniteError("its change has no weight in these statistics.")
    left = left_directions(leading_images(work, rank, total_energy=total, seed=seed), rank)
    # Mapped back, a direction and its image may be of any length: both get the same, which rounding needs.
    up = metric.unweigh_up(left) * unit
    image = metric.unweigh_down(project(work, left).least_squares.to(work.dtype))
    lengths = torch.linalg.vector_norm(up, dim=0), torch.linalg.vector_norm(image, dim=1)
    tiny = torch.finfo(work.dtype).tiny
    up = (up * (lengths[1].clamp_min(tiny) / lengths[0].clamp_min(tiny)).sqrt()).to(dtype)
    _require_storable(delta, up)
    wide_up = up.to(work.dtype)
    weighed_up = metric.weigh_up(wide_up) / unit
    factors = project(work, weighed_up)
    down = metric.unweigh_down(factors.least_squares.to(work.dtype)).to(dtype)
    _require_storable(delta, down)
    wide_down = down.to(work.dtype)
    weighted = stored_errors(work, StoredFactors(weighed_up, metric.weigh_down(wide_down)), factors, total)
    energy = (frobenius_norm(plain) if norm is None else norm) ** 2
    errors = stored_errors(plain, StoredFactors(wide_up, wide_down), project(plain, wide_up), energy)
    values = factors.energies.sqrt() * unit
    if len(values) < min(rank, max_rank(shape)):
        values = torch.cat([values, values.new_zeros(1)])
    spectrum = Spectrum(values, total * unit**2, shape)
    stored = LoraFactors(up, down, float(up.shape[1]), shape)
    return RoundedFactors(stored, spectrum, errors.cpu(), weighted.cpu() * unit**2)


def _require_storable(delta: Tensor, *factors: Tensor) -> None:
    if not all(bool(torch.isfinite(factor).all()) for factor in factors):
        raise NonFiniteError(
            f"the factors of a change of size {float(delta.abs().max()):.3g} do not fit {factors[0].dtype}.",
            hint="Use --save_precision float or bf16.",
        )


def at_full_rank(
    delta: Float[Tensor, "*shape"], dtype: torch.dtype, metric: LayerMetric | None = None
) -> RoundedFactors:
    """ΔW itself beside a scaled identity, without an SVD.

    Args:
        delta: As for `decompose`.
        dtype: Storage dtype.
        metric: In which its size and the error of rounding are told; Frobenius norm without.

    Raises:
        NonFiniteError: A factor does not fit the storage dtype.
    """
    factors = factors_full_rank(delta).to(dtype=dtype)
    _require_storable(delta, factors.up, factors.down)
    matrix = delta.reshape(matrix_shape(delta.shape))
    rest = _full_rank_rest(matrix, factors)
    errors = torch.full((factors.rank + 1,), math.nan, dtype=torch.float64)
    errors[-1] = frobenius_norm(rest) ** 2
    weighted, energy = errors, frobenius_norm(delta) ** 2
    if metric is not None:
        weighted = errors.clone()
        weighted[-1] = frobenius_norm(metric.weigh(rest)) ** 2
        energy = frobenius_norm(metric.weigh(matrix)) ** 2
    spectrum = Spectrum(errors.new_empty(0), energy, tuple(delta.shape))
    return RoundedFactors(factors, spectrum, errors, weighted)


def _full_rank_rest(matrix: Tensor, factors: LoraFactors) -> Tensor:
    """up·down − ΔW where one of the two is a power of two on the diagonal, so that nothing is to multiply."""
    values, diagonal = (factors.up, factors.down) if _is_tall(matrix) else (factors.down, factors.up)
    scale = float(diagonal[0, 0])
    rest = torch.empty_like(matrix)
    torch.mul(values.to(matrix.dtype), scale, out=rest)
    return rest.sub_(matrix)


def _is_tall(matrix: Tensor) -> bool:
    """Whether `factors_full_rank` puts the values into `up`."""
    return matrix.shape[1] <= matrix.shape[0]


def factors_full_rank(delta: Tensor) -> LoraFactors:
    """Write ΔW as factors without loss and without an SVD: ΔW·c times identity/c on the smaller side.

    c is a power of two, so that no bit is lost in any binary format. It brings the largest value near its own
    square root, which keeps a ΔW of 10⁻⁵ out of the range where float16 loses bits.

    Args:
        delta: The change of a weight, (out, in) or (out, in, kh, kw), floating point.

    Returns:
        Factors of rank min(out, in·kh·kw) with alpha = rank, in delta's dtype.

    Raises:
        LoraFormatError: `delta` is no matrix or convolution.
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
    """Divide by a power of four where entries are so small or large that their squares leave float32.

    Args:
        work: float32 or float64, finite.
        norm: ‖work‖ where it is known, which saves a look at every entry.

    Returns:
        The matrix, itself where its scale is ordinary, and the power it was divided by.
    """
    typical = frobenius_norm(work) if norm is None else norm
    if typical == 0.0 or not math.isfinite(typical):
        return work, 1.0
    exponent = math.frexp(typical / math.sqrt(work.numel()))[1]
    if abs(exponent) <= _ORDINARY:
        return work, 1.0
    half = exponent // 2
    return torch.ldexp(work, torch.tensor(-2 * half, device=work.device)), 4.0**half


def leading_images(
    work: Float[Tensor, "m n"],
    rank: int,
    *,
    total_energy: float,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    rounded: Float[Tensor, "m n"] | None = None,
) -> Float[Tensor, "m k"]:
    """The images A·V of the leading right singular vectors V, or of a subspace that is as good.

    Their span holds the leading left singular vectors, better than V does the right ones: A damps what is
    not leading. At most `rank` columns.

    Args:
        work: float32 or float64, finite, of ordinary scale (see `to_ordinary_scale`).
        rank: At least 1.
        total_energy: ‖work‖², summed in float64.
        tolerance: Largest relative excess of the error over the optimum.
        seed: Of the iteration's random start.
        rounded: `work` in bfloat16, where it is at hand.
    """
    smaller = min(work.shape)
    kept = min(rank, smaller)
    few = smaller > _SMALL and kept * _MANY <= smaller
    if few and work.dtype == torch.float32 and total_energy > 0.0:
        subspace = leading_subspace(
            work, kept, total_energy=total_energy, tolerance=tolerance, seed=seed, rounded=rounded
        )
        if subspace.converged:
            return subspace.images
    return work @ exact_right_subspace(work, kept)


def left_directions(images: Float[Tensor, "m k"], rank: int) -> Float[Tensor, "m r"]:
    """The leading left directions among images, each times √σ, by falling σ.

    Directions that are only rounding are left out, but never all of them: of images that are zero, one column
    of zeros is given.
    """
    energies, vectors = symmetric_eigen(gram_in_double(images))
    real = energies > _rounding(images.dtype) * energies.sum()
    kept = max(1, min(rank, int(real.sum())))
    scale = torch.where(real[:kept], energies[:kept], 1.0) ** -0.25
    directions: Tensor = images @ (vectors[:, :kept] * scale).to(images)
    return directions


def _rounding(dtype: torch.dtype) -> float:
    """Share of the energy below which a squared singular value is rounding, which goes by ‖A‖ and not by σ₁."""
    return torch.finfo(dtype).eps ** 2 if dtype == torch.float32 else torch.finfo(dtype).eps


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
    return Projection(gram_in_double(left), as_float64(left.mT @ matrix))


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
    right = as_float64(factors.right)
    shared = (projection.products * right).sum(dim=1).cumsum(0)
    own = (projection.gram * (right @ right.mT)).cumsum(0).cumsum(1).diagonal()
    start = torch.full((1,), total_energy, dtype=torch.float64, device=right.device)
    return torch.cat([start, total_energy - 2.0 * shared + own])


def _project_in_double(matrix: Tensor, left: Tensor) -> Projection:
    """LᵀA in float64, widening a few rows at a time."""
    wide = as_float64(left)
    products = wide.new_zeros(left.shape[1], matrix.shape[1])
    for part in _parts(matrix):
        products += wide[part].mT @ as_float64(matrix[part])
    return Projection(wide.mT @ wide, products)


def _parts(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, _ROWS // matrix.shape[1])
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)


def _errors_of_rest(matrix: Tensor, factors: StoredFactors) -> Tensor:
    """From E = A − L·X itself: without the last columns of L and rows of X it grows by L₊X₊, and nothing cancels.

    ‖E + L₊X₊‖² = ‖E‖² + 2·tr(L₊ᵀE·X₊ᵀ) + tr((L₊ᵀL₊)(X₊X₊ᵀ)).
    """
    left, right = as_float64(factors.left), as_float64(factors.right)
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
    if rows < columns:
        _, vectors = torch.linalg.eigh(wide @ wide.mT)
        right, _ = torch.linalg.qr(wide.mT @ vectors[:, -rank:].flip(1))
    else:
        _, vectors = torch.linalg.eigh(wide.mT @ wide)
        right = vectors[:, -rank:].flip(1)
    narrowed: Tensor = right.to(matrix)
    return narrowed


def full_svd(work: Float[Tensor, "m n"]) -> tuple[Tensor, Tensor, Tensor]:
    """All of U, Σ, Vᵀ; where the quick driver does not converge, the robust one does it.

    Raises:
        SigmascopeError: Neither converges.
    """
    try:
        u, sigma, vh = torch.linalg.svd(work, full_matrices=False)
    except _NotConverged:
        u, sigma, vh = _robust_svd(work)
    return u, sigma, vh


def _robust_svd(work: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """QR iteration on CUDA, float64 on the CPU: slower, and converging where divide and conquer does not."""
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
            hint="Check the two checkpoints; a diverged training leaves such weights.",
        )


@dataclass(frozen=True, eq=False)
class TruncatedSvd:
    """A ≈ up · down, with the singular values and what was kept of ‖A‖².

    The square root of each singular value goes to either side. Rounding to bfloat16 or float16 is relative,
    so it costs the same however the values are split, until float16 runs out of exponent: below 6·10⁻⁵ it
    loses bits. Real differences of fine-tunes have σ far below 1, and √σ in both factors keeps their
    smallest values farthest from that edge.

    Attributes:
        up: (m, r), U·√Σ.
        singular_values: (r,), falling.
        down: (r, n), √Σ·Vᵀ.
        total_energy: ‖A‖², summed in float64.
        kept_energy: Σ_{i≤r} σᵢ².
    """

    up: Float[Tensor, "m r"]
    singular_values: Float[Tensor, " r"]
    down: Float[Tensor, "r n"]
    total_energy: float
    kept_energy: float

    @property
    def rank(self) -> int:
        """The number of singular values kept."""
        return self.up.shape[1]

    @property
    def discarded_energy(self) -> float:
        """‖A − up·down‖², never below 0."""
        return max(self.total_energy - self.kept_energy, 0.0)

    @property
    def relative_error(self) -> float:
        """‖A − up·down‖ / ‖A‖, as a fraction; 0 for a zero matrix."""
        return math.sqrt(self.discarded_energy / self.total_energy) if self.total_energy > 0.0 else 0.0

    def factors(self, weight_shape: tuple[int, ...], dtype: torch.dtype | None = None) -> LoraFactors:
        """Give the pair as LoRA factors with alpha = rank.

        Args:
            weight_shape: (out, in) or (out, in, kh, kw), whose matrix was decomposed.
            dtype: Storage dtype; that of the decomposition when left out.

        Raises:
            LoraFormatError: The factors do not fit `weight_shape`.
        """
        pair = LoraFactors(self.up, self.down, float(self.rank), weight_shape)
        return pair if dtype is None else pair.to(dtype=dtype)


def truncated_svd(
    matrix: Float[Tensor, "m n"], rank: int, *, tolerance: float = TOLERANCE, seed: int = 0
) -> TruncatedSvd:
    """Decompose a matrix and keep the largest `rank` singular values.

    A float64 matrix, a small one, or a large part of any is decomposed exactly; else, in float32, by block
    Krylov iteration until the error is within `tolerance` of the optimum. The energies reported are exact
    either way.

    Args:
        matrix: Finite, on any device.
        rank: At least 1; above min(m, n) it is taken as min(m, n). The result has fewer where the matrix does.
        tolerance: Largest relative excess of the error over the optimum.
        seed: Of the iteration's random start.

    Raises:
        ConfigError: `rank` is below 1.
        NonFiniteError: The matrix holds NaN or Inf.
        SigmascopeError: The decomposition does not converge.
    """
    if rank < 1:
        raise ConfigError(f"a rank of {rank} keeps nothing.", hint="Give a rank of 1 or more.")
    work = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    require_finite(work)
    if work.dtype == torch.float64 or min(work.shape) <= LAPACK_UP_TO:
        return _from_all(work, rank)
    work, unit = to_ordinary_scale(work)
    total = frobenius_norm(work) ** 2
    images = leading_images(work, rank, total_energy=total, tolerance=tolerance, seed=seed)
    left = left_directions(images, rank)
    return _scaled(_from_projection(work, left, total), unit)


def _from_all(work: Tensor, rank: int) -> TruncatedSvd:
    """Cut the full decomposition."""
    u, sigma, vh = full_svd(work)
    kept = min(rank, sigma.shape[0])
    root = sigma[:kept].sqrt()
    energies = sigma.double().square()
    kept_energy = float(energies[:kept].sum())
    return TruncatedSvd(
        up=u[:, :kept] * root,
        singular_values=sigma[:kept].clone(),
        down=root[:, None] * vh[:kept],
        total_energy=kept_energy + float(energies[kept:].sum()),
        kept_energy=kept_energy,
    )


def _scaled(svd: TruncatedSvd, unit: float) -> TruncatedSvd:
    """The decomposition of unit·A."""
    if unit == 1.0:
        return svd
    root = math.sqrt(unit)
    return TruncatedSvd(
        svd.up * root,
        svd.singular_values * unit,
        svd.down * root,
        svd.total_energy * unit * unit,
        svd.kept_energy * unit * unit,
    )


def _from_projection(work: Tensor, left: Tensor, total_energy: float) -> TruncatedSvd:
    """The singular values and vectors of A projected onto the span of some left directions."""
    factors = project(work, left)
    root = factors.energies.sqrt().sqrt()  # √σ
    up = (as_float64(left) @ factors.coordinates) * root
    down = factors.images / root.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    return TruncatedSvd(
        up=up.to(work),
        singular_values=factors.energies.sqrt().to(work),
        down=down.to(work),
        total_energy=total_energy,
        kept_energy=min(float(factors.energies.sum()), total_energy),
    )
