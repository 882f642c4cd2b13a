"""Denoisers and encoders that a small pipeline of our own may hold, and several pipelines that share their class."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integrations.diffusers.marks import left_behind, marks
from tests.monitor.hooks.conftest import OnTwoThreads
from torch import Tensor, nn

import sigmascope

X = torch.arange(8.0).reshape(4, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Pipeline:
    """As diffusers', as far as a watch looks at one."""

    def __init__(self, unet: Any) -> None:
        self.unet = unet
        self.text_encoder = Net()
        self.components = {"unet": unet, "text_encoder": self.text_encoder}

    def register_modules(self) -> None:
        """Is what pipelines have."""

    @torch.no_grad()
    def __call__(self) -> Tensor:
        out: Tensor = self.unet(self.text_encoder(X))
        return out


def steps_of(run: Any) -> list[int]:
    """Of each denoising."""
    return [len(stage.steps) for stage in run.walk() if stage.name == "denoising"]


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "kind",
    [
        nn.Module.eval,
        in_place,
        nn.DataParallel,
        OnTwoThreads,
        lambda net: torch.compile(net, backend="eager"),
    ],
)
def test_each_call_has_a_denoising_and_nothing_is_left(kind: Callable[[nn.Module], Any]) -> None:
    pipeline = Pipeline(kind(Net()))
    expected, before = pipeline(), marks(pipeline)
    with sigmascope.watch(pipeline) as run:
        for _ in range(2):
            assert torch.equal(pipeline(), expected)
    assert steps_of(run) == [1, 1]
    assert dict(run.unavailable) == {}
    assert marks(pipeline) == before
    assert left_behind() == []


def test_the_module_in_data_parallel_has_one_step_a_call() -> None:
    wrapper = OnTwoThreads(Net())
    with sigmascope.watch(wrapper.module) as run:
        for _ in range(3):
            wrapper(X)
    assert steps_of(run) == [3]


def test_a_denoiser_that_cannot_be_heard_says_so() -> None:
    pipeline = Pipeline(functools.partial(Net()))
    expected = pipeline()
    with sigmascope.watch(pipeline) as run:
        assert torch.equal(pipeline(), expected)
    assert steps_of(run) == []
    assert dict(run.unavailable) == {
        "watch.denoiser of partial": "TypeError: __call__ is a wrapper_descriptor, not a function"
    }


def test_two_watches_in_threads_over_one_class_each_see_their_own() -> None:
    pipelines = [Pipeline(Net()), Pipeline(Net())]
    expected = [pipeline() for pipeline in pipelines]
    both_open = threading.Barrier(2)
    seen: dict[int, tuple[bool, list[int]]] = {}

    def work(number: int) -> None:
        with sigmascope.watch(pipelines[number]) as run:
            both_open.wait(30)
            same = [torch.equal(pipelines[number](), expected[number]) for _ in range(5)]
            both_open.wait(30)
        seen[number] = all(same), steps_of(run)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == dict.fromkeys(range(2), (True, [1] * 5))
    assert left_behind() == []


def test_a_class_that_the_host_changes_meanwhile_keeps_the_hosts_change() -> None:
    net = Net()
    with sigmascope.watch(net) as run:
        ours = vars(Net)["__call__"]
        theirs = lambda self, *args: ours(self, *args) + 1  # noqa: E731
        Net.__call__ = theirs  # type: ignore[method-assign]
        changed = net(X)
    assert vars(Net)["__call__"] is theirs
    assert torch.equal(net(X), changed)
    assert steps_of(run) == [1]
    del Net.__call__
    assert left_behind() == []
