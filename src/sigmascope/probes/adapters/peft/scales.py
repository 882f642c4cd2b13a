"""How strongly a layer applies an adapter, taken apart into alpha, rank and strength."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Final

from torch import nn

from sigmascope.probes.adapters.peft.changes import Change
from sigmascope.probes.adapters.peft.layer import by_adapter, number_for

_DIGITS: Final = 12
"""PEFT keeps strength · alpha / rank; dividing gives the strength back but for float64's last digits."""


@dataclass(frozen=True, slots=True)
class Scales:
    """As `AppliedPatch` names them."""

    strength: float | None = 1.0
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = 1.0
    unavailable: Mapping[str, str] = field(default_factory=dict)


def scales_of(layer: nn.Module, adapter: str, change: Change) -> Scales:
    """Read them from the layer; what has no scale there is applied whole."""
    if not change.has_scale:
        known = None if "strength" in change.unavailable else 1.0
        return Scales(strength=known, scale=known)
    whole = number_for(layer, "scaling", adapter)
    if whole is None:
        return Scales(
            None, scale=None, unavailable=dict.fromkeys(("strength", "scale"), "the layer keeps none")
        )
    if change.kind == "diff":  # a bias of the adapter, which no rank divides
        return Scales(strength=whole)
    return _taken_apart(layer, adapter, whole)


def _taken_apart(layer: nn.Module, adapter: str, whole: float) -> Scales:
    rank = number_for(layer, "r", adapter)
    alpha = number_for(layer, "lora_alpha", adapter)
    if alpha is None:
        alpha = number_for(layer, "alpha", adapter)
    if rank is None or alpha is None or rank <= 0:
        why = dict.fromkeys(("rank", "alpha"), "the layer keeps none; the strength has them in it")
        return Scales(strength=whole, unavailable=why)
    scale = alpha / (sqrt(rank) if by_adapter(layer, "use_rslora").get(adapter) is True else rank)
    strength = round(whole / scale, _DIGITS) if scale else 1.0
    return Scales(strength, int(rank), alpha, scale)
