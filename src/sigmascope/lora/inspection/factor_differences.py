"""How far two changes given by factors are apart."""

from math import sqrt
from typing import Final

import torch

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.norms import frobenius_norm

CANCELLED: Final = 1e-10
"""Share of ‖ΔW‖² below which ‖a‖² − 2<a,b> + ‖b‖² is mostly rounding, though it is summed in float64."""


def difference_norm(one: LoraFactors, other: LoraFactors) -> float:
    """‖ΔW₁ − ΔW₂‖ of two changes of one weight, without forming either.

    ‖a‖² − 2<a,b> + ‖b‖² from Gram matrices loses what is below 10⁻⁸ of the norms; there the difference is
    written as one pair of factors, whose QR does not cancel.

    Raises:
        ModelMismatchError: They change weights of different shape.
    """
    energies = one.inner(one), other.inner(other)
    squared = energies[0] - 2.0 * one.inner(other) + energies[1]
    if squared > CANCELLED * max(energies):
        return sqrt(squared)
    wide = [pair.to(dtype=torch.float64) for pair in (one, other)]
    _, core, _ = LoraFactors.concatenate(wide, [1.0, -1.0]).orthogonal_form()
    return float(torch.linalg.matrix_norm(core))


def norm_bound(factors: LoraFactors) -> float:
    """What ‖ΔW‖ cannot exceed: the scale times ‖up‖·‖down‖."""
    return abs(factors.scale) * frobenius_norm(factors.up) * frobenius_norm(factors.down)
