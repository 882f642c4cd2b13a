"""How much the changes on a model change its weights: ‖ΔW‖ and ‖ΔW‖ / ‖W‖, by weight and block.

`effect_of` calculates what all the changes of one weight do to it together, `measured_effect` compares a weight's
contents before and after, and `by_block` puts the effects of a model's weights together. Sums are in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import require_memory
from sigmascope.lora.layer_names import block_of_module, block_position
from sigmascope.lora.linalg import as_float64, blocked_norm, frobenius_norm, is_real, root_sum_square
from sigmascope.lora.patches import (
    change_by,
    factors_of,
    fits,
    is_by_peft,
    is_product,
    kept_of_weight,
    needs_weight,
    norm_of_sum,
    sort_patches,
    strength_of,
    weight_shape_of,
)
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.reading import attempt

__all__ = ["BlockEffect", "Effect", "by_block", "effect_of", "measured_effect"]

NOT_GIVEN: Final = "the weight was not given"
_CHUNK: Final = 1 << 20  # values that are widened at once


@dataclass(frozen=True, slots=True)
class Effect:
    """What is done to one weight.

    Attributes:
        delta_norm: ‖ΔW‖, the Frobenius norm of all changes together; 0 where none acts.
        relative_change: ‖ΔW‖ / ‖W‖.
        weight_norm: ‖W‖ of the weight without the changes.
        predicted: Whether it was calculated from the changes; else it is the difference of two contents.
        acting: How many changes act.
        left_out: Why others do not: inactive, of strength 0, or of another shape than the weight.
        unavailable: What could not be had, with the reason.
    """

    delta_norm: float | None
    relative_change: float | None
    weight_norm: float | None
    predicted: bool = True
    acting: int = 0
    left_out: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The effect as JSON values."""
        return asdict(self) | {"left_out": list(self.left_out), "unavailable": dict(self.unavailable)}


def effect_of(patches: Sequence[AppliedPatch], weight: Tensor | None) -> Effect:
    """Calculate what the changes of one weight do to it, as their host does or would.

    Sums of plain low-rank changes are measured from matrices as small as their ranks, without forming them. All
    other kinds are formed for this one weight in float64, one after the other where one depends on what those
    before it left.

    Args:
        patches: All changes of the weight, in any order: several LoRAs, parts of it, with strengths.
        weight: Without the changes, on any device, of any shape; it is read, not kept. None: what depends on it is
            unavailable.

    Returns:
        The effect. Nothing is raised: what cannot be calculated is None, with the reason.
    """
    unavailable: dict[str, str] = {}
    delta = attempt(lambda: _change_norm(patches, weight))
    whole = attempt(lambda: weight_norm(weight))
    if delta.reason is not None:
        unavailable["delta_norm"] = _plain(delta.reason)
    if whole.reason is not None:
        unavailable["weight_norm"] = _plain(whole.reason)
    acting = sort_patches(patches)
    relative = _ratio(delta.value, whole.value, unavailable)
    return Effect(delta.value, relative, whole.value, True, len(acting.acting), acting.left_out, unavailable)


def measured_effect(before: Tensor, after: Tensor) -> Effect:
    """Measure how a weight's contents differ, ‖after − before‖ with the sum in float64.

    Args:
        before: The weight as it was.
        after: As it is, of the same shape; on any device, which is where the difference is formed.
    """
    unavailable: dict[str, str] = {}
    delta = attempt(lambda: difference(before, after))
    whole = attempt(lambda: weight_norm(before))
    if delta.reason is not None:
        unavailable["delta_norm"] = _plain(delta.reason)
    if whole.reason is not None:
        unavailable["weight_norm"] = _plain(whole.reason)
    relative = _ratio(delta.value, whole.value, unavailable)
    return Effect(delta.value, relative, whole.value, False, unavailable=unavailable)


def _change_norm(patches: Sequence[AppliedPatch], weight: Tensor | None) -> float:
    acting = sort_patches(patches).acting
    if not acting:
        return 0.0
    shape = weight_shape_of(acting, weight)
    if shape is not None and all(_is_added(patch, shape) for patch in acting):
        return finite(norm_of_sum([factors_of(patch, shape) for patch in acting]))
    return finite(frobenius_norm(delta_of(acting, weight)))


def _is_added(patch: AppliedPatch, shape: tuple[int, ...]) -> bool:
    """Whether it adds factors of the weight's own matrix, and leaves the weight as it is."""
    return is_product(patch) and patch.strength_model == 1.0 and fits(patch, shape)


def _ratio(delta: float | None, whole: float | None, unavailable: dict[str, str]) -> float | None:
    if delta is None or whole is None:
        unavailable["relative_change"] = unavailable.get("delta_norm") or unavailable["weight_norm"]
        return None
    if whole == 0.0:
        unavailable["relative_change"] = "the weight is all zeros"
        return None
    return delta / whole


def _plain(reason: str) -> str:
    """Our own errors by their message alone; others with their type before it."""
    name, _, message = reason.partition(": ")
    return message if name in {"LoraFormatError", "ModelMismatchError", "NonFiniteError"} else reason


def delta_of(acting: Sequence[AppliedPatch], weight: Tensor | None) -> Tensor:
    """Form ΔW of changes that act, in float64, on the weight's device.

    Raises:
        SigmascopeError: A change that cannot be calculated, or not without the weight.
    """
    shape = weight_shape_of(acting, weight)
    if weight is None and any(map(needs_weight, acting)):
        raise LoraFormatError(f"{NOT_GIVEN}, and what it is changed by depends on it.")
    if shape is None:
        raise LoraFormatError(f"{NOT_GIVEN}, and its shape is not known.")
    if weight is None or tuple(weight.shape) != shape:  # a host enlarges the weight
        require_memory("the change", shape, torch.float64)
    base = torch.zeros(shape, dtype=torch.float64) if weight is None else enlarged(wide(weight), shape)
    delta = torch.zeros_like(base)
    for patch in acting:
        part, change = (_part(whole, patch) for whole in (base, delta))
        before = part + change
        if patch.strength_model != 1.0:
            kept = kept_of_weight(patch)
            change += (kept - 1.0) * before
            before = before * kept
        if strength_of(patch) != 0.0 or patch.adapter_type in {"set", "dora"}:
            change += change_by(patch, before, part if _is_beside(patch) else before)
    return delta


def _is_beside(patch: AppliedPatch) -> bool:
    """Whether it is a branch of PEFT's beside a weight that stays as it is."""
    return is_by_peft(patch) and patch.state != "merged"


def _part(whole: Tensor, patch: AppliedPatch) -> Tensor:
    if patch.offset is None:
        return whole
    axis, start, length = patch.offset
    if axis >= whole.ndim or start + length > whole.shape[axis]:
        raise ModelMismatchError(f"{patch.key}: {patch.offset} is no part of a weight {tuple(whole.shape)}.")
    return whole.narrow(axis, start, length)


@dataclass(frozen=True, slots=True)
class BlockEffect:
    """What is done to the changed weights of one block.

    Attributes:
        name: Such as `up_blocks.1` or `text_encoder.3`.
        keys: How many weights of it have changes.
        delta_norm: ‖ΔW‖ of those that could be measured; None where none could.
        weight_norm: ‖W‖ of all its weights that have changes; None unless all are known.
        relative_change: ‖ΔW‖ / ‖W‖ of the weights of which both are known; None without any.
        share: Of all blocks' ‖ΔW‖², 0 to 1.
        predicted: Whether any of it was calculated from the changes and not read from contents.
        unavailable: What could not be had, with the reason.
    """

    name: str
    keys: int
    delta_norm: float | None
    weight_norm: float | None
    relative_change: float | None
    share: float
    predicted: bool
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The block as JSON values."""
        return asdict(self) | {"unavailable": dict(self.unavailable)}


def by_block(effects: Mapping[str, Effect]) -> tuple[BlockEffect, ...]:
    """Put effects together, in the order in which a latent passes the blocks.

    Args:
        effects: By name of the weight in a model's state dict, or of the module in a LoRA file.
    """
    placed = sorted(
        ((block_of_module(key), effect) for key, effect in effects.items()),
        key=lambda item: block_position(item[0]),
    )
    total = root_sum_square([effect.delta_norm or 0.0 for effect in effects.values()])
    return tuple(
        _block(name, [effect for _, effect in members], total)
        for name, members in groupby(placed, key=lambda item: item[0])
    )


def _block(name: str, effects: list[Effect], total: float) -> BlockEffect:
    deltas = [effect.delta_norm for effect in effects if effect.delta_norm is not None]
    weights = [effect.weight_norm for effect in effects if effect.weight_norm is not None]
    both = [effect for effect in effects if effect.delta_norm is not None and effect.weight_norm is not None]
    delta = root_sum_square(deltas) if deltas else None
    below = root_sum_square([effect.weight_norm or 0.0 for effect in both])
    above = root_sum_square([effect.delta_norm or 0.0 for effect in both])
    return BlockEffect(
        name=name,
        keys=len(effects),
        delta_norm=delta,
        weight_norm=root_sum_square(weights) if len(weights) == len(effects) else None,
        relative_change=above / below if below > 0.0 else None,
        share=((delta or 0.0) / total) ** 2 if total > 0.0 else 0.0,
        predicted=any(effect.predicted for effect in effects),
        unavailable=_reasons(effects),
    )


def _reasons(effects: list[Effect]) -> dict[str, str]:
    """The first reason of each figure, and of how many weights it is missing."""
    keys_by_reason: dict[str, list[str]] = {}
    for effect in effects:
        for figure, reason in effect.unavailable.items():
            keys_by_reason.setdefault(figure, []).append(reason)
    return {
        figure: f"of {len(reasons)} of {len(effects)} weights: {reasons[0]}"
        for figure, reasons in keys_by_reason.items()
    }


def weight_norm(weight: Tensor | None) -> float:
    """‖W‖.

    Raises:
        LoraFormatError: There is no weight, or one whose stored numbers are not the layer's.
        NonFiniteError: It holds NaN or Inf.
    """
    if weight is None:
        raise LoraFormatError(NOT_GIVEN)
    _require_numbers(weight)
    return finite(blocked_norm(weight.cpu() if weight.device.type == "mps" else weight), "the weight")


def difference(before: Tensor, after: Tensor) -> float:
    """‖after − before‖, formed piece by piece on the device of `after`; raises what `weight_norm` does.

    Raises:
        ModelMismatchError: They are of different shape.
    """
    if before.shape != after.shape:
        raise ModelMismatchError(f"the weight was {tuple(before.shape)} and is {tuple(after.shape)}.")
    _require_numbers(before)
    _require_numbers(after)
    first, second = before.detach().to(after.device).reshape(-1), after.detach().reshape(-1)
    squares = []
    for start in range(0, prod(after.shape), _CHUNK):
        chunk = second[start : start + _CHUNK].to(torch.float64) - first[start : start + _CHUNK].to(
            torch.float64
        )
        squares.append(torch.dot(chunk, chunk))
    return finite(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)


def finite(norm: float, what: str = "the change") -> float:
    """The norm.

    Raises:
        NonFiniteError: It is NaN or infinite.
    """
    if not isfinite(norm):
        raise NonFiniteError(f"{what} holds NaN or Inf, or numbers too large for float64.")
    return norm


def wide(weight: Tensor) -> Tensor:
    """The weight in float64; raises what `weight_norm` does of its dtype."""
    _require_numbers(weight)
    return as_float64(weight)


def enlarged(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight with zeros behind, up to a shape."""
    if tuple(weight.shape) == shape:
        return weight
    whole = weight.new_zeros(shape)
    whole[tuple(map(slice, weight.shape))] = weight
    return whole


def _require_numbers(weight: Tensor) -> None:
    if not is_real(weight.dtype):
        raise LoraFormatError(
            f"the weight is stored as {str(weight.dtype).removeprefix('torch.')}, whose numbers are not those of the layer."
        )
