"""Where the leading singular vectors of a matrix lie: exactly where that is cheap, else by iteration."""

import math
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.numerics.exact_svd import exact_right_subspace
from sigmascope.lora.numerics.krylov import leading_subspace
from sigmascope.lora.numerics.small_matrices import symmetric_eigen
from sigmascope.lora.precision import gram_in_double

TOLERANCE: Final = 1e-3
"""By default the error may exceed the optimum by at most this share of it."""
_SMALL: Final = 128  # min(m, n) up to which all singular values cost no more than some
_MANY: Final = 5  # so do they where more than one in this many is wanted
_ORDINARY: Final = 20  # powers of two around 1 in which a typical entry needs no rescaling


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
        found = leading_subspace(
            work, kept, total_energy=total_energy, tolerance=tolerance, seed=seed, rounded=rounded
        )
        if found.converged:
            return found.images
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


def _rounding(dtype: torch.dtype) -> float:
    """Share of the energy below which a squared singular value is rounding, which goes by ‖A‖ and not by σ₁."""
    return torch.finfo(dtype).eps ** 2 if dtype == torch.float32 else torch.finfo(dtype).eps
