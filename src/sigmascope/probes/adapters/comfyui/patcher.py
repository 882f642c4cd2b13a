"""The patcher, the module under it, and the weights as they were before anything was merged."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sigmascope.probes.adapters.guarded import attribute, lookup
from sigmascope.probes.reading import Reading

_MARKS = ("patches_uuid", "backup", "add_patches", "load_device", "offload_device")
_MOST_HOLDERS = 3


def is_comfyui(model: object) -> bool:
    """Whether it is ComfyUI's: a `ModelPatcher`, or a `CLIP` or `VAE` that holds one."""
    return patcher_of(model) is not None


def weights_of(model: object) -> Reading[nn.Module]:
    """The module whose state dict has the names that the patches are kept under."""
    patcher = patcher_of(model)
    if patcher is None:
        return Reading(None, f"{type(model).__name__} is no patcher and holds none")
    inner = attribute(patcher, "model")
    if not isinstance(inner, nn.Module):
        return Reading(None, f"the patcher's model is {type(inner).__name__}, not a module")
    return Reading(inner)


def original_weight(model: object, key: str) -> Tensor | None:
    """The weight before anything was merged into it: the host's own tensor, not a copy.

    It is what the patcher kept when it merged, and the model's own weight where it merged nothing.

    Args:
        model: A patcher, or what holds one. Clones share what was kept.
        key: The weight's name in the state dict of `weights_of(model)`.

    Returns:
        None if the model has no such weight.
    """
    patcher = patcher_of(model)
    kept = kept_weight(lookup(attribute(patcher, "backup"), key))
    if kept is None:  # hooks change the weight as it is with everything else merged
        kept = kept_weight(lookup(attribute(patcher, "hook_backup"), key))
    return weight_at(attribute(patcher, "model"), key) if kept is None else kept


def patcher_of(model: object) -> Any:
    """The patcher that a model is or holds, or None."""
    try:
        return _patcher_of(model)
    except Exception:  # noqa: BLE001 - even the class of a host's object may raise when it is asked for
        return None


def _patcher_of(model: object) -> Any:
    for _ in range(_MOST_HOLDERS):
        if model is None or isinstance(model, type):
            return None
        if isinstance(attribute(model, "patches"), Mapping) and _is_marked(model):
            return model
        model = attribute(model, "patcher")
    return None


def kept_weight(kept: object) -> Tensor | None:
    """The tensor in an entry of `backup` or `hook_backup`.

    Until August 2024 the entry was the tensor; since then (weight, inplace_update) with names. Hooks keep
    (weight, device).
    """
    try:
        return _kept_weight(kept)
    except Exception:  # noqa: BLE001 - see `patcher_of`
        return None


def _kept_weight(kept: object) -> Tensor | None:
    if isinstance(kept, Tensor):
        return kept
    held = attribute(kept, "weight")
    if held is None and isinstance(kept, tuple) and kept:
        held = kept[0]
    return held if isinstance(held, Tensor) else None


def weight_at(module: object, key: str) -> Tensor | None:
    """The parameter or buffer of a dotted name."""
    for name in key.split("."):
        module = attribute(module, name)
    return module if isinstance(module, Tensor) else None


def _is_marked(model: object) -> bool:
    return attribute(model, "model") is not None and any(
        attribute(model, mark) is not None for mark in _MARKS
    )
