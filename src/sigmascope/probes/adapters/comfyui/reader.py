"""Everything that a patcher would do to its model's weights, as `AppliedPatch`es."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch, PatchState, PatchType
from sigmascope.probes.adapters.comfyui.entries import read_entry
from sigmascope.probes.adapters.comfyui.expansion import Part, parts_of
from sigmascope.probes.adapters.comfyui.fit import misfit
from sigmascope.probes.adapters.comfyui.patcher import original_weight, patcher_of
from sigmascope.probes.adapters.comfyui.standing import Standing, Standings
from sigmascope.probes.reading import Reading, describe

_PATCH_TYPES: dict[str, PatchType] = {"lora": "lora_up", "diff": "diff"}
"""Seed rules ask for 'lora_up.weight' first; a LoRA's entry holds up and down both."""


def read_patches(model: object) -> Reading[tuple[AppliedPatch, ...]]:
    """Every change that a `ModelPatcher`, or the patcher of a `CLIP`, has for its model's weights.

    Never raises. Nothing is loaded, merged, moved or copied. An entry that cannot be read is there as
    "unknown" with the reason.

    Args:
        model: A patcher, or what holds one.

    Returns:
        One `AppliedPatch` for an entry, by key in the host's order. Two kinds of entries are several, with
        one `index`: a model merge (its weight, and each change upon that) and `model_as_lora` (the other
        model's weight, less the original).
    """
    patcher = patcher_of(model)
    if patcher is None:
        return Reading(None, f"{type(model).__name__} is no patcher and holds none")
    try:
        return Reading(tuple(_patches(patcher)))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return Reading(None, describe(error))


def _patches(patcher: Any) -> Iterator[AppliedPatch]:
    standings = Standings(patcher)
    for key, entries in list(patcher.patches.items()):
        weight = original_weight(patcher, key)
        for index, kept in enumerate(entries):
            yield from _read(key, index, kept, weight, standings.of(key, kept))


def _read(
    key: str, index: int, kept: object, weight: Tensor | None, standing: Standing
) -> Iterator[AppliedPatch]:
    try:
        parts = parts_of(read_entry(kept), weight)
    except Exception as error:  # noqa: BLE001 - see read_patches
        yield _unreadable(key, index, kept, standing, describe(error))
        return
    for part in parts:
        yield _applied(key, index, part, weight, standing)


def _applied(key: str, index: int, part: Part, weight: Tensor | None, standing: Standing) -> AppliedPatch:
    entry, change = part.entry, part.change
    shape = None if weight is None else tuple(weight.shape)
    unavailable = {**change.unavailable, **entry.unavailable}
    if shape is None:
        unavailable["weight_shape"] = "the model has no weight of that name"
    state, reason = _state(part, shape, standing)
    return AppliedPatch(
        key,
        change.adapter_type,
        _PATCH_TYPES.get(change.kind, "unknown"),
        str(type(part.kept_value)),
        state,
        reason,
        index=index,
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


def _state(part: Part, shape: tuple[int, ...] | None, standing: Standing) -> tuple[PatchState, str]:
    entry, change = part.entry, part.change
    if shape is None:
        return "failed", "the model has no weight of that name"
    why = misfit(change, shape, entry.offset)
    if why is not None:
        return "failed", why
    if entry.strength == 0 and entry.strength_model == 1 and change.kind != "set":
        return "inactive", f"its strength is 0 ({standing.state}: {standing.reason})"
    return standing.state, standing.reason


def _unreadable(key: str, index: int, kept: object, standing: Standing, reason: str) -> AppliedPatch:
    return AppliedPatch(
        key,
        "unknown",
        "unknown",
        str(type(kept)),
        standing.state,
        standing.reason,
        index=index,
        strength=None,
        strength_model=None,
        scale=None,
        unavailable={"patch": reason},
    )
