"""Rules that give a rank from singular values, also while some of them are still unknown.

With σ₁ ≥ σ₂ ≥ … the n singular values of ΔW, the rank is:

    energy     the smallest r with Σ_{i≤r} σᵢ² ≥ p · Σσᵢ²
    error      the smallest r with √(Σ_{i>r} σᵢ²) ≤ p · √(Σσᵢ²)
    nuclear    the smallest r with Σ_{i≤r} σᵢ ≥ p · Σσᵢ
    ratio      the number of σᵢ > p · σ₁
    threshold  the number of σᵢ > p

A rule gives the smallest and the largest rank that the whole spectrum could still lead to, from what is known of
it. Where the two agree, more singular values would change nothing.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.ranking.spectrum import Spectrum

Rule = Callable[[Spectrum, float], tuple[int, int]]
"""(spectrum, p) → the smallest and the largest rank still possible."""

_SUM_ROUNDING: Final = (
    1e-13  # of sums of many float64 squares; without it a share met exactly could be missed
)


def energy_rank(spectrum: Spectrum, share: float) -> tuple[int, int]:
    """The smallest r that keeps `share` of ‖ΔW‖²."""
    return _rank_within(spectrum, 1.0 - share)


def error_rank(spectrum: Spectrum, error: float) -> tuple[int, int]:
    """The smallest r with ‖ΔW − A_r‖ ≤ `error`·‖ΔW‖."""
    return _rank_within(spectrum, error * error)


def ratio_rank(spectrum: Spectrum, ratio: float) -> tuple[int, int]:
    """The number of singular values above `ratio`·σ₁."""
    if spectrum.known == 0:
        return 0, spectrum.largest_rank
    return threshold_rank(spectrum, ratio * float(spectrum.values[0]))


def threshold_rank(spectrum: Spectrum, threshold: float) -> tuple[int, int]:
    """The number of singular values above `threshold`."""
    above = int((spectrum.values > threshold).sum())
    if above < spectrum.known or spectrum.next_value_bound <= threshold:
        return above, above
    return above, spectrum.largest_rank


def nuclear_rank(spectrum: Spectrum, share: float) -> tuple[int, int]:
    """The smallest r whose singular values sum to `share` of the nuclear norm Σσᵢ.

    The sum of the unknown ones is at least E/σ and at most √((n − k)·E), where E = Σ_{i>k} σᵢ² is their energy
    and σ the most that one of them can be.
    """
    values = spectrum.values
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    known = float(sums[-1])
    if spectrum.complete:
        rank = min(_first_at_least(sums, share * known), spectrum.known)
        return rank, rank
    bound, energy, rounding = spectrum.next_value_bound, spectrum.tail_energy, spectrum.energy_rounding
    unknown = spectrum.largest_rank - spectrum.known
    least = max(energy - rounding, 0.0) / bound
    most = min(math.sqrt(unknown * (energy + rounding)), unknown * bound)
    smallest = _first_at_least(sums, share * (known + least))
    largest = _first_at_least(sums, share * (known + most))
    return smallest, largest if largest <= spectrum.known else spectrum.largest_rank


def _rank_within(spectrum: Spectrum, discarded_share: float) -> tuple[int, int]:
    """The smallest rank whose discarded energy is at most a share of the total."""
    allowed = (discarded_share + _SUM_ROUNDING) * spectrum.total_energy
    enough = (spectrum.discarded_energies() <= allowed).nonzero()
    if len(enough):
        return int(enough[0]), int(enough[0])
    if spectrum.complete:
        return spectrum.known, spectrum.known
    return spectrum.known + 1, spectrum.largest_rank


def _first_at_least(sums: Float[Tensor, " sums"], target: float) -> int:
    """The first index whose sum reaches the target; one past the last when none does."""
    return int(torch.searchsorted(sums, target * (1.0 - _SUM_ROUNDING)))
