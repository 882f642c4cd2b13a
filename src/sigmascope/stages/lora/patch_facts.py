"""All changes that are on a model: what they are, how far they have come, and what is wrong with them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.effect import effect_of
from sigmascope.lora.norms import root_sum_square
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import PROBE_ERRORS
from sigmascope.stages.lora.applied import Applied
from sigmascope.stages.lora.several import applied_twice, overlaps_of
from sigmascope.stages.lora.typed_models import OnePatch, PatchAnalysis, PatchDetails, SourceFacts

_FARTHEST: Final = ("failed", "registered", "lazy", "merged", "inactive")
"""Of several changes on one weight, the state that a reader should know of first."""


def patch_analysis(applied: Applied) -> PatchAnalysis:
    """Describe every change on a model; see `typed.PatchAnalysis`.

    Args:
        applied: As read. Its tensors are looked at for NaN, Inf and likeness; an accelerator is waited for.
    """
    finite = finiteness(applied.patches)
    by_key = applied.by_key()
    details = {key: _details(patches, finite) for key, patches in by_key.items()}
    broken = [key for key, patches in by_key.items() if any(finite[id(p)] is False for p in patches)]
    unknown = dict(applied.unavailable)
    return {
        "total_patched_keys": None if unknown and not by_key else len(by_key),
        "patch_details": details,
        "states": dict(Counter(patch.state for patch in applied.patches)),
        "adapter_types": dict(Counter(patch.adapter_type for patch in applied.patches)),
        "loras": {name: _source(patches, finite) for name, patches in applied.by_source().items()},
        "failed": {
            p.key: p.state_reason or "no reason is known" for p in applied.patches if p.state == "failed"
        },
        "not_finite": broken,
        "applied_twice": applied_twice(by_key),
        "overlaps": overlaps_of(applied.by_source()),
        "unavailable": {"total_patched_keys": "; ".join(unknown.values())} if unknown else {},
    }


def finiteness(patches: Sequence[AppliedPatch]) -> dict[int, bool | None]:
    """Whether strength and tensors of each change are finite, by the change's `id()`; None if they cannot be read."""
    return {
        id(patch): isfinite(patch.strength or 0.0) and _all_finite(patch.tensors.values())
        for patch in patches
    }


def _all_finite(tensors: Iterable[Tensor]) -> bool | None:
    try:
        with torch.no_grad():
            return all(_is_finite(tensor.detach()) for tensor in tensors)
    except PROBE_ERRORS:
        return None


def _is_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    values = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _details(patches: Sequence[AppliedPatch], finite: dict[int, bool | None]) -> PatchDetails:
    first = patches[0]
    states = [patch.state for patch in patches]
    return {
        "strength_patch": first.strength,
        "patch_type": first.patch_type,
        "patch_data_shape": first.data_type,
        "patch_count": len({patch.index for patch in patches} | {None}) - 1,
        "adapter_type": first.adapter_type,
        "state": next((state for state in _FARTHEST if state in states), first.state),
        "patches": [_one(patch, finite[id(patch)]) for patch in patches],
    }


def _one(patch: AppliedPatch, finite: bool | None) -> OnePatch:
    return {
        "source": patch.source,
        "adapter_type": patch.adapter_type,
        "state": patch.state,
        "state_reason": patch.state_reason,
        "strength": patch.strength,
        "strength_model": patch.strength_model,
        "rank": patch.rank,
        "alpha": patch.alpha,
        "scale": patch.scale,
        "finite": finite,
        "unavailable": dict(patch.unavailable),
    }


def _source(patches: Sequence[AppliedPatch], finite: dict[int, bool | None]) -> SourceFacts:
    by_key: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        by_key.setdefault(patch.key, []).append(patch)
    norms = [effect_of(changes, None).delta_norm for changes in by_key.values()]
    known = [norm for norm in norms if norm is not None]
    return {
        "keys": len(by_key),
        "states": dict(Counter(patch.state for patch in patches)),
        "adapter_types": dict(Counter(patch.adapter_type for patch in patches)),
        "ranks": dict(sorted(Counter(patch.rank for patch in patches if patch.rank is not None).items())),
        "strengths": sorted({patch.strength for patch in patches if patch.strength is not None}),
        "delta_norm": root_sum_square(known) if len(known) == len(norms) else None,
        "not_finite": [patch.key for patch in patches if finite[id(patch)] is False],
    }
