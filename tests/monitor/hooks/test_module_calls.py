"""Modules of all kinds, heard at their class's call: each gives what it gives unheard, and its class is as before."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.hooks.conftest import Heard, OnTwoThreads, called_in_threads, replica_of
from torch import Tensor, nn

X = torch.arange(8.0).reshape(4, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.linear(x) * scale
        return out


class OwnCall(Net):
    """Its own `__call__` calls the base's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


class Slotted(Net):
    __slots__ = ("extra",)


class StaticCall(nn.Module):
    @staticmethod
    def __call__(x: Tensor) -> Tensor:
        return x + 1


class CallableCall(nn.Module):
    __call__ = functools.partial(torch.add, other=1)


class _Frozen(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise RuntimeError("frozen")


class FrozenNet(Net, metaclass=_Frozen):
    pass


class MyOptimizedModule(torch._dynamo.OptimizedModule):
    pass


def scripted() -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.script(Net())


def optimized() -> Any:
    return MyOptimizedModule(Net(), torch._dynamo.optimize("eager"))  # type: ignore[arg-type]


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (Net, 1),
    "own call": (OwnCall, 1),
    "slots": (Slotted, 1),
    "static call": (StaticCall, 0),
    "callable for a call": (CallableCall, 0),
    "frozen class": (FrozenNet, 0),
    "scripted": (scripted, 1),
    "subclass of a compiled wrapper": (optimized, 1),
}
"""What makes each, and how often a call of it is heard."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_gives_the_same_and_its_class_is_as_before(kind: str, heard: Heard) -> None:
    make, times = KINDS[kind]
    module = make()
    expected, before = module(X), dict(vars(type(module)))
    heard.hear(module)
    assert torch.equal(module(X), expected)
    heard.hooks.detach()
    assert dict(vars(type(module))) == before
    assert heard == [module] * times
    assert bool(heard.guard.reasons) == (times == 0)


def test_a_class_with_a_call_of_its_own_and_its_base_are_heard_once_each(heard: Heard) -> None:
    base, derived = Net(), OwnCall()
    heard.hear(base, derived)
    derived(X)
    base(X)
    assert heard == [derived, base]


def test_what_somebody_puts_on_the_base_meanwhile_is_called(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, real = Net(), nn.Module.__call__
    heard.hear(module)
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: real(self, *args) + 1)
    watched = module(X)
    heard.hooks.detach()
    assert torch.equal(watched, module(X))


def test_what_somebody_puts_on_the_class_meanwhile_stays(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Net()
    expected = module(X) + 1
    heard.hear(module)
    ours = vars(Net)["__call__"]
    theirs = lambda self, *args: ours(self, *args) + 1  # noqa: E731
    monkeypatch.setattr(Net, "__call__", theirs, raising=False)
    heard.hooks.detach()
    assert vars(Net)["__call__"] is theirs
    assert torch.equal(module(X), expected)
    assert heard == []
    del Net.__call__
    monkeypatch.undo()


def test_a_module_can_be_scripted_while_it_is_heard(heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    outer = Outer()
    heard.hear(outer, outer.net)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        assert torch.equal(torch.jit.script(outer)(X), outer(X))


def test_torch_fx_sees_the_same_graph(heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, Net)

    outer = Outer()
    expected = str(Tracer().trace(outer))
    heard.hear(outer.net)
    assert str(Tracer().trace(outer)) == expected
    assert "call_module" in expected


def test_a_module_that_data_parallel_replicates_is_heard_once_a_call(heard: Heard) -> None:
    module = Net()
    wrapper = OnTwoThreads(module)
    expected = wrapper(X, scale=2.0)
    heard.hear(module)
    for _ in range(2):
        assert torch.equal(wrapper(X, scale=2.0), expected)
    assert heard == [module, module]


def test_a_wrapper_that_is_heard_itself_is_not_its_module(heard: Heard) -> None:
    wrapper = OnTwoThreads(Net())
    heard.hear(wrapper.module, wrapper)
    wrapper(X)
    assert heard == [wrapper]


def test_data_parallel_without_devices_calls_the_module_which_is_heard_once(heard: Heard) -> None:
    wrapper = nn.DataParallel(Net())
    heard.hear(wrapper.module)
    wrapper(X)
    assert heard == [wrapper.module]


def test_replicas_that_somebody_calls_by_hand_are_others_and_give_the_same(heard: Heard) -> None:
    module = Net()
    expected = module(X)
    heard.hear(module)
    outputs = called_in_threads([replica_of(module) for _ in range(2)], [(X,)] * 2, [{}] * 2)
    assert torch.equal(outputs[0], expected)
    assert torch.equal(outputs[1], expected)
    assert heard == []
