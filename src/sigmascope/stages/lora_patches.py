"""All changes that are on a model: what they are, how far they have come, and what is wrong with them.

Of several LoRAs on one model it says whether the same one is there twice, and how every two of them overlap.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.lora.effect import effect_of
from sigmascope.lora.linalg import root_sum_square
from sigmascope.lora.overlap import KeyOverlap, LoraOverlap, angles_of, overlap
from sigmascope.lora.patches import rank_together, sort_patches
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.fingerprints import Fingerprint, fingerprints
from sigmascope.probes.reading import PROBE_ERRORS
from sigmascope.stages.model_snapshot import Applied
from sigmascope.stages.schema import OnePatch, PatchAnalysis, PatchDetails, SameTwice, SourceFacts

_FARTHEST: Final = ("failed", "registered", "lazy", "merged", "inactive")
"""Of several changes on one weight, the state that a reader should know of first."""
_MOST_SOURCES: Final = 6
_MOST_KEYS: Final = 10
_MOST_ANGLES: Final = 8
_MOST_PRODUCTS: Final = 10**11
"""For all pairs: some seconds of one core. Two LoRAs of rank 32 for all layers of SDXL take a tenth."""
_ByKey = Mapping[str, Sequence[AppliedPatch]]
Content = tuple[str, object, frozenset[tuple[str, Fingerprint]]]


def patch_analysis(applied: Applied) -> PatchAnalysis:
    """Describe every change on a model; see `PatchAnalysis`.

    Args:
        applied: As read. Its tensors are looked at for NaN, Inf and likeness; an accelerator is waited for.
    """
    finite = finiteness(applied.patches)
    by_key = applied.by_key()
    details = {key: _patch_details(patches, finite) for key, patches in by_key.items()}
    broken = [key for key, patches in by_key.items() if any(finite[id(p)] is False for p in patches)]
    unknown = dict(applied.unavailable)
    return {
        "total_patched_keys": None if unknown and not by_key else len(by_key),
        "patch_details": details,
        "states": dict(Counter(patch.state for patch in applied.patches)),
        "adapter_types": dict(Counter(patch.adapter_type for patch in applied.patches)),
        "loras": {name: _source_facts(patches, finite) for name, patches in applied.by_source().items()},
        "failed": {
            p.key: p.state_reason or "no reason is known" for p in applied.patches if p.state == "failed"
        },
        "not_finite": broken,
        "applied_twice": applied_twice(by_key),
        "overlaps": overlaps_of(applied.by_source()),
        "unavailable": {"total_patched_keys": "; ".join(unknown.values())} if unknown else {},
    }


def _patch_details(patches: Sequence[AppliedPatch], finite: dict[int, bool | None]) -> PatchDetails:
    first = patches[0]
    states = [patch.state for patch in patches]
    return {
        "strength_patch": first.strength,
        "patch_type": first.patch_type,
        "patch_data_shape": first.data_type,
        "patch_count": len({patch.index for patch in patches} | {None}) - 1,
        "adapter_type": first.adapter_type,
        "state": next((state for state in _FARTHEST if state in states), first.state),
        "patches": [_one_patch(patch, finite[id(patch)]) for patch in patches],
    }


def _one_patch(patch: AppliedPatch, finite: bool | None) -> OnePatch:
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


def _source_facts(patches: Sequence[AppliedPatch], finite: dict[int, bool | None]) -> SourceFacts:
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


def applied_twice(by_key: Mapping[str, Sequence[AppliedPatch]]) -> list[SameTwice]:
    """Changes of the same content that act more than once on one weight, whatever their strengths and names.

    Args:
        by_key: The changes of each weight. The tensors of weights with several are looked at.
    """
    several = {
        key: acting
        for key, patches in by_key.items()
        if len({patch.index for patch in patches} | {patch.source for patch in patches}) > 1
        and len(acting := sort_patches(patches).acting) > 1
    }
    contents = _contents([patch for patches in several.values() for patch in patches])
    found: dict[tuple[str, ...], list[str]] = {}
    for key, patches in several.items():
        alike: dict[Content, list[str]] = {}
        for patch in patches:
            content = contents.get(id(patch))
            if content is not None:
                alike.setdefault(content, []).append(patch.source or "")
        for sources in alike.values():
            if len(sources) > 1:
                found.setdefault(tuple(sources), []).append(key)
    return [{"sources": list(names), "keys": len(keys), "example": keys[0]} for names, keys in found.items()]


def _contents(patches: Sequence[AppliedPatch]) -> dict[int, Content]:
    tensors = {
        f"{index} {part}": tensor
        for index, patch in enumerate(patches)
        for part, tensor in patch.tensors.items()
    }
    prints = {name: reading.value for name, reading in fingerprints(tensors).items()}
    found: dict[int, Content] = {}
    for index, patch in enumerate(patches):
        parts = {part: prints[f"{index} {part}"] for part in patch.tensors}
        known = frozenset((part, print_) for part, print_ in parts.items() if print_ is not None)
        if known and len(known) == len(parts):
            found[id(patch)] = (patch.adapter_type, patch.offset, known)
    return found


def overlaps_of(by_source: Mapping[str, Sequence[AppliedPatch]]) -> list[dict[str, Any]]:
    """The overlap of every two LoRAs (of the first six), with the ten weights where it is largest and their angles.

    Two usual LoRAs are compared on every weight that both change. Where that would take too long, every second,
    third … weight stands for all; `unavailable["keys"]` says so.
    """
    acting = {name: _by_key(sort_patches(patches).acting) for name, patches in by_source.items()}
    names = [name for name, patches in acting.items() if patches][:_MOST_SOURCES]
    pairs = list(combinations(names, 2))
    return [_overlap_of_two(a, b, acting[a], acting[b], _MOST_PRODUCTS // len(pairs)) for a, b in pairs]


def _by_key(patches: Sequence[AppliedPatch]) -> _ByKey:
    found: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        found.setdefault(patch.key, []).append(patch)
    return found


def _overlap_of_two(a: str, b: str, of_a: _ByKey, of_b: _ByKey, most_products: int) -> dict[str, Any]:
    keys = list(dict.fromkeys((*of_a, *of_b)))
    step = max(1, -(-sum(_products(of_a, of_b, key) for key in keys) // most_products))
    found = overlap(*(_patches_of_keys(side, keys[::step]) for side in (of_a, of_b)), angles=False)
    unavailable = dict(found.unavailable)
    if step > 1:
        unavailable["keys"] = f"1 in {step} of {len(keys)} weights was compared: all would take too long"
    figures = ("overall", "columns", "rows", "chance", "cosine")
    return {
        "a": a,
        "b": b,
        **{figure: getattr(found, figure) for figure in figures},
        "shared_keys": len(of_a.keys() & of_b.keys()),
        "compared_keys": len(found.keys),
        "only_a": len(of_a.keys() - of_b.keys()),
        "only_b": len(of_b.keys() - of_a.keys()),
        "largest": [_with_angles(one, of_a, of_b) for one in _largest(found)],
        "unavailable": unavailable,
    }


def _products(of_a: _ByKey, of_b: _ByKey, key: str) -> int:
    """About how many multiplications the comparison of a weight takes: (rank + rank)² · (out + in)."""
    if key not in of_a or key not in of_b:
        return 0
    both = [*of_a[key], *of_b[key]]
    shape = next((patch.weight_shape for patch in both if patch.weight_shape), (0,))
    return rank_together(both) ** 2 * (shape[0] + prod(shape[1:]))


def _patches_of_keys(side: _ByKey, keys: Sequence[str]) -> list[AppliedPatch]:
    return [patch for key in keys for patch in side.get(key, ())]


def _with_angles(one: KeyOverlap, of_a: _ByKey, of_b: _ByKey) -> dict[str, Any]:
    angles = [list(found)[:_MOST_ANGLES] for found in angles_of(of_a[one.key], of_b[one.key])]
    return {
        "key": one.key,
        "overall": one.overall,
        "cosine": one.cosine,
        "column_angles": angles[0],
        "row_angles": angles[1],
    }


def _largest(found: LoraOverlap) -> list[KeyOverlap]:
    return sorted(found.keys, key=lambda one: -one.overall)[:_MOST_KEYS]
