"""Several LoRAs on one model: the same one twice, and how two of them overlap."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, Final

from sigmascope.lora.effect.acting import sort_patches
from sigmascope.lora.effect.small_factors import rank_together
from sigmascope.lora.overlap import KeyOverlap, LoraOverlap, angles_of, overlap
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.fingerprints import Fingerprint, fingerprints
from sigmascope.stages.lora.typed_models import SameTwice

_MOST_SOURCES: Final = 6
_MOST_KEYS: Final = 10
_MOST_ANGLES: Final = 8
_MOST_PRODUCTS: Final = 10**11
"""For all pairs: some seconds of one core. Two LoRAs of rank 32 for all layers of SDXL take a tenth."""

_ByKey = Mapping[str, Sequence[AppliedPatch]]

Content = tuple[str, object, frozenset[tuple[str, Fingerprint]]]


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


def overlaps_of(by_source: Mapping[str, Sequence[AppliedPatch]]) -> list[dict[str, Any]]:
    """The overlap of every two LoRAs (of the first six), with the ten weights where it is largest and their angles.

    Two usual LoRAs are compared on every weight that both change. Where that would take too long, every second,
    third … weight stands for all; `unavailable["keys"]` says so.
    """
    acting = {name: _by_key(sort_patches(patches).acting) for name, patches in by_source.items()}
    names = [name for name, patches in acting.items() if patches][:_MOST_SOURCES]
    pairs = list(combinations(names, 2))
    return [_pair(a, b, acting[a], acting[b], _MOST_PRODUCTS // len(pairs)) for a, b in pairs]


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


def _by_key(patches: Sequence[AppliedPatch]) -> _ByKey:
    found: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        found.setdefault(patch.key, []).append(patch)
    return found


def _pair(a: str, b: str, of_a: _ByKey, of_b: _ByKey, most_products: int) -> dict[str, Any]:
    keys = list(dict.fromkeys((*of_a, *of_b)))
    step = max(1, -(-sum(_products(of_a, of_b, key) for key in keys) // most_products))
    found = overlap(*(_patches(side, keys[::step]) for side in (of_a, of_b)), angles=False)
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


def _patches(side: _ByKey, keys: Sequence[str]) -> list[AppliedPatch]:
    return [patch for key in keys for patch in side.get(key, ())]


def _largest(found: LoraOverlap) -> list[KeyOverlap]:
    return sorted(found.keys, key=lambda one: -one.overall)[:_MOST_KEYS]


def _with_angles(one: KeyOverlap, of_a: _ByKey, of_b: _ByKey) -> dict[str, Any]:
    angles = [list(found)[:_MOST_ANGLES] for found in angles_of(of_a[one.key], of_b[one.key])]
    return {
        "key": one.key,
        "overall": one.overall,
        "cosine": one.cosine,
        "column_angles": angles[0],
        "row_angles": angles[1],
    }
