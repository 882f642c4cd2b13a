"""Every change that PEFT's layers make to a model's weights, as `AppliedPatch`es."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from torch import nn

from sigmascope.probes.adapters.applied import AppliedPatch, PatchType
from sigmascope.probes.adapters.guarded import attribute
from sigmascope.probes.adapters.peft.changes import Change, adapters_of, changes_of, misfit
from sigmascope.probes.adapters.peft.layer import Standing, standing_of
from sigmascope.probes.adapters.peft.scales import scales_of
from sigmascope.probes.adapters.peft.walk import adapted_modules, bare, tensor_at, wrapped
from sigmascope.probes.reading import Reading, describe

_PATCH_TYPES: Final[Mapping[str, PatchType]] = {"lora": "lora_up", "dora": "lora_up", "diff": "diff"}


def is_peft(model: object) -> bool:
    """Whether PEFT has put adapters into it, or into a component of a pipeline. Never raises."""
    try:
        return any(wrapped(module) is not None for _, module in adapted_modules(model))
    except Exception:  # noqa: BLE001 - the host's objects may raise anything
        return False


def read_adapters(model: object) -> Reading[tuple[AppliedPatch, ...]]:
    """Every adapter on every weight of a model, acting or not.

    Never raises. Nothing is merged, moved, copied or registered. A layer that cannot be read is there as "unknown"
    with the reason. The strength of a merged adapter is what the layer says now: PEFT keeps no other, so one that
    was set after merging is not the one in the weight.

    Args:
        model: A module that diffusers, transformers or PEFT injected adapters into, compiled or not, or a pipeline
            of such; then the component's name comes before each key.

    Returns:
        By weight in the model's order; the changes of one weight in the order in which they are applied. None of
        a model without adapters.
    """
    if not isinstance(model, nn.Module) and not isinstance(attribute(model, "components"), Mapping):
        return Reading(None, f"{type(model).__name__} is neither a module nor a pipeline")
    try:
        return Reading(tuple(_patches(model)))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return Reading(None, describe(error))


def _patches(model: object) -> Iterator[AppliedPatch]:
    layers: dict[str, list[nn.Module]] = {}
    for name, module in adapted_modules(model):
        if wrapped(module) is not None:
            layers.setdefault(name, []).insert(0, module)  # the innermost acts first
    counts: dict[str, int] = {}
    for name, around in layers.items():
        for layer in around:
            yield from _of_layer(name, layer, counts)


def _of_layer(name: str, layer: nn.Module, counts: dict[str, int]) -> Iterator[AppliedPatch]:
    standing = standing_of(layer)
    for adapter in sorted(adapters_of(layer), key=standing.order):
        for patch in _of_adapter(name, layer, adapter, standing):
            index = counts.get(patch.key, 0)
            counts[patch.key] = index + 1
            yield replace(patch, index=index)


def _of_adapter(name: str, layer: nn.Module, adapter: str, standing: Standing) -> list[AppliedPatch]:
    try:
        return [_applied(name, layer, adapter, change, standing) for change in changes_of(layer, adapter)]
    except Exception as error:  # noqa: BLE001 - see read_adapters
        return [_unreadable(name, layer, adapter, describe(error))]


def _applied(name: str, layer: nn.Module, adapter: str, change: Change, standing: Standing) -> AppliedPatch:
    scales = scales_of(layer, adapter, change)
    shape = _shape(layer, change.parameter)
    unavailable = {**change.unavailable, **scales.unavailable}
    if shape is None:
        unavailable["weight_shape"] = "the layer has no weight of that name"
    state, reason = standing.of(adapter, scales.strength, change.kind)
    why = misfit(change, shape)
    if why is not None:
        state, reason = "failed", why
    return AppliedPatch(
        key=f"{name}.{change.parameter}" if name else change.parameter,
        adapter_type=change.kind,
        patch_type=_PATCH_TYPES.get(change.kind, "unknown"),
        data_type=str(type(layer)),
        state=state,
        state_reason=reason,
        source=adapter,
        strength=scales.strength,
        rank=scales.rank,
        alpha=scales.alpha,
        scale=scales.scale,
        tensors=change.tensors,
        weight_shape=shape,
        unavailable=unavailable,
    )


def _shape(layer: nn.Module, parameter: str) -> tuple[int, ...] | None:
    """The weight's shape; of a quantised matrix what it stands for, not how it is packed."""
    weight = tensor_at(layer, parameter)
    if weight is None:
        return None
    base = bare(layer)
    sizes = attribute(base, "out_features"), attribute(base, "in_features")
    if not weight.is_floating_point() and all(isinstance(size, int) for size in sizes):
        return sizes
    return tuple(weight.shape)


def _unreadable(name: str, layer: nn.Module, adapter: str, reason: str) -> AppliedPatch:
    return AppliedPatch(
        key=f"{name}.weight" if name else "weight",
        adapter_type="unknown",
        patch_type="unknown",
        data_type=str(type(layer)),
        state="registered",
        state_reason="the layer cannot be read",
        source=adapter,
        strength=None,
        scale=None,
        unavailable={"patch": reason},
    )
