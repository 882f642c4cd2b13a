import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.monitor.conftest import FakeClock
from torch import Tensor, nn

from sigmascope.monitor import Recorder
from sigmascope.monitor.recorder import HookedSteps


class Denoiser(nn.Module):
    """A small one, whose class is its own, so that nothing else shares what is put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, latent: Tensor) -> Tensor:
        out: Tensor = self.net(latent)
        return out


@pytest.fixture
def denoiser() -> nn.Module:
    torch.manual_seed(0)
    return Denoiser()


def state_of(module: nn.Module) -> tuple[dict[str, object], dict[str, int]]:
    """What lies on a module, with what is in its tables of hooks, and on its class."""
    own = {
        name: list(value.items()) if "hooks" in name and isinstance(value, dict) else value
        for name, value in vars(module).items()
    }
    return own, {name: id(value) for name, value in vars(type(module)).items()}


def steps_of(recorder: Recorder) -> int:
    return sum(len(stage.steps) for stage in recorder.run().walk())


def test_each_forward_call_is_a_step_of_the_open_stage(recorder: Recorder, denoiser: nn.Module) -> None:
    with recorder.stage("denoising"), recorder.hook_steps(denoiser):
        for _ in range(3):
            denoiser(torch.zeros(1, 4))
    denoiser(torch.zeros(1, 4))
    assert len(recorder.run().stages[0].steps) == 3


def test_outputs_are_bit_identical(recorder: Recorder, denoiser: nn.Module) -> None:
    latent = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    plain: Tensor = denoiser(latent)
    with recorder.stage("denoising"), recorder.hook_steps(denoiser):
        watched: Tensor = denoiser(latent)
    assert torch.equal(plain, watched)


def test_nothing_is_put_on_the_module_and_nothing_left_on_its_class(
    recorder: Recorder, denoiser: nn.Module
) -> None:
    denoiser.register_forward_pre_hook(lambda module, inputs: None)
    denoiser.register_forward_hook(lambda module, inputs, output: None)
    own, of_class = state_of(denoiser)
    with recorder.hook_steps(denoiser):
        assert state_of(denoiser)[0] == own
        assert "__call__" in vars(Denoiser)
    assert state_of(denoiser) == (own, of_class)


def test_a_step_has_the_hosts_own_hooks_in_it(clock: FakeClock) -> None:
    recorder = Recorder(sample_hz=None, clock=clock)
    module = nn.Identity()
    module.register_forward_pre_hook(lambda module, inputs: clock.pass_seconds(0.2))
    module.register_forward_hook(lambda module, inputs, output: clock.pass_seconds(0.3))
    with recorder.stage("denoising"), recorder.hook_steps(module):
        module(1)
    assert recorder.run().stages[0].steps.seconds == (0.5,)


def test_a_call_that_ctrl_c_ends_is_a_step_that_ends_with_it(clock: FakeClock) -> None:
    recorder = Recorder(sample_hz=None, clock=clock)

    class Interrupted(nn.Module):
        calls = 0

        def forward(self) -> None:
            self.calls += 1
            clock.pass_seconds(0.1)
            if self.calls == 2:
                raise KeyboardInterrupt

    module = Interrupted()
    with recorder.stage("denoising"), recorder.hook_steps(module):
        module()
        with pytest.raises(KeyboardInterrupt):
            module()
        clock.pass_seconds(0.5)
        module()
        module()
    assert recorder.run().stages[0].steps.seconds == (0.1, 0.1, 0.1, 0.1)


@pytest.mark.parametrize("error", [ValueError("bad latent"), KeyboardInterrupt()])
def test_a_call_that_raises_is_a_step_and_leaves_no_hook(recorder: Recorder, error: BaseException) -> None:
    class Failing(nn.Module):
        def forward(self) -> None:
            raise error

    module = Failing()
    with pytest.raises(type(error)) as caught, recorder.stage("denoising"), recorder.hook_steps(module):
        module()
    assert caught.value is error
    assert steps_of(recorder) == 1
    assert "__call__" not in vars(Failing)


def test_a_module_that_calls_itself_gives_a_step_for_each_call(recorder: Recorder) -> None:
    class Countdown(nn.Module):
        def forward(self, n: int) -> None:
            if n > 1:
                self(n - 1)

    module = Countdown()
    with recorder.stage("denoising"), recorder.hook_steps(module):
        module(4)
    assert steps_of(recorder) == 4


def test_of_modules_of_one_class_inside_each_other_only_the_hooked_one_gives_steps(
    recorder: Recorder,
) -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(inner, nn.Sequential(inner))
    with recorder.stage("denoising"), recorder.hook_steps(outer):
        outer(torch.zeros(1, 4))
        inner(torch.zeros(1, 4))
    assert steps_of(recorder) == 1


def test_two_recorders_hear_one_module_and_the_first_to_go_takes_nothing_from_the_other(
    recorder: Recorder, denoiser: nn.Module
) -> None:
    other = Recorder(sample_hz=None)
    with recorder.stage("first"), other.stage("second"):
        with other.hook_steps(denoiser):
            with recorder.hook_steps(denoiser):
                denoiser(torch.zeros(1, 4))
            denoiser(torch.zeros(1, 4))
        denoiser(torch.zeros(1, 4))
    assert (steps_of(recorder), steps_of(other)) == (1, 2)
    assert "__call__" not in vars(Denoiser)


def test_calls_from_several_threads_are_told_apart(recorder: Recorder) -> None:
    both_inside = threading.Barrier(2)

    class Meeting(nn.Module):
        def forward(self) -> None:
            both_inside.wait(30)

    module = Meeting()
    with recorder.hook_steps(module):
        threads = [threading.Thread(target=module) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert steps_of(recorder) == 2


def test_hooking_in_the_middle_of_a_call_counts_only_whole_calls(recorder: Recorder) -> None:
    hooked: list[HookedSteps] = []

    class Late(nn.Module):
        def forward(self) -> None:
            if not hooked:
                hooked.append(recorder.hook_steps(self).__enter__())

    module = Late()
    module()
    module()
    hooked[0].remove()
    assert steps_of(recorder) == 1


def test_a_copy_or_a_pickle_of_a_hooked_module_is_not_watched(
    recorder: Recorder, denoiser: nn.Module
) -> None:
    latent = torch.zeros(1, 4)
    with recorder.hook_steps(denoiser):
        copies: list[nn.Module] = [copy.deepcopy(denoiser), pickle.loads(pickle.dumps(denoiser))]
        for twin in copies:
            output: Tensor = twin(latent)
            assert output.shape == (1, 4)
    assert steps_of(recorder) == 0


def test_hooks_break_no_graph(recorder: Recorder, denoiser: nn.Module) -> None:
    latent = torch.zeros(1, 4)
    expected: Tensor = denoiser(latent)

    def pipeline(latent: Tensor) -> Tensor:
        output: Tensor = denoiser(latent)
        return output

    with recorder.hook_steps(denoiser):
        compiled = torch.compile(pipeline, backend="eager", fullgraph=True)
        assert torch.equal(compiled(latent), expected)
    assert steps_of(recorder) == 0


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager", fullgraph=True)
    return module


def in_a_wrapper(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager", fullgraph=True)


@pytest.mark.parametrize("compiled_by", [in_place, in_a_wrapper])
def test_a_compiled_module_gives_a_step_for_each_call(
    recorder: Recorder, denoiser: nn.Module, compiled_by: Callable[[nn.Module], Any]
) -> None:
    latent = torch.ones(1, 4)
    expected: Tensor = denoiser(latent)
    compiled = compiled_by(denoiser)
    with recorder.stage("denoising"), recorder.hook_steps(compiled):
        for _ in range(2):
            assert torch.equal(compiled(latent), expected)
    assert steps_of(recorder) == 2
    assert recorder.run().unavailable == {}


def test_hooking_what_is_compiled_compiles_nothing_anew(recorder: Recorder, denoiser: nn.Module) -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    denoiser.compile(backend=backend)
    denoiser(torch.ones(1, 4))
    with recorder.hook_steps(denoiser):
        denoiser(torch.ones(1, 4))
    denoiser(torch.ones(1, 4))
    assert len(graphs) == 1


class _Locked(type):
    def __setattr__(cls, name: str, value: object) -> None:
        raise RuntimeError("no changes here")


class _LockedModule(nn.Module, metaclass=_Locked):
    def forward(self, number: int) -> int:
        return number + 1


def test_a_class_that_refuses_to_be_changed_is_left_alone(recorder: Recorder) -> None:
    before = state_of(module := _LockedModule())
    with recorder.hook_steps(module):
        assert module(1) == 2
    assert state_of(module) == before
    assert recorder.run().unavailable == {"hook_steps of _LockedModule": "RuntimeError: no changes here"}
