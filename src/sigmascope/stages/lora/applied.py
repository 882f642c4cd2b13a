"""The changes that are on a model now, whoever put them there, under the names of its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.adapters.comfyui import is_comfyui, original_weight, read_patches
from sigmascope.probes.adapters.peft import base_weight, read_adapters
from sigmascope.probes.reading import Reading
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.parts import module_of, parts_of

Patches = Sequence[AppliedPatch]


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """All changes on what a host calls its UNet or CLIP. It holds the host's own tensors.

    Attributes:
        patches: In the order in which the parts hold them; `source` is a name also where the host keeps none.
        unavailable: By part ("model" for a single one), why it could not be read.
    """

    patches: tuple[AppliedPatch, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def by_key(self) -> dict[str, list[AppliedPatch]]:
        """The changes of each weight."""
        found: dict[str, list[AppliedPatch]] = {}
        for patch in self.patches:
            found.setdefault(patch.key, []).append(patch)
        return found

    def by_source(self) -> dict[str, list[AppliedPatch]]:
        """The changes of each LoRA."""
        found: dict[str, list[AppliedPatch]] = {}
        for patch in self.patches:
            found.setdefault(patch.source or "LoRA 1", []).append(patch)
        return found


def read_applied(model: object, model_type: str = "") -> Applied:
    """Read the changes of ComfyUI's patchers and PEFT's layers. Never raises.

    Args:
        model: See `parts.parts_of`.
        model_type: See `parts.parts_of`.
    """
    parts = read_host(lambda: parts_of(model, model_type))
    if parts.value is None:
        return Applied(unavailable={"model": parts.reason or "unknown"})
    patches: list[AppliedPatch] = []
    unavailable: dict[str, str] = {}
    for prefix, part in parts.value.items():
        reading = _read_part(part)
        if reading.value is None:
            unavailable[prefix.rstrip(".") or "model"] = reading.reason or "unknown"
        else:
            named = _with_sources(reading.value)
            patches += [replace(patch, key=prefix + patch.key) for patch in named]
    return Applied(tuple(patches), unavailable)


def original_of(model: object, model_type: str, key: str) -> Tensor | None:
    """The weight before any change, where the host keeps it apart from the changed one; its own tensor.

    Args:
        model: See `parts.parts_of`.
        model_type: See `parts.parts_of`.
        key: As `weights.weights_in` names it.
    """
    for prefix, part in parts_of(model, model_type).items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            kept = original_weight(part, name) if is_comfyui(part) else base_weight(module_of(part), name)
            if kept is not None:
                return kept
    return None


def _read_part(part: object) -> Reading[tuple[AppliedPatch, ...]]:
    by_comfyui = read_host(lambda: is_comfyui(part)).value
    reading = read_host(lambda: read_patches(part) if by_comfyui else read_adapters(module_of(part)))
    return Reading(None, reading.reason) if reading.value is None else reading.value


def _with_sources(patches: tuple[AppliedPatch, ...]) -> list[AppliedPatch]:
    """Name the LoRAs of a host that keeps no names, by the order and strength of their changes.

    The weight with most changes shows which LoRAs there are. Where another has fewer, each of its changes
    belongs to the first LoRA of the same strength that comes after the one before.
    """
    if all(patch.source is not None for patch in patches):
        return list(patches)
    by_key: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        by_key.setdefault(patch.key, []).append(patch)
    fullest = max(by_key.values(), key=lambda entries: len({entry.index for entry in entries}))
    order = list({entry.index: entry.strength for entry in fullest}.values())
    places = {id(entry): place for entries in by_key.values() for entry, place in _places(entries, order)}
    return [replace(patch, source=patch.source or f"LoRA {places[id(patch)] + 1}") for patch in patches]


def _places(entries: Patches, order: Sequence[float | None]) -> list[tuple[AppliedPatch, int]]:
    found: list[tuple[AppliedPatch, int]] = []
    place, last_index = -1, None
    for entry in entries:
        if entry.index != last_index:
            after = [p for p in range(place + 1, len(order)) if order[p] == entry.strength]
            place = min(after[0] if after else max(place + 1, entry.index), max(len(order) - 1, 0))
            last_index = entry.index
        found.append((entry, place))
    return found
