"""The leading singular subspace of a matrix by randomised block Krylov iteration.

With V₀ random, the subspace span(V₀, (AᵀA)V₀, (AᵀA)²V₀, …) holds approximations of the leading right singular
vectors whose error falls exponentially in the number of steps times the square root of the gap (Musco and
Musco, arXiv 1504.05477); it needs fewer products with A than subspace iteration does. Within it the best
vectors come from the Rayleigh-Ritz principle, from the Gram matrices KᵀK and (AK)ᵀ(AK) alone.

Iterations may run in bfloat16, with products summed in float32: what is wanted of them is a subspace, and a
perturbation of it by ε costs ε² in energy. Where almost everything is captured, that ε² would show beside what
is left; then what was found is taken out of the matrix and the search goes on in the rest.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.norms import quick_energy
from sigmascope.lora.numerics.krylov_basis import KrylovBasis
from sigmascope.lora.numerics.small_matrices import orthonormal, orthonormal_rows, symmetric_eigen
from sigmascope.lora.precision import gram_in_double

_MOST_BLOCKS: Final = 9
_WIDEST_BLOCK: Final = 64
_RESTARTS: Final = 6
_SAFETY: Final = 0.8  # of the tolerance, since what is still missing is an estimate
_RESOLVED: Final = {torch.bfloat16: 0.02, torch.float32: 1e-3}
"""Share of the energy that must be left for iterations in a dtype to see it beside what is captured."""
_NOTHING: Final = 1e-12  # share of the energy that is the rounding of a float32 matrix


@dataclass(frozen=True, eq=False)
class Subspace:
    """An approximate leading right singular subspace.

    Attributes:
        vectors: (n, k), orthonormal up to the rounding of the iterations, by falling singular value.
        images: (m, k), A·vectors, as far as the dtype of the iterations tells A.
        captured: Estimate of the energy ‖A·vectors‖².
        converged: Whether the tolerance is met, by the estimate of what more steps would add.
    """

    vectors: Float[Tensor, "n k"]
    images: Float[Tensor, "m k"]
    captured: float
    converged: bool


def leading_subspace(
    matrix: Float[Tensor, "m n"],
    rank: int,
    *,
    total_energy: float,
    tolerance: float,
    seed: int = 0,
    rounded: Float[Tensor, "m n"] | None = None,
    nothing: float = 0.0,
) -> Subspace:
    """Find a subspace that holds the energy of the `rank` leading right singular vectors.

    It goes on until the energy that further steps would still add, extrapolated from what the last two added,
    is so small a part of the discarded energy that the error is within `tolerance` of the optimum.

    Args:
        matrix: float32, finite, of ordinary scale: the squares of its entries are no subnormals.
        rank: At least 1 and well below min(m, n).
        total_energy: ‖matrix‖², summed in float64.
        tolerance: Largest relative excess of the error ‖A − A_r‖ over its optimum, such as 1e-3.
        seed: Of the random start. The same seed gives the same subspace on the same kind of machine.
        rounded: The matrix in the device's `fast_dtype`, where it is at hand.
        nothing: Energy that is rounding, where the matrix is what is left of another one.

    Returns:
        `rank` vectors; fewer where the matrix has no more.
    """
    goal = _Goal(rank, total_energy, tolerance, max(nothing, _NOTHING * total_energy))
    fast = fast_dtype(matrix.device) if matrix.dtype == torch.float32 else None
    coarse = matrix
    if fast is not None:
        coarse = matrix.to(fast) if rounded is None or rounded.dtype != fast else rounded
    resolved = _RESOLVED[fast or torch.float32] * total_energy
    found = _with_restarts(coarse, _random_start(matrix, rank, seed), goal, stop_below=resolved)
    if goal.left(found.captured) > resolved:
        return found
    return _deflated(matrix, found, goal, seed)


def fast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 where the device multiplies it much faster than float32, else None."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        fast = device.type == "cpu" and supported is not None and bool(supported())
    return torch.bfloat16 if fast else None


@dataclass(frozen=True, slots=True)
class _Goal:
    """When to stop: `rank` vectors, within `tolerance` of the best error that they can have, or `nothing` left."""

    rank: int
    total_energy: float
    tolerance: float
    nothing: float

    def left(self, captured: float) -> float:
        return max(self.total_energy - captured, 0.0)

    def is_met(self, captured: list[float]) -> bool:
        """Extrapolate the gains of the last steps as a geometric series."""
        if len(captured) < 3:
            return False
        before, last = captured[-2] - captured[-3], captured[-1] - captured[-2]
        # Energies go by the square of the error, so they may exceed by twice the tolerance.
        allowed = 2.0 * _SAFETY * self.tolerance * self.left(captured[-1])
        if not 0.0 < last < before:
            return last == 0.0
        ratio = math.sqrt(last / before)  # later gains fall more slowly than those before them
        return last * ratio / (1.0 - ratio) <= allowed


def _deflated(matrix: Tensor, strong: Subspace, goal: _Goal, seed: int) -> Subspace:
    """Take what was found out of the matrix, search what is left on its own scale, and choose among both.

    Beside singular values a hundred times as large, the others would be rounding.
    """
    refined = orthonormal(orthonormal(matrix.mT @ orthonormal(matrix @ strong.vectors)))
    rest = torch.addmm(matrix, matrix @ refined, refined.mT, alpha=-1.0)
    energy = float(quick_energy(rest.reshape(-1)))
    if energy <= goal.nothing:
        return Subspace(refined, matrix @ refined, goal.total_energy - energy, converged=True)
    weak = leading_subspace(
        rest,
        goal.rank,
        total_energy=energy,
        tolerance=goal.tolerance,
        seed=seed,
        nothing=goal.nothing,
    )
    del rest
    held = weak.vectors - refined @ (refined.mT @ weak.vectors)
    both = orthonormal(torch.cat([refined, orthonormal(held)], dim=1))
    images = matrix @ both
    energies, turn = symmetric_eigen(gram_in_double(images))
    best = turn[:, : goal.rank].to(both)
    captured = float(energies[: goal.rank].sum())
    return Subspace(both @ best, images @ best, captured, weak.converged)


def _random_start(matrix: Tensor, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(min(_block_width(rank), *matrix.shape), matrix.shape[1], generator=generator)
    return orthonormal_rows(random.to(matrix))


def _block_width(rank: int) -> int:
    """A multiple of 16, as matrix units like it."""
    return min(-(-rank // 16) * 16, _WIDEST_BLOCK)


def _with_restarts(matrix: Tensor, start: Tensor, goal: _Goal, stop_below: float) -> Subspace:
    """Iterate, and begin again from the best vectors when the basis has grown large."""
    found = _iterate(matrix, start, goal, stop_below)
    for _ in range(_RESTARTS):
        if found.converged or goal.left(found.captured) <= stop_below:
            break
        found = _iterate(matrix, orthonormal_rows(found.vectors.mT), goal, stop_below)
    return found


def _iterate(matrix: Tensor, start: Tensor, goal: _Goal, stop_below: float) -> Subspace:
    """Grow one basis until the goal is met, so little is left that another dtype is wanted, or it is full."""
    width = _block_width(goal.rank)
    most = max(_MOST_BLOCKS * width, 2 * goal.rank + _MOST_BLOCKS // 2 * width)
    basis = KrylovBasis(matrix, min(most, *matrix.shape))
    captured: list[float] = []
    block = start
    converged = False
    while block.shape[0] > 0 and not converged:
        image = basis.add(block)
        if basis.size >= min(goal.rank + width, basis.size + basis.room):
            captured.append(basis.captured(goal.rank))
            converged = goal.is_met(captured)
            if goal.left(captured[-1]) <= stop_below:
                break
        block = basis.next_block(image)[:width] if basis.room > 0 and not converged else block[:0]
    vectors, images = basis.best(goal.rank)
    exhausted = block.shape[0] == 0 and basis.room > 0
    return Subspace(vectors, images, basis.captured(goal.rank), converged or exhausted)
