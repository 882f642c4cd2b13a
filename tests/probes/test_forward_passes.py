"""Whether what stands in place of a forward pass runs the module's layers: the output after a layer's weight changed."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import Tensor, nn

from sigmascope.probes.forward_passes import detour_of, graph_beside

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
TRACE: Any = torch.jit.trace
SCRIPT: Any = torch.jit.script
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)


def _nothing(module: nn.Module) -> None:
    pass


def _closure(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda values: own(values)


def _partial(module: nn.Module) -> None:
    module.forward = functools.partial(_ran_by_hand, module)


def _ran_by_hand(module: nn.Module, values: Tensor) -> Tensor:
    for layer in module.children():
        values = layer(values)
    return values


def _method(module: nn.Module) -> None:
    module.forward = types.MethodType(_ran_by_hand, module)


def _compiled(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def _accelerate(module: nn.Module) -> None:
    add_hook_to_module(module, ModelHook())


def _diffusers(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(DiffusersHook(), "mine")


class Wrapper(nn.Module):
    """What passes on to another module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        passed: Tensor = self.inner(values)
        return passed


class Called:
    """The same without being a module."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, values: Tensor) -> Tensor:
        passed: Tensor = self.inner(values)
        return passed


def _wrapper(module: nn.Module) -> None:
    own = module.forward
    module.forward = Called(Called(own))


RUNS = [_nothing, _closure, _partial, _method, _compiled, _accelerate, _diffusers, _wrapper]


@pytest.mark.parametrize("put", RUNS)
def test_what_leads_to_the_layers_is_no_detour(put: Callable[[nn.Module], None]) -> None:
    module = made()
    put(module)
    before = module(X)
    module[0] = nn.Linear(4, 4)
    assert not torch.equal(module(X), before)
    assert detour_of(module) is None


def _traced(module: nn.Module) -> None:
    module.forward = TRACE(module, X).forward


def _traced_in_a_closure(module: nn.Module) -> None:
    traced = TRACE(module, X)
    module.forward = lambda values: traced(values)


def _traced_in_a_wrapper(module: nn.Module) -> None:
    module.forward = Wrapper(TRACE(module, X)).forward


def _traced_function(module: nn.Module) -> None:
    module.forward = TRACE(lambda values: _ran_by_hand(module, values), X)


def _scripted(module: nn.Module) -> None:
    module.forward = SCRIPT(module).forward


def _exported(module: nn.Module) -> None:
    program = torch.export.export(module, (X,))
    module.forward = lambda values: program.module()(values)


def _replayed(module: nn.Module) -> None:
    result = module(X)
    module.forward = lambda _values: result


GRAPHS = [_traced, _traced_in_a_closure, _traced_in_a_wrapper, _traced_function, _scripted, _exported]


@pytest.mark.parametrize("put", [*GRAPHS, _replayed])
def test_a_graph_knows_of_no_layer_that_came_later(put: Callable[[nn.Module], None]) -> None:
    module = made()
    put(module)
    before = module(X)
    module[0] = nn.Linear(4, 4)
    assert torch.equal(module(X), before)
    why = detour_of(module)
    assert why is not None
    assert ("computes with what it was made with" in why) is (put is not _replayed)


def test_a_graph_is_found_among_the_globals_that_a_function_names() -> None:
    module: Any = made()
    space: dict[str, Any] = {"traced": TRACE(module, X), "module": module}
    exec("def forward(values):\n    return traced(values)", space)
    module.forward = space["forward"]
    assert "computes with what it was made with" in str(detour_of(module))
    exec("def other(values):\n    return type(module).forward(module, values)", space)
    module.forward = space["other"]
    assert detour_of(module) is None


def test_the_forward_pass_of_another_model_of_the_class_leads_to_that_ones_layers() -> None:
    module: Any = made()
    other = made()
    module.forward = other.forward
    module[0] = nn.Linear(4, 4)
    assert torch.equal(module(X), other(X))
    assert "does not lead to its layers" in str(detour_of(module))
    module.forward = type(module).forward.__get__(module)
    assert detour_of(module) is None


class Both(nn.Module):
    """A model with what was made of it."""

    def __init__(self, inner: nn.Module, traced: Any) -> None:
        super().__init__()
        self.inner, self.traced = inner, traced


def test_a_graph_beside_the_layers_whose_weights_it_has() -> None:
    module, other = made(), made()
    assert "same weights" in str(graph_beside(Both(module, TRACE(module, X))))
    assert graph_beside(Both(module, TRACE(other, X))) is None
    assert graph_beside(module) is None


def test_what_cannot_be_followed_is_told_and_not_raised() -> None:
    module = made()

    class Hostile:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

        def __call__(self, values: Tensor) -> Tensor:
            return values

    vars(module)["forward"] = Hostile()
    assert "does not lead to its layers" in str(detour_of(module))
