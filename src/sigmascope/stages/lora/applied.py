"""The changes that are on a model now, whoever put them there, under the names of its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.adapters.comfyui import is_comfyui, original_weight, read_patches
from sigmascope.probes.adapters.peft import base_weight, read_adapters
from sigmascope.probes.reading import Reading
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.parts import module_of, parts_of

UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """All changes on what a host calls its UNet or CLIP. It holds the host's own tensors.

    Attributes:
        patches: In the order in which the parts hold them.
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
            found.setdefault(patch.source or UNNAMED, []).append(patch)
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
            patches += [replace(patch, key=prefix + patch.key) for patch in reading.value]
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
