"""The known singular values of a weight change: the largest, the energy of all, stable and effective rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.linalg import max_rank

_VALUE_ROUNDING: Final = 2.0**-23
"""Share of ‖ΔW‖² by which the energy of float32 singular values can be off."""
_ROUNDING: Final = 1e-6
"""Share of ‖ΔW‖ below which a singular value is what float32 arithmetic left of a zero."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The leading singular values of ΔW, σ₁ ≥ σ₂ ≥ … ≥ σₖ, and ‖ΔW‖² = Σ σᵢ² over all of them.

    Computing k values is much cheaper than computing all, and the total is known from the matrix itself. So the
    energy of what is unknown is known: Σ_{i>k} σᵢ² = ‖ΔW‖² − Σ_{i≤k} σᵢ², and none of it exceeds σₖ.

    Attributes:
        values: (k,), falling; float64 on the CPU, and converted when given otherwise.
        total_energy: ‖ΔW‖² in Frobenius norm.
        weight_shape: Of the layer, (out, in) or (out, in, kh, kw).

    Raises:
        NonFiniteError: A value or the energy is NaN or Inf.
        ValueError: The values do not fall, are negative, or are more than the shape has.
    """

    values: Float[Tensor, " k"]
    total_energy: float
    weight_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        values = self.values.detach().to(device="cpu", dtype=torch.float64)
        object.__setattr__(self, "values", values)
        if not (bool(torch.isfinite(values).all()) and math.isfinite(self.total_energy)):
            raise NonFiniteError("a singular value or the energy of a change is NaN or Inf.")
        if len(values) > self.largest_rank:
            raise ValueError(
                f"{len(values)} singular values, but {self.weight_shape} has {self.largest_rank}."
            )
        if bool((values < 0).any()) or bool((values.diff() > 0).any()):
            raise ValueError("singular values are positive and fall.")

    @classmethod
    def of_factors(cls, values: Float[Tensor, " r"], weight_shape: Sequence[int]) -> "Spectrum":
        """The spectrum of a change that has no more singular values than these, as that of LoRA factors.

        Args:
            values: (r,), falling: all that are not zero.
            weight_shape: Of the layer.
        """
        shape = tuple(weight_shape)
        wide = values.detach().to(device="cpu", dtype=torch.float64)
        energy = float(wide.square().sum())
        missing = min(max_rank(shape) - len(wide), 1)  # one zero says that the rest is zero
        return cls(torch.cat([wide, wide.new_zeros(max(missing, 0))]), energy, shape)

    @cached_property
    def known(self) -> int:
        """k, the number of singular values that are known."""
        return int(self.values.shape[0])

    @cached_property
    def nonzero(self) -> int:
        """How many of the known singular values are above zero."""
        return int((self.values > 0).sum())

    @cached_property
    def significant(self) -> int:
        """How many of the known singular values are above 10⁻⁶·‖ΔW‖; below are zeros that were rounded."""
        return int((self.values > _ROUNDING * math.sqrt(max(self.total_energy, 0.0))).sum())

    @cached_property
    def largest_rank(self) -> int:
        """min(out, in·kh·kw), the number of singular values that there are."""
        return max_rank(self.weight_shape)

    @cached_property
    def complete(self) -> bool:
        """Whether every singular value is known but those that are zero or rounded zeros."""
        return self.known >= self.largest_rank or self.total_energy <= 0.0 or self.significant < self.known

    @cached_property
    def known_energy(self) -> float:
        """Σ σᵢ² of the known singular values."""
        return float(self.values.square().sum())

    @cached_property
    def tail_energy(self) -> float:
        """Σ σᵢ² of the unknown singular values."""
        missing = max(self.total_energy - self.known_energy, 0.0)
        if self.known == 0:
            return missing
        return min(missing, (self.largest_rank - self.known) * float(self.values[-1]) ** 2)

    @property
    def energy_rounding(self) -> float:
        """How far `tail_energy` can be off where the known values come from float32."""
        return _VALUE_ROUNDING * self.total_energy

    @cached_property
    def next_value_bound(self) -> float:
        """What σₖ₊₁ cannot exceed: neither σₖ nor the root of the energy that is left."""
        if self.complete:
            return 0.0
        left = math.sqrt(self.tail_energy + self.energy_rounding)
        return min(float(self.values[-1]), left) if self.known else left

    def discarded_energies(self) -> Float[Tensor, " ranks"]:
        """‖ΔW − A_r‖² for r = 0 … k, where A_r keeps the r largest singular values (Eckart and Young, 1936)."""
        tail = torch.tensor([self.tail_energy], dtype=torch.float64)
        # Summed from the smallest value up, which loses nothing of small tails.
        return torch.cat([tail, self.values.square().flip(0)]).cumsum(0).flip(0)

    def error_at(self, rank: int) -> float:
        """‖ΔW − A_r‖, the error of keeping the `rank` largest singular values.

        Args:
            rank: From 0 to `known`; anything above where the spectrum is complete.

        Raises:
            ValueError: That many values are not known.
        """
        if rank > self.known and not self.complete:
            raise ValueError(f"{self.known} singular values are known, too few for the error at rank {rank}.")
        return math.sqrt(float(self.discarded_energies()[min(rank, self.known)]))

    def all_values(self) -> Float[Tensor, " n"]:
        """Every singular value, (largest_rank,), with zeros for those below rounding.

        Raises:
            ValueError: The spectrum is not complete.
        """
        if not self.complete:
            raise ValueError(f"only {self.known} of {self.largest_rank} singular values are known.")
        return torch.cat([self.values, self.values.new_zeros(self.largest_rank - self.known)])


def stable_rank(values: Float[Tensor, " k"]) -> float:
    """‖ΔW‖² / σ₁² (Rudelson and Vershynin, arXiv math/0503442), from 1 to the rank; 0 for a zero change.

    Small singular values hardly count, so that noise does not raise it.

    Args:
        values: (k,), falling, all that are not zero.
    """
    if len(values) == 0 or float(values[0]) <= 0.0:
        return 0.0
    return float((values / values[0]).square().sum())


def effective_rank(values: Float[Tensor, " k"]) -> float:
    """exp(−Σ pᵢ ln pᵢ) with pᵢ = σᵢ / Σσ (Roy and Vetterli, EUSIPCO 2007); 0 for a zero change.

    It is r for r equal singular values, and lies between 1 and the rank.

    Args:
        values: (k,), falling, all that are not zero.
    """
    positive = values[values > 0.0].to(torch.float64)
    if len(positive) == 0:
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(torch.special.entr(shares).sum()))
