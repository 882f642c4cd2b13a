"""Truncated singular value decompositions: matrix and rank in, factors and kept energy out.

By Eckart and Young (1936), of all matrices of rank r the one nearest to A in Frobenius norm is
A_r = Σ_{i≤r} σᵢ uᵢ vᵢᵀ, and its error is ‖A − A_r‖² = Σ_{i>r} σᵢ²: the energy that is discarded.

Whatever subspace is found, its error is known and not estimated: with orthonormal columns U,
‖A − U Uᵀ A‖² = ‖A‖² − ‖Uᵀ A‖². Only how near that is to the optimum is an estimate.

No files and no choice of device here: the work is done where the matrix lies.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.numerics.exact_svd import LAPACK_UP_TO, full_svd
from sigmascope.lora.numerics.projection import project
from sigmascope.lora.numerics.subspace import (
    TOLERANCE,
    leading_images,
    left_directions,
    require_finite,
    to_ordinary_scale,
)
from sigmascope.lora.precision import in_double


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


def _from_projection(work: Tensor, left: Tensor, total_energy: float) -> TruncatedSvd:
    """The singular values and vectors of A projected onto the span of some left directions."""
    found = project(work, left)
    root = found.energies.sqrt().sqrt()  # √σ
    up = (in_double(left) @ found.coordinates) * root
    down = found.images / root.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    return TruncatedSvd(
        up=up.to(work),
        singular_values=found.energies.sqrt().to(work),
        down=down.to(work),
        total_energy=total_energy,
        kept_energy=min(float(found.energies.sum()), total_energy),
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
