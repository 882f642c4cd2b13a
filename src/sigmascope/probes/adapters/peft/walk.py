"""The modules of a model under the names that they have without adapters."""

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from sigmascope.probes.adapters.guarded import attribute
from sigmascope.probes.walking import children_of, own_buffers, own_parameters

_WRAPPED: Final = ("base_layer", "original_module")
_AROUND_WHOLE_MODELS: Final = {
    "_orig_mod": ("OptimizedModule",),
    "module": ("DataParallel", "DistributedDataParallel"),
    "base_model": ("PeftModel",),
    "model": ("BaseTuner",),
}
"""Where a wrapper keeps the model, and the classes that keep one there."""


def adapted_modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, wrappers of adapters before what they wrap and under the same name.

    What belongs to an adapter is left out. A module that occurs twice is given once.

    Args:
        model: A module, compiled or not, PEFT's own wrapper of one, or a pipeline, whose components' names come
            before the names of their modules.
    """
    seen: set[int] = set()
    for name, root in _roots(model):
        yield from _walk(name, root, seen)


def base_weights(model: object) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers without those of adapters, by the names that a state dict has before any is injected.

    A weight that an adapter is merged into is given as it is, with the adapter in it. Each is the host's own
    tensor. Buffers that a state dict leaves out are left out.
    """
    for name, module in adapted_modules(model):
        if wrapped(module) is None:
            for own, tensor in _own_tensors(module):
                yield f"{name}.{own}" if name else own, tensor


def base_weight(model: object, key: str) -> Tensor | None:
    """The weight that adapters change: the host's own tensor, not a copy, and merged adapters are in it.

    Args:
        model: A module or a pipeline.
        key: As `AppliedPatch.key` has it: the state dict's name without wrappers, so without `.base_layer`.

    Returns:
        None if there is no such weight, or its numbers are not to be had: quantised, or on the meta device.
    """
    tensor = tensor_at(model, key)
    return tensor if tensor is not None and tensor.is_floating_point() and not tensor.is_meta else None


def tensor_at(model: object, key: str) -> Tensor | None:
    """The tensor of that name without wrappers, whatever it is; None if there is none."""
    *path, own = key.split(".")
    found: object = model
    if not isinstance(model, nn.Module) and path:
        found = _component(model, path.pop(0))
    for part in path:
        found = _children(bare(found)).get(part)
    return _own_tensor(bare(found), own)


def bare(module: object) -> object:
    """The module without compilation and layers of adapters around it."""
    while isinstance(module, nn.Module):
        module = _unwrapped(module)
        inner = wrapped(module)
        if inner is None:
            return module
        module = inner
    return module


def _own_tensor(module: object, name: str) -> Tensor | None:
    """A parameter or buffer of the module itself; PEFT keeps merged weights of attention as plain attributes."""
    for holder in ("_parameters", "_buffers"):
        held = _registered(module, holder).get(name)
        if isinstance(held, Tensor):
            return held
    plain = vars(module).get(name) if isinstance(module, nn.Module) else None
    return plain if isinstance(plain, Tensor) else None


def wrapped(module: object) -> nn.Module | None:
    """What a layer of an adapter is put around, or None if it is no such layer."""
    held = _registered(module, "_modules")
    for name in _WRAPPED:
        inner = held.get(name)
        if isinstance(inner, nn.Module) and isinstance(attribute(module, "adapter_layer_names"), tuple):
            return inner
    return None


def _component(pipeline: object, name: str) -> object:
    """A component of a pipeline; None if there is none of that name."""
    components = attribute(pipeline, "components")
    return components.get(name) if isinstance(components, Mapping) else None


def _roots(model: object) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield "", model
        return
    components = attribute(model, "components")
    if isinstance(components, Mapping):
        for name, part in components.items():
            if isinstance(part, nn.Module):
                yield str(name), part


def _walk(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    module = _unwrapped(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    inner = wrapped(module)
    if inner is not None:
        yield from _walk(name, inner, seen)
        return
    for own, child in _children(module).items():
        yield from _walk(f"{name}.{own}" if name else own, child, seen)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without what torch.compile, data parallelism or PEFT's model classes put around a whole module."""
    inner = _inside(module)
    return module if inner is None else _unwrapped(inner)


def _inside(module: nn.Module) -> nn.Module | None:
    held = _registered(module, "_modules")
    for name, kinds in _AROUND_WHOLE_MODELS.items():
        inner = held.get(name)
        if isinstance(inner, nn.Module) and any(base.__name__ in kinds for base in type(module).__mro__):
            return inner
    return None


def _children(module: object) -> dict[str, nn.Module]:
    return children_of(module) if isinstance(module, nn.Module) else {}


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from own_parameters(module)
    yield from own_buffers(module, transient=False)


def _registered(module: object, holder: str) -> Mapping[str, object]:
    """What is registered on a module itself, past any `__getattr__` of its own."""
    held = vars(module).get(holder) if isinstance(module, nn.Module) else None
    return held if isinstance(held, Mapping) else {}
