"""Modules and weights under the names that they have without adapters, whatever PEFT put around them.

Modules are walked by what is registered on them and not by `named_modules` or `state_dict`, which PEFT's attention layer
answers by registering its weights anew.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from torch import Tensor, nn

from sigmascope.probes.models import own_buffers, own_parameters, tensors_at
from sigmascope.probes.module_tree import ModuleTree, registered, tree_of
from sigmascope.probes.reading import attribute

_WRAPPED: Final = ("base_layer", "original_module")
_AROUND_WHOLE_MODELS: Final = {
    "_orig_mod": ("OptimizedModule",),
    "module": ("DataParallel", "DistributedDataParallel"),
    "base_model": ("PeftModel",),
    "model": ("BaseTuner",),
}
"""Where a wrapper keeps the model, and the classes that keep one there."""
_WRAPPED_NAMES: Final = frozenset(_WRAPPED)
_AROUND: Final = frozenset((*_WRAPPED, *_AROUND_WHOLE_MODELS))


def adapted_modules(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, wrappers of adapters before what they wrap and under the same name.

    What belongs to an adapter is left out. A module that occurs twice is given once.

    Args:
        model: A module, compiled or not, PEFT's own wrapper of one, or a pipeline, whose components' names come
            before the names of their modules.
    """
    yield from _modules(model, "adapted modules", _places)


def adapter_layers(model: object) -> Iterator[tuple[str, nn.Module]]:
    """Every layer of adapters by the name of what it wraps, the outer ones of several first; as `adapted_modules` names them."""
    yield from _modules(model, "adapter layers", _places_of_layers)


_Places = list[tuple[str, int]]
"""Names, and the indices of their modules in a `ModuleTree`."""


def _modules(
    model: object, what: str, find: Callable[[ModuleTree], _Places]
) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for start, root in roots_of(model):
        tree = tree_of(root)
        for name, index in tree.derive(what, partial(find, tree)):
            module = tree.modules[index]
            if id(module) not in seen:
                seen.add(id(module))
                yield f"{start}.{name}" if start and name else start or name, module


def _places(tree: ModuleTree) -> _Places:
    shape = tree.shape
    if shape.has_repeats or not _AROUND_WHOLE_MODELS.keys().isdisjoint(shape.own_names):
        indices = tree.indices()
        walked = ((name, indices.get(id(module))) for name, module in _walk(tree.modules[0]))
        return [(name, index) for name, index in walked if index is not None]
    inner_of = _wrapping(tree)
    names: list[str | None] = [""]
    for parent, own in zip(shape.parents[1:], shape.own_names[1:], strict=True):
        start, wrapped_name = names[parent], inner_of.get(parent)
        if start is None or (wrapped_name is not None and own != wrapped_name):
            names.append(None)  # part of an adapter
        elif wrapped_name is not None:
            names.append(start)
        else:
            names.append(f"{start}.{own}" if start else own)
    return [(name, index) for index, name in enumerate(names) if name is not None]


def _places_of_layers(tree: ModuleTree) -> _Places:
    places: _Places = tree.derive("adapted modules", partial(_places, tree))
    wrapping = _wrapping(tree)
    return [(name, index) for name, index in places if index in wrapping]


def _innermost(tree: ModuleTree) -> _Places:
    """Modules that are no layer around another."""
    places: _Places = tree.derive("adapted modules", partial(_places, tree))
    wrapping = _wrapping(tree)
    return [(name, index) for name, index in places if index not in wrapping]


def _wrapping(tree: ModuleTree) -> dict[int, str]:
    """Where layers of adapters are, and the name of what each wraps."""
    return tree.derive("layers around others", lambda: dict(_found_wrapping(tree)))


def _found_wrapping(tree: ModuleTree) -> Iterator[tuple[int, str]]:
    shape = tree.shape
    around = [place for place, own in zip(shape.parents, shape.own_names, strict=True) if own in _WRAPPED]
    for place in sorted({*around}):
        inner = wrapped(tree.modules[place])
        if inner is not None:
            held = registered(tree.modules[place], "_modules")
            yield place, next(own for own in _WRAPPED if held.get(own) is inner)


def roots_of(model: object) -> Iterator[tuple[str, nn.Module]]:
    """A model under "", or a pipeline's models under the names of its components."""
    if isinstance(model, nn.Module):
        yield "", model
        return
    components = attribute(model, "components")
    if isinstance(components, Mapping):
        for name, part in components.items():
            if isinstance(part, nn.Module):
                yield str(name), part


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    waiting = [("", module)]
    while waiting:
        name, module = waiting.pop()
        inner, held = None, registered(module, "_modules")
        if not _AROUND.isdisjoint(held):
            module = _unwrapped(module)
            inner, held = wrapped(module), registered(module, "_modules")
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        if inner is not None:
            waiting.append((name, inner))
        elif held:
            start = f"{name}." if name else ""
            waiting += [
                (start + own, child)
                for own, child in reversed([*held.items()])
                if isinstance(child, nn.Module)
            ]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Without what torch.compile, data parallelism or PEFT's model classes put around a whole module."""
    inner = _inside(module)
    return module if inner is None else _unwrapped(inner)


def _inside(module: nn.Module) -> nn.Module | None:
    held = registered(module, "_modules")
    for name, kinds in _AROUND_WHOLE_MODELS.items() if held else ():
        inner = held.get(name)
        if isinstance(inner, nn.Module) and any(base.__name__ in kinds for base in type(module).__mro__):
            return inner
    return None


def wrapped(module: nn.Module) -> nn.Module | None:
    """The layer that an adapter's layer wraps, or None if it wraps none."""
    held = registered(module, "_modules")
    if not held or _WRAPPED_NAMES.isdisjoint(held):  # as in most modules
        return None
    for name in _WRAPPED:
        inner = held.get(name)
        if isinstance(inner, nn.Module) and isinstance(attribute(module, "adapter_layer_names"), tuple):
            return inner
    return None


def base_weights(model: object) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers without those of adapters, by the names that a state dict has before any is injected.

    A weight that an adapter is merged into is given as it is, with the adapter in it. Each is the host's own
    tensor. Buffers that a state dict leaves out are left out.
    """
    return ((name, tensor) for name, _, tensor in base_tensors(model))


def base_tensors(model: object) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """`base_weights` with the module that has each."""
    first: dict[int, str] = {}
    for start, root in roots_of(model):
        tree = tree_of(root)
        found: _Places = tree.derive("innermost modules", partial(_innermost, tree))
        indices: list[int] = tree.derive("places of innermost modules", lambda: [index for _, index in found])  # noqa: B023 - called at once
        for at, own, tensor in tensors_at(tree, indices):
            name, index = found[at]
            module = tree.modules[index]
            if first.setdefault(id(module), start) == start:
                key = f"{name}.{own}" if name else own
                yield f"{start}.{key}" if start else key, module, tensor


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module itself, and those of its buffers that a state dict has."""
    yield from own_parameters(module)
    yield from own_buffers(module, transient=False)


def bare(module: nn.Module) -> nn.Module:
    """The module without compilation and layers of adapters around it."""
    held = registered(module, "_modules")
    if not held or _AROUND.isdisjoint(held):
        return module
    module = _unwrapped(module)
    inner = wrapped(module)
    return module if inner is None else bare(inner)
