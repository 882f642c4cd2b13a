"""How a model was set up to run: offloading, casting, compiling, memory format."""

import torch
from torch import Tensor, nn

from sigmascope.probes.walking import modules_in, own_parameters
from sigmascope.records.pipeline import Offload

_CASTING, _GROUP = "layerwise_casting", "group_offloading"
_MODEL_OFFLOAD_HOOK = "CpuOffload"


def offload_of(module: nn.Module) -> Offload | None:
    """Which offloading moves a model's weights, by the hooks of accelerate and diffusers on it.

    Args:
        module: The model.

    Returns:
        "model": the whole model moves when it is called; "sequential": each leaf does; "group": groups of
        layers do; None: nothing moves.
    """
    if _has_hook(module, _GROUP):
        return "group"
    if type(getattr(module, "_hf_hook", None)).__name__ == _MODEL_OFFLOAD_HOOK:
        return "model"
    if any(getattr(getattr(part, "_hf_hook", None), "offload", False) is True for part in modules_in(module)):
        return "sequential"
    return None


def layerwise_casting(module: nn.Module) -> bool:
    """Whether diffusers stores the weights in a narrower type than it computes in."""
    return _has_hook(module, _CASTING)


def is_compiled(module: object) -> bool:
    """Whether torch.compile has been applied to a module, or to a part of it."""
    if not isinstance(module, nn.Module):
        return False
    return any(
        type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None
        for part in modules_in(module)
    )


def channels_last(module: nn.Module) -> bool | None:
    """Whether most of its convolution weights lie channels-last.

    Kernels of 1×1 are both at once and do not count; None where no others are.
    """
    kernels = [p for p in _parameters(module) if p.dim() == 4 and p.shape[1] > 1 and max(p.shape[2:]) > 1]
    last = sum(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    return None if not kernels else 2 * last > len(kernels)


def _parameters(module: nn.Module) -> list[Tensor]:
    return [parameter for part in modules_in(module) for _, parameter in own_parameters(part)]


def _has_hook(module: nn.Module, name: str) -> bool:
    registries = (getattr(part, "_diffusers_hook", None) for part in modules_in(module))
    return any(name in key for one in registries for key in (getattr(one, "hooks", None) or ()))
