"""Which tensors of two checkpoints are the same one, whatever stands before their names."""

from collections.abc import Mapping
from dataclasses import dataclass

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import ModelMismatchError
from sigmascope.lora.models.layout import ModelLayout, Part, layout_of

_ENOUGH_IN_COMMON = 0.5  # of the smaller side's keys: far below any two of one architecture, far above chance
_LORA_MARKS = (".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".lora.up.", ".lora.down.")

Place = tuple[Part, str]
"""A part and the key inside it: the same for one tensor in any naming with the same inner keys."""


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint: how it is laid out, and where each place's tensor is.

    Attributes:
        checkpoint: The opened file.
        layout: How it names its weights.
        keys: Key by place, of the parts that are compared.
        outside: Key by place, of the other parts.
    """

    checkpoint: Checkpoint
    layout: ModelLayout
    keys: Mapping[Place, str]
    outside: Mapping[Place, str]

    def __str__(self) -> str:
        return f"{self.checkpoint.path} ({described(self.layout)})"


def described(layout: ModelLayout) -> str:
    """Such as `sdxl in diffusers naming`."""
    family = "an unknown model" if layout.family == "unknown" else layout.family
    return family if layout.naming in {"unknown", layout.family} else f"{family} in {layout.naming} naming"


def sides_of(base: Checkpoint, tuned: Checkpoint, parts: tuple[Part, ...]) -> tuple[Side, Side]:
    """Lay out two checkpoints such that one tensor has one place in both.

    Args:
        base: The one model.
        tuned: The other.
        parts: What is compared. Where both are a VAE or text encoder alone, the denoiser means that.

    Raises:
        ModelMismatchError: A side is a LoRA, lacks a part, or names its weights unlike the other.
    """
    layouts = _common_layouts(base, tuned)
    parts = _wanted(parts, *layouts)
    sides = _side(base, layouts[0], parts), _side(tuned, layouts[1], parts)
    _refuse_other_naming(*sides)
    return sides


def _common_layouts(base: Checkpoint, tuned: Checkpoint) -> tuple[ModelLayout, ModelLayout]:
    first, second = (layout_of({key: side.info(key).shape for key in side}) for side in (base, tuned))
    same = (first.family, first.naming) == (second.family, second.naming)
    if not same and _in_common(set(base), set(tuned)) >= _ENOUGH_IN_COMMON:
        # The same names mean the same things: a file of a few layers is read as the whole model's names are.
        known = second if first.family == "unknown" else first
        return known, known
    return first, second


def _wanted(parts: tuple[Part, ...], *layouts: ModelLayout) -> tuple[Part, ...]:
    alone = all(
        "denoiser" not in layout.prefixes and [*layout.prefixes.values()] == [""] for layout in layouts
    )
    return tuple(layouts[0].prefixes) if alone and parts == ("denoiser",) else parts


def _side(checkpoint: Checkpoint, layout: ModelLayout, parts: tuple[Part, ...]) -> Side:
    if any(mark in key for key in checkpoint for mark in _LORA_MARKS):
        raise ModelMismatchError(
            f"{checkpoint.path} is a LoRA, not a model.",
            hint="Give a whole checkpoint, or merge the LoRA first.",
        )
    keys: dict[Place, str] = {}
    outside: dict[Place, str] = {}
    for key in checkpoint:
        place = layout.split(key)
        (keys if place[0] in parts else outside)[place] = key
    for part in parts:
        if not any(place[0] == part for place in keys):
            raise _no_such_part(checkpoint, layout, part)
    return Side(checkpoint, layout, keys, outside)


def _no_such_part(checkpoint: Checkpoint, layout: ModelLayout, part: Part) -> ModelMismatchError:
    prefix = " named denoiser.*" if layout.naming == "lbm" and part == "denoiser" else ""
    held = ", ".join(checkpoint.keys()[:3]) or "nothing"
    there = sorted({layout.split(key)[0] for key in checkpoint})
    return ModelMismatchError(
        f"{checkpoint.path} holds no weights{prefix} of the part {part} ({described(layout)}: {held}, …).",
        hint=f"It has the parts {', '.join(there) or 'none'}: choose with --parts, or give a whole checkpoint.",
    )


def _refuse_other_naming(base: Side, tuned: Side) -> None:
    same = (base.layout.family, base.layout.naming) == (tuned.layout.family, tuned.layout.naming)
    common = _in_common(set(base.keys), set(tuned.keys))
    if common == 0 or (not same and common < _ENOUGH_IN_COMMON):
        raise ModelMismatchError(
            f"{base} and {tuned} name their weights differently, so no layer of one is found in the other.",
            hint="Give both in one form: two diffusers folders, or two single files of the same family.",
        )


def _in_common(first: set[Place] | set[str], second: set[Place] | set[str]) -> float:
    smaller = min(len(first), len(second))
    return len(first & second) / smaller if smaller else 0.0
