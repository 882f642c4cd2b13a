"""How much all the changes of one weight change it together: ‖ΔW‖ and ‖ΔW‖ / ‖W‖."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.effect.acting import is_by_peft, kept_of_weight, sort_patches, strength_of
from sigmascope.lora.effect.patch_change import change_by, needs_weight
from sigmascope.lora.effect.patch_factors import factors_of, fits, is_product, norm_of_sum, weight_shape_of
from sigmascope.lora.effect.weights import NOT_GIVEN, difference, enlarged, finite, weight_norm, wide
from sigmascope.lora.norms import frobenius_norm
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import attempt


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
    delta = attempt(lambda: _change_norm(patches, weight), Exception)
    whole = attempt(lambda: weight_norm(weight), Exception)
    if delta.reason is not None:
        unavailable["delta_norm"] = _plain(delta.reason)
    if whole.reason is not None:
        unavailable["weight_norm"] = _plain(whole.reason)
    found = sort_patches(patches)
    relative = _ratio(delta.value, whole.value, unavailable)
    return Effect(delta.value, relative, whole.value, True, len(found.acting), found.left_out, unavailable)


def measured_effect(before: Tensor, after: Tensor) -> Effect:
    """Measure how a weight's contents differ, ‖after − before‖ with the sum in float64.

    Args:
        before: The weight as it was.
        after: As it is, of the same shape; on any device, which is where the difference is formed.
    """
    unavailable: dict[str, str] = {}
    delta = attempt(lambda: difference(before, after), Exception)
    whole = attempt(lambda: weight_norm(before), Exception)
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
