"""What the hooks that accelerate and diffusers put on a model say of it. Neither is imported."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def execution_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """Where accelerate's hooks will move a model or its parts to compute; None without such hooks."""
    for part in _parts(modules):
        hook = vars(part).get("_hf_hook")
        for one in (hook, *getattr(hook, "hooks", ())):  # several on one module are in one that has them all
            place = getattr(one, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return None


def has_diffusers_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether diffusers casts or moves weights layer by layer, so that what they are is not what they compute in."""
    return any(_registry(part) is not None for part in _parts(modules))


def offloads_groups(modules: Iterable[nn.Module]) -> bool:
    """Whether diffusers moves groups of layers to a device and back."""
    hooks = (getattr(_registry(part), "hooks", {}) for part in _parts(modules))
    return any("offloading" in name for names in hooks for name in names)


def _registry(part: nn.Module) -> Any:
    return vars(part).get("_diffusers_hook")


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()
