"""Run a model on the CPU without moving it: copies of its weights take their places for a while."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.pipeline.restore import tensors_of
from sigmascope.pipeline.vaes.hooks import offloads_groups

_CPU = torch.device("cpu")


class _NoHook:
    """Stands in for a hook of accelerate's, which would move the weights to its own device."""

    no_grad = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


def nbytes_to_copy(modules: Iterable[nn.Module]) -> int:
    """Bytes of weights that are not in RAM yet."""
    return sum(one.nbytes for one in tensors_of(modules) if one.device != _CPU)


def why_not_in_ram(modules: Sequence[nn.Module]) -> str | None:
    """Why copies of the weights cannot be had, or None."""
    if any(one.is_meta for one in tensors_of(modules)):
        return "its weights are offloaded piece by piece and not to be read from here"
    if offloads_groups(modules):
        return "diffusers' hooks move its weights, and cannot be set aside"
    return None


def put_in_ram(modules: Iterable[nn.Module]) -> None:
    """Put copies in RAM where the weights, buffers and other tensors of modules are.

    Meant for use inside `restore.as_before(…, also_on_success=True)`, which puts the originals back: they
    have not moved, so that needs no memory on their device.
    """
    parts = [part for module in modules for part in module.modules()]
    copies = {id(one): _copy(one) for part in parts for one in tensors_on(part)}
    for part in parts:
        for held in (part._parameters, part._buffers, vars(part)):
            _swap(held, copies)
        if "_hf_hook" in vars(part):
            vars(part)["_hf_hook"] = _NoHook()


def tensors_on(part: nn.Module) -> list[Tensor]:
    """Its own parameters, buffers, and attributes that are tensors or lists of them."""
    found: list[Tensor] = []
    for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
        items = value if isinstance(value, list | tuple) else (value,)
        found += [item for item in items if isinstance(item, Tensor)]
    return found


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device == _CPU:
        return tensor
    copy = tensor.detach().to(_CPU)
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _swap(held: dict[str, Any], copies: Mapping[int, Tensor]) -> None:
    for name, value in list(held.items()):
        if isinstance(value, Tensor):
            held[name] = copies[id(value)]
        elif type(value) in (list, tuple) and any(isinstance(item, Tensor) for item in value):
            held[name] = type(value)(copies.get(id(item), item) for item in value)
