"""Adapters that act beside a layer and leave its weight alone (ComfyUI's bypass mode, since 2026)."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from sigmascope.probes.adapters.comfyui.found import Found, Standing
from sigmascope.probes.adapters.guarded import attribute, mapping, sequence
from sigmascope.probes.walking import named_modules_in

_BESIDE = "beside the layer in each forward pass, its weight unchanged"
_WAITING_FOR_LOADING = "to be put beside the layer when the model is loaded"


def bypassed(patcher: object) -> Iterator[Found]:
    """The adapters that a patcher's injections put beside layers.

    An injection is a pair of functions that share a manager, whose hooks each have a module, an adapter, its
    multiplier, and the module's own forward while they are in place.
    """
    hooks = [
        (place + 1, hook)
        for place, injections in enumerate(mapping(patcher, "injections").values())
        for injection in sequence(injections)
        for hook in _hooks_of(attribute(injection, "inject"))
    ]
    names = _names(attribute(patcher, "model")) if hooks else {}
    for position, hook in hooks:
        key = names.get(id(attribute(hook, "module")), "")
        in_place = attribute(hook, "original_forward") is not None
        standing = Standing("lazy", _BESIDE) if in_place else Standing("registered", _WAITING_FOR_LOADING)
        entry = (attribute(hook, "multiplier"), attribute(hook, "adapter"), 1.0, None, None)
        yield Found(f"{key}.weight", entry, standing, f"bypass {position}", bypass=True)


def _hooks_of(function: Any) -> list[object]:
    """The hooks of the manager that a function closes over."""
    for cell in sequence(attribute(function, "__closure__")):
        hooks = sequence(attribute(attribute(cell, "cell_contents"), "hooks"))
        if hooks and all(attribute(hook, "adapter") is not None for hook in hooks):
            return list(hooks)
    return []


def _names(model: object) -> dict[int, str]:
    if not isinstance(model, nn.Module):
        return {}
    return {id(module): name for name, module in named_modules_in(model)}
