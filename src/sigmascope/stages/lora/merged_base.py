"""The norm of a weight as it was before plain changes were merged into it, from the merged weight and the changes."""

from collections.abc import Sequence
from math import sqrt
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import SigmascopeError
from sigmascope.lora.effect import Effect
from sigmascope.lora.effect.patch_factors import WeightedFactors, factors_of, is_product
from sigmascope.lora.norms import quick_norm
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import attempt

_CANCELLED: Final = 1e-6


def beside_unmerged(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> Effect:
    """The effect with the norm of the weight without the changes, where it can be had.

    ‖W‖² = ‖M‖² − 2·<M, Δ> + ‖Δ‖² for the merged weight M = W + Δ, with <M, up·down> = Σ (upᵀM) ∘ down.

    Args:
        effect: Of the changes, beside the merged weight.
        merged: The weight with the changes.
        acting: All of its changes that act.
    """
    norm = attempt(lambda: _norm(effect, merged, acting), SigmascopeError).value
    if norm is None or effect.delta_norm is None:
        reason = "the weight without the changes is gone"
        unavailable = {**effect.unavailable, "weight_norm": reason, "relative_change": reason}
        return Effect(effect.delta_norm, None, None, True, effect.acting, effect.left_out, unavailable)
    relative = effect.delta_norm / norm
    return Effect(effect.delta_norm, relative, norm, True, effect.acting, effect.left_out, effect.unavailable)


def _norm(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> float | None:
    simple = all(is_product(patch) and patch.strength_model == 1.0 for patch in acting)
    if effect.delta_norm is None or not simple:
        return None
    with torch.no_grad():
        shape = tuple(merged.shape)
        whole = quick_norm(merged)
        inner = sum(_inner(merged, factors_of(patch, shape)) for patch in acting)
    squared = whole**2 - 2.0 * inner + effect.delta_norm**2
    return sqrt(squared) if squared > _CANCELLED * (whole**2 + effect.delta_norm**2) else None


def _inner(merged: Tensor, factors: WeightedFactors) -> float:
    """<M, w·up·down>; the products in float32, which is eight digits of each."""
    matrix = merged.detach().flatten(1).to(torch.float32)
    up, down = (one.to(matrix.device, torch.float32) for one in (factors.up, factors.down))
    return factors.weight * float(torch.sum((up.T @ matrix) * down, dtype=torch.float64))
