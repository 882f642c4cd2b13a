"""Tensors that FSDP spreads over processes (PyTorch's DTensor): made whole for files, and spread again from them.

A plain tensor passes through every function here as it is, so that the same code serves training in one process.
"""

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

State = dict[str, Any]
"""An optimizer's `state_dict()`: what it holds for each parameter by number, and its groups."""


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Every process calls this, in the same order."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are on the CPU, and collect where the mesh's processes meet.
    parts: DTensor = tensor.detach().to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    gathered: Tensor = parts.full_tensor()
    return gathered


def here(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


@overload
def collected(value: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]: ...
@overload
def collected(value: Any, *, keep: bool) -> Any: ...
def collected(value: Any, *, keep: bool) -> Any:
    """Nested state with all of its tensors whole; every process calls this.

    Args:
        value: Dicts, lists, tuples, tensors and anything else.
        keep: Whether this process needs the result. Where it does not, spread tensors come out empty, so that one
            process alone holds them all; where it does, they are on the CPU.
    """
    if isinstance(value, DTensor):
        full = whole(value)
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, Mapping):
        return {key: collected(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(collected(item, keep=keep) for item in value)
    return value


def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is spread: each process takes its own part, and nobody waits for another.

    Args:
        tensor: The same in every process, of the shape of `like`.
        like: A parameter.
    """
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    own = distribute_tensor(tensor.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return own.to(like.device)


def spread_optimizer_state(state: State, parameters: list[nn.Parameter]) -> State:
    """An optimizer's whole state as its parameters are spread.

    What has a parameter's shape is spread as it is; counters of steps and other numbers stay.

    Args:
        state: `state_dict()` with whole tensors.
        parameters: In the optimizer's order.
    """
    return {
        **state,
        "state": {
            number: {name: _like(value, parameters[number]) for name, value in values.items()}
            for number, values in state["state"].items()
        },
    }


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward one left gathered: it would be stale once weights change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _like(value: Any, parameter: nn.Parameter) -> Any:
    return spread(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
