"""A model's modules and tensors, found without calling anything of the model.

`Module.modules`, `parameters` and `state_dict` run the host's code where a class has its own: PEFT's layer around
`nn.MultiheadAttention` registers its weights anew each time one of them is called.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

_KEPT_PLAIN: Final = ("in_proj_weight", "weight")
"""Of attention, what PEFT keeps as plain attributes while an adapter is merged into it."""


def named_modules_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module with its dotted name, the model itself first under ""; one that occurs twice is given once."""
    return _walk("", module, set())


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """Each module of a model, itself first."""
    return (found for _, found in named_modules_in(module))


def own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module itself, by name, and those of attention that PEFT has taken out of the register."""
    registered = _registered(module, "_parameters")
    for name, parameter in registered.items():
        if isinstance(parameter, Tensor):
            yield name, parameter
    if isinstance(module, nn.MultiheadAttention | nn.modules.linear.NonDynamicallyQuantizableLinear):
        for name in _KEPT_PLAIN:
            plain = vars(module).get(name)
            if name not in registered and isinstance(plain, Tensor):
                yield name, plain


def own_buffers(module: nn.Module, *, transient: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module itself, by name; without `transient` only those that a state dict has."""
    left_out = () if transient else vars(module).get("_non_persistent_buffers_set") or ()
    for name, buffer in _registered(module, "_buffers").items():
        if isinstance(buffer, Tensor) and name not in left_out:
            yield name, buffer


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules right inside a module, by name."""
    held = _registered(module, "_modules")
    return {name: child for name, child in held.items() if isinstance(child, nn.Module)}


def _walk(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for own, child in children_of(module).items():
        yield from _walk(f"{name}.{own}" if name else own, child, seen)


def _registered(module: nn.Module, holder: str) -> Mapping[str, object]:
    held = vars(module).get(holder)
    return held if isinstance(held, Mapping) else {}
