"""Which of the changes on a weight act, and with what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sigmascope.errors import LoraFormatError
from sigmascope.probes.adapters.applied import AppliedPatch

_PEFT: Final = "peft."
_WHATEVER_THE_STRENGTH: Final = frozenset({"set", "dora"})


@dataclass(frozen=True, slots=True)
class Sorted:
    """The changes of one weight, sorted.

    Attributes:
        acting: Those that change it, in the order in which the host applies them.
        left_out: Of the others, why not, each once.
    """

    acting: tuple[AppliedPatch, ...]
    left_out: tuple[str, ...]


def sort_patches(patches: Sequence[AppliedPatch]) -> Sorted:
    """Tell the changes that act on a weight from those that are only there.

    A change of strength 0 acts where its host still multiplies the weight itself, or sets it whatever the strength.
    """
    acting: list[AppliedPatch] = []
    left_out: dict[str, None] = {}
    for patch in sorted(patches, key=lambda patch: patch.index):
        reason = _idle(patch)
        if reason is None:
            acting.append(patch)
        else:
            left_out[reason] = None
    return Sorted(tuple(acting), tuple(left_out))


def strength_of(patch: AppliedPatch) -> float:
    """The strength of a change without its scale; 0 for one that is switched off.

    Raises:
        LoraFormatError: It could not be read.
    """
    return 0.0 if patch.state == "inactive" else _known(patch, "strength", patch.strength)


def scale_of_patch(patch: AppliedPatch) -> float:
    """Alpha over rank, as the host has it.

    Raises:
        LoraFormatError: It could not be read.
    """
    return _known(patch, "scale", patch.scale)


def kept_of_weight(patch: AppliedPatch) -> float:
    """What the weight itself is multiplied with before the change.

    Raises:
        LoraFormatError: It could not be read.
    """
    return _known(patch, "strength_model", patch.strength_model)


def is_by_peft(patch: AppliedPatch) -> bool:
    """Whether PEFT applies it, which does some kinds in another way than ComfyUI."""
    return _PEFT in patch.data_type


def _idle(patch: AppliedPatch) -> str | None:
    if patch.state == "failed":
        return f"it cannot be applied: {patch.state_reason}" if patch.state_reason else "it cannot be applied"
    if patch.strength_model not in (1.0, None):
        return None
    if patch.state == "inactive":
        return f"inactive: {patch.state_reason}" if patch.state_reason else "inactive"
    if patch.strength == 0.0 and patch.adapter_type not in _WHATEVER_THE_STRENGTH:
        return "its strength is 0"
    return None


def _known(patch: AppliedPatch, name: str, value: float | None) -> float:
    if value is None:
        reason = patch.unavailable.get(name, "the host does not say")
        raise LoraFormatError(f"the {name} of a change of {patch.key} could not be read: {reason}.")
    return value
