"""Weights whose numbers are codes times one scale, as ComfyUI keeps scaled fp8 without a tensor class of its own.

W = s·C, so a change that adds Δ to W adds Δ/s to C. `in_codes` gives the changes at that strength, the weight is judged by
its codes, and `in_numbers` turns the verdict's figures back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from typing import Final

from torch import Tensor

from sigmascope.lora.arrival import Arrival
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import on_host
from sigmascope.stages.schema import ValueChange
from sigmascope.stages.weight_verdict import WeightVerdict

_ADDED: Final = frozenset({"lora", "loha", "lokr", "diff"})
_NOT_ADDED: Final = "the weight is stored in codes, with a scale beside them that the change does not know"


def scales_of(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The scale of each weight of 8 bits that has one beside it, by the weight's name."""
    found = {
        name: weights[beside]
        for name, weight in weights.items()
        if weight.dtype.itemsize == 1
        and weight.is_floating_point()
        and (beside := f"{name.removesuffix('weight')}scale_weight") in weights
        and weights[beside].numel() == 1
    }
    scales = {name: float(scale) for name, scale in on_host(found).items()}
    return {name: scale for name, scale in scales.items() if isfinite(scale) and scale > 0.0}


def in_codes(patches: Iterable[AppliedPatch], scale: float) -> list[AppliedPatch]:
    """The changes as they change the codes."""
    return [_divided(patch, scale) for patch in patches]


def _divided(patch: AppliedPatch, scale: float) -> AppliedPatch:
    if patch.strength is not None and patch.adapter_type in _ADDED and "dora_scale" not in patch.tensors:
        return replace(patch, strength=patch.strength / scale)
    return replace(
        patch,
        strength=None,
        unavailable={"strength": _NOT_ADDED} if patch.strength is not None else patch.unavailable,
    )


def in_numbers(verdict: WeightVerdict, scale: float) -> WeightVerdict:
    """The verdict on codes, of the weight that they stand for."""
    change: ValueChange = {
        **verdict.change,
        "delta_norm": _times(verdict.change["delta_norm"], scale),
        "weight_norm": _times(verdict.change["weight_norm"], scale),
        "predicted_delta_norm": _times(verdict.change["predicted_delta_norm"], scale),
        "sampled_delta_norm": _times(verdict.change["sampled_delta_norm"], scale),
    }
    effect = replace(
        verdict.effect,
        delta_norm=_times(verdict.effect.delta_norm, scale),
        weight_norm=_times(verdict.effect.weight_norm, scale),
    )
    inside = None if verdict.inside is None else tuple(in_codes(verdict.inside, 1.0 / scale))
    arrival = None if verdict.arrival is None else _arrival(verdict.arrival, scale**2)
    return replace(verdict, change=change, effect=effect, inside=inside, arrival=arrival)


def _times(figure: float | None, scale: float) -> float | None:
    return None if figure is None else figure * scale


def _arrival(arrival: Arrival, times: float) -> Arrival:
    return replace(
        arrival,
        wanted=arrival.wanted * times,
        inner=arrival.inner * times,
        real=arrival.real * times,
        others={way: _arrival(other, times) for way, other in arrival.others.items()},
    )
