"""An entry made into `AppliedPatch`es."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch, PatchType
from sigmascope.probes.adapters.comfyui.entries import read_entry
from sigmascope.probes.adapters.comfyui.expansion import Part, parts_of
from sigmascope.probes.adapters.comfyui.fit import misfit
from sigmascope.probes.adapters.comfyui.found import Found, Standing
from sigmascope.probes.reading import describe

_PATCH_TYPES: dict[str, PatchType] = {"lora": "lora_up", "diff": "diff"}
"""By the rules of SPEC section 3, of which 'lora_up' comes first: a LoRA's entry holds up and down both."""


def applied(found: Found, index: int, weight: Tensor | None) -> Iterator[AppliedPatch]:
    """One entry as the changes that it stands for; one that cannot be read as "unknown".

    Args:
        found: The entry.
        index: Its place among those of its weight.
        weight: The weight before any change; None if the model has none of that name.
    """
    try:
        parts = parts_of(read_entry(found.kept), weight)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        yield _unreadable(found, index, describe(error))
        return
    for part in parts:
        yield _applied(found, index, _beside(part) if found.bypass else part, weight)


def _applied(found: Found, index: int, part: Part, weight: Tensor | None) -> AppliedPatch:
    entry, change = part.entry, part.change
    shape = None if weight is None else tuple(weight.shape)
    unavailable = {**change.unavailable, **entry.unavailable}
    if shape is None:
        unavailable["weight_shape"] = "the model has no weight of that name"
    state, reason = _standing(part, shape, found.standing)
    return AppliedPatch(
        found.key,
        change.adapter_type,
        _PATCH_TYPES.get(change.kind, "unknown"),
        str(type(part.kept_value)),
        state,
        reason,
        found.source,
        index,
        strength=entry.strength,
        strength_model=entry.strength_model,
        rank=change.rank,
        alpha=change.alpha,
        scale=change.scale,
        tensors=change.tensors,
        weight_shape=shape,
        offset=entry.offset,
        unavailable=unavailable,
    )


def _beside(part: Part) -> Part:
    """Beside a layer the host multiplies factors and looks at no magnitudes."""
    if "dora_scale" not in part.change.tensors:
        return part
    tensors = {name: tensor for name, tensor in part.change.tensors.items() if name != "dora_scale"}
    unavailable = {**part.change.unavailable, "dora_scale": "is there, and a bypass does not look at it"}
    return replace(part, change=replace(part.change, tensors=tensors, unavailable=unavailable))


def _standing(part: Part, shape: tuple[int, ...] | None, standing: Standing) -> Standing:
    entry, change = part.entry, part.change
    if shape is None:
        return Standing("failed", "the model has no weight of that name")
    why = misfit(change, shape, entry.offset)
    if why is not None:
        return Standing("failed", why)
    if entry.strength == 0 and entry.strength_model == 1 and change.kind != "set":
        return Standing("inactive", f"its strength is 0 ({standing.state}: {standing.reason})")
    return standing


def _unreadable(found: Found, index: int, reason: str) -> AppliedPatch:
    return AppliedPatch(
        found.key,
        "unknown",
        "unknown",
        str(type(found.kept)),
        *found.standing,
        found.source,
        index,
        strength=None,
        strength_model=None,
        scale=None,
        unavailable={"patch": reason},
    )
