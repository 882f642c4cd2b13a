"""Several LoRAs on one model: the same one twice, and how two of them overlap."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

from sigmascope.lora.effect.acting import sort_patches
from sigmascope.lora.overlap import LoraOverlap, overlap
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.fingerprints import Fingerprint, fingerprints
from sigmascope.stages.lora.typed_models import SameTwice

_MOST_SOURCES: Final = 6
_MOST_KEYS: Final = 10

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
    """The overlap of every two LoRAs (of the first six), with the ten weights where it is largest."""
    acting = {name: sort_patches(patches).acting for name, patches in by_source.items()}
    names = [name for name, patches in acting.items() if patches][:_MOST_SOURCES]
    return [_pair(a, b, overlap(acting[a], acting[b])) for a, b in combinations(names, 2)]


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


def _pair(a: str, b: str, found: LoraOverlap) -> dict[str, Any]:
    largest = sorted(found.keys, key=lambda one: -one.overall)[:_MOST_KEYS]
    figures = ("overall", "columns", "rows", "chance", "cosine")
    return {
        "a": a,
        "b": b,
        **{figure: getattr(found, figure) for figure in figures},
        "shared_keys": len(found.keys),
        "only_a": len(found.only_a),
        "only_b": len(found.only_b),
        "largest": [{"key": one.key, "overall": one.overall, "cosine": one.cosine} for one in largest],
        "unavailable": dict(found.unavailable),
    }
