"""Weights that a patcher replaces as objects, and functions that it wraps around weights."""

from collections.abc import Iterator

from torch import Tensor

from sigmascope.probes.adapters.comfyui.found import Found, Standing
from sigmascope.probes.adapters.comfyui.standing import owner_of
from sigmascope.probes.adapters.guarded import attribute, mapping, sequence


def replaced(patcher: object) -> Iterator[Found]:
    """Tensors among `object_patches`. Most of these are no weights: a sampling, a dtype, a function."""
    kept = mapping(patcher, "object_patches_backup")
    for key, value in mapping(patcher, "object_patches").items():
        if isinstance(value, Tensor):
            standing = (
                Standing("merged", "the object that it replaced is kept")
                if key in kept
                else Standing("registered", "to be replaced when the model is loaded")
            )
            yield Found(key, (1.0, ("set", (value,)), 1.0, None, None), standing, "object patch")


def wrapped(patcher: object) -> Iterator[Found]:
    """Functions in `weight_wrapper_patches` (since 2025), of which only the host knows what they do."""
    model = attribute(patcher, "model")
    for key, functions in mapping(patcher, "weight_wrapper_patches").items():
        module, name = owner_of(model, key)
        in_place = sequence(attribute(module, f"{name}_function"))
        for function in sequence(functions):
            standing = (
                Standing("lazy", f"wrapped around the weight of {type(module).__name__} in each forward pass")
                if any(held is function for held in in_place)
                else Standing("registered", "to be wrapped around the weight when the model is loaded")
            )
            yield Found(key, (1.0, function, 1.0, None, None), standing, "weight wrapper")
