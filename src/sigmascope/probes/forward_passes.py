"""What stands in place of a module's forward pass, and whether it still runs the module's layers (`detour_of`).

Hosts and scripts put functions there: Accelerate's and diffusers' hooks, caches, or a graph that was traced or exported
once. Most go on to the module. A graph does not: it computes with what it was made with, and knows of no layer or adapter
that came later. So the function is followed through what it holds (arguments bound to it, variables that it closes over,
globals that it names), without calling anything.
"""

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope.probes.models import components_of
from sigmascope.probes.module_tree import tree_of
from sigmascope.probes.reading import attempt, attribute

_MOST_FOLLOWED: Final = 500
"""Objects: a wrapper holds what it wraps a few steps away."""
_GRAPH_CLASSES: Final = frozenset({"GraphModule", "ExportedProgram", "InferenceSession", "AOTCompiledModel"})
"""Of torch.fx and torch.export, of ONNX Runtime and of compilation ahead of time."""
_COMPILED_ANEW: Final = "_torchdynamo_orig_callable"
"""What torch.compile made it of: it is compiled anew once a layer changed."""


def detour_of(module: nn.Module) -> str | None:
    """What a call of a module runs in place of its layers, in words, or None: it runs them.

    Never raises, calls nothing. A function that leads neither to the module nor to a graph is a detour too.
    """
    forward = vars(module).get("forward")
    if forward is None:
        return None
    found = attempt(lambda: _followed(forward, module))
    return found.reason if found.value is None else found.value or None


def weight_readers(model: nn.Module) -> dict[str, str]:
    """By attention, its processor where a script's own reads weights itself, in words: an adapter beside them does not run then."""
    tree = tree_of(model)
    held = ((tree.names[place], type(processor)) for place, processor in tree.having("processor"))
    return {
        name: f"the processor {kind.__qualname__} of {name} reads weights itself, which leaves adapters beside them out"
        for name, kind in held
        if _reads_weights(kind)
    }


def _reads_weights(kind: type) -> bool:
    code = attribute(attribute(kind, "__call__"), "__code__")
    return not is_of_host(kind) and isinstance(code, CodeType) and _reads_in(code)


@functools.lru_cache(maxsize=256)
def _reads_in(code: CodeType) -> bool:
    """Whether it uses some `.weight`, and not its dtype, device or shape alone."""
    steps = [*dis.get_instructions(code)]
    uses = (after for step, after in pairwise(steps) if (step.opname, step.argval) == ("LOAD_ATTR", "weight"))
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(after.argval not in ("dtype", "device", "shape") for after in uses) or any(
        map(_reads_in, inner)
    )


def graph_beside(model: nn.Module) -> str | None:
    """The class of a graph inside of a model that has weights of its other layers, in words, or None.

    So is a wrapper that keeps a model and what it was traced to.
    """
    tree = tree_of(model)
    graphs = tree.derive("graphs", lambda: tree.of_class(_makes_graphs))
    if not graphs or graphs[0] == 0:
        return None
    starts = [f"{tree.names[index]}." for index in graphs]
    outside = {
        tensor.data_ptr()
        for name, own in zip(tree.names, tree.own, strict=True)
        if not f"{name}.".startswith((*starts,))
        for tensor in (own.get("_parameters") or {}).values()
        if isinstance(tensor, Tensor) and not tensor.is_meta
    }
    for index in graphs:
        graph = tree.modules[index]
        inside = attempt(lambda graph=graph: {tensor.data_ptr() for tensor in graph.parameters()})  # type: ignore[misc]
        if (inside.value or set()) & outside - {0}:
            return f"{_called(graph)} beside its layers has the same weights"
    return None


def is_of_host(function: object) -> bool:
    """Whether a class or function is one of the libraries that pipelines are made of, and not of a script or of a LoRA's own."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(attribute(function, "__module__")).partition(".")[0] in _HOSTS


def _is_of_model(kind: type) -> bool:
    """Whether a class is a library's, but for PyTorch's, of which a script's own layers are made too."""
    return is_of_host(kind) and not kind.__module__.startswith("torch.")


_HOSTS: Final = frozenset(
    {"accelerate", "comfy", "comfy_extras", "diffusers", "peft", "sigmascope", "torch", "transformers"}
)
_Marks = tuple[tuple[str, str], ...]


def settings_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, _Marks]:
    """What modules and attention processors of nobody's library keep beside parameters: numbers, and marks of tensors.

    A LoRA of a script's own has its strength there. A mark changes where another tensor is put there or it is written to.
    Models that are made of a library's classes are left out: it keeps its own numbers on them.
    """
    found: dict[str, _Marks] = {}
    known: dict[type, bool] = {}
    for name, module in modules:
        processor = vars(module).get("processor")
        for own_name, thing in ((name, module), (f"{name}.processor", processor)):
            kind = type(thing)
            if kind not in known:
                bases = kind.__mro__ if thing is module else (kind,)
                known[kind] = thing is None or is_of_host(kind) or any(map(_is_of_model, bases))
            if not known[kind]:
                found[own_name] = (("class", f"{kind.__module__}.{kind.__qualname__}"), *_marks(thing))
    return found


def _marks(thing: object) -> Iterator[tuple[str, str]]:
    for name, value in (attempt(lambda: vars(thing)).value or {}).items():
        if isinstance(value, bool | int | float) and not name.startswith("_") and name != "training":
            yield name, str(value)
        elif isinstance(value, Tensor):
            yield name, f"{id(value)} {attempt(lambda tensor=value: tensor._version).value}"  # type: ignore[misc]


def forwards_of_classes(modules: Iterable[tuple[str, nn.Module]]) -> dict[type, object]:
    """The forward pass of each class: a script can exchange that of all layers at once."""
    return {kind: attribute(kind, "forward") for kind in {type(module) for _, module in modules}}


def _followed(forward: object, module: nn.Module) -> str:
    """What a function leads to instead; "" if that is the module."""
    own = vars(type(module)).get("forward") or attribute(type(module), "forward")
    waiting: deque[Any] = deque([forward])
    kept: list[Any] = []
    seen: set[int] = set()
    leads = False
    while waiting and len(seen) < _MOST_FOLLOWED:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)  # so that no other gets its id
        if _is_graph(thing):
            return f"{_called(thing)}, which computes with what it was made with"
        if thing is module or thing is own:
            leads = True
        elif isinstance(thing, nn.Module):
            tree = tree_of(thing)
            graph = next((part for part in tree.modules if _is_graph(part)), None)
            if graph is not None:
                return f"{_called(graph)}, which computes with what it was made with"
            leads = leads or any(part is module for part in tree.modules)
        elif components := components_of(thing):
            leads = leads or any(part is module for part in components.values())
        elif isinstance(thing, MethodType) and thing.__func__ is own:
            waiting.append(thing.__self__)  # which may be another model of the class
        else:
            waiting.extend(_held_by(thing))
    return "" if leads else f"{_named(forward)}, which does not lead to its layers"


def _held_by(thing: Any) -> Iterator[object]:
    """What a function, or what is called like one, holds."""
    if isinstance(thing, MethodType | BuiltinMethodType):
        yield attribute(thing, "__self__")
        yield attribute(thing, "__func__")
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, FunctionType):
        made_of = vars(thing).get(_COMPILED_ANEW)
        if made_of is not None:
            yield made_of
            return
        yield from (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        yield vars(thing).get("__wrapped__")
        yield from (attribute(cell, "cell_contents") for cell in thing.__closure__ or ())
        names = {*_names_in(thing.__code__)}
        yield from (held for name in names if not isinstance(held := thing.__globals__.get(name), ModuleType))
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, Mapping):
        yield from thing.values()
    elif callable(thing) and not isinstance(thing, type | Tensor) and not inspect.isbuiltin(thing):
        yield from attempt(lambda: [*vars(thing).values()]).value or ()
        yield attribute(type(thing), "__call__")


def _names_in(code: CodeType) -> Iterator[str]:
    """The globals that are read in it; `co_names` has attributes too."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_graph(thing: object) -> bool:
    if isinstance(thing, torch.jit.ScriptModule | torch.jit.ScriptFunction | torch._C.ScriptMethod):
        return True
    return _makes_graphs(type(thing))


def _makes_graphs(kind: type) -> bool:
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    return any(base.__name__ in _GRAPH_CLASSES for base in kind.__mro__)


def _called(graph: object) -> str:
    """With the right article, as far as these classes need one."""
    name = type(graph).__name__
    return f"an {name}" if name[:1] in "AEIO" else f"a {name}"


def _named(forward: object) -> str:
    function = getattr(forward, "func", forward)
    return str(attribute(function, "__qualname__") or type(function).__name__)
