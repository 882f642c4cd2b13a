"""Entries that stand for several changes: model merges, and another model taken as a LoRA."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sigmascope.probes.adapters.comfyui.entries import Entry, read_entry
from sigmascope.probes.adapters.comfyui.values import Change, is_list_of_patches, read_value

_ADDED = ("lora", "loha", "lokr", "diff")
"""Kinds that add the same to any weight, if they have no magnitudes: they can be told apart from it."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One change of an entry, and the value that the host keeps for the entry."""

    entry: Entry
    change: Change
    kept_value: object


def parts_of(entry: Entry, original: Tensor | None) -> list[Part]:
    """The changes that an entry stands for; their sum is what the host does.

    Args:
        entry: As read.
        original: The weight before any change, which `model_as_lora` takes from the other model's.
    """
    if is_list_of_patches(entry.value):
        return _of_merge(entry)
    change = read_value(entry.value)
    if change.kind == "model_as_lora":
        return _of_model(entry, change, original)
    return [Part(entry, change, entry.value)]


def _of_merge(entry: Entry) -> list[Part]:
    """s·(V + Σ sᵢ·Δᵢ) for a list of a weight V and changes upon it."""
    base, *upon = entry.value
    weight = _weight_of(base)
    if weight is None:
        return [_unknown(entry, f"the merge starts with {type(base).__name__}, not with a weight")]
    nested = [part for kept in upon for part in parts_of(read_entry(kept), weight)]
    why = next((reason for part in nested if (reason := _why_not_added(entry, part)) is not None), None)
    if why is not None:
        return [_unknown(entry, f"{why} of the model that is merged in, which no sum can show")]
    first = Part(entry, Change("diff", {"diff": weight}, unavailable=_conversion(weight)), entry.value)
    return [first, *(_within(entry, part) for part in nested)]


def _why_not_added(outer: Entry, part: Part) -> str | None:
    change, entry = part.change, part.entry
    if change.kind not in _ADDED or "dora_scale" in change.tensors:
        return f"a change of type {change.adapter_type}"
    if entry.strength is None or entry.strength_model != 1:
        return "a change that scales the weight"
    if outer.strength is None:
        return "a strength that is no number"
    return "a part of a weight" if entry.offset is not None and outer.offset is not None else None


def _within(outer: Entry, part: Part) -> Part:
    strength = (outer.strength or 0.0) * (part.entry.strength or 0.0)
    offset = part.entry.offset or outer.offset
    unavailable = {**outer.unavailable, **part.entry.unavailable}
    return Part(Entry(strength, outer.value, 1.0, offset, unavailable), part.change, outer.value)


def _of_model(entry: Entry, change: Change, original: Tensor | None) -> list[Part]:
    """s·(T − W₀) for the weight T of another model and the original W₀, as two differences."""
    target = change.tensors.get("target")
    if target is None or original is None or entry.strength is None:
        return [_unknown(entry, "one of the two weights or the strength cannot be read")]
    added = Part(entry, Change("diff", {"diff": target}), entry.value)
    taken = replace(entry, strength=-entry.strength, strength_model=1.0)
    return [added, Part(taken, Change("diff", {"diff": original}), entry.value)]


def _weight_of(base: Any) -> Tensor | None:
    """The weight in front of a merge's list: a tensor, or (tensor, convert) since November 2024."""
    if isinstance(base, Sequence) and not isinstance(base, str) and base:
        base = base[0]
    return base if isinstance(base, Tensor) else None


def _conversion(weight: Tensor) -> dict[str, str]:
    if weight.dtype.itemsize > 1:
        return {}
    return {"diff": f"is stored as {weight.dtype}, which the host converts before it merges"}


def _unknown(entry: Entry, reason: str) -> Part:
    return Part(entry, Change("unknown", scale=None, unavailable={"adapter_type": reason}), entry.value)
