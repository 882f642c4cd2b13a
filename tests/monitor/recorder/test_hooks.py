import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope.monitor import Recorder
from sigmascope.monitor.recorder import HookedSteps

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@pytest.fixture
def denoiser() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4))


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    return {name: dict(getattr(module, name)) for name in HOOK_TABLES}


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


def test_no_hook_is_left_and_the_hosts_own_stay_in_their_order(
    recorder: Recorder, denoiser: nn.Module
) -> None:
    for _ in range(2):
        denoiser.register_forward_pre_hook(lambda module, inputs: None)
        denoiser.register_forward_hook(lambda module, inputs, output: None)
    before = hook_tables(denoiser)
    order = [list(table) for table in before.values()]
    with recorder.hook_steps(denoiser):
        assert hook_tables(denoiser) != before
    assert hook_tables(denoiser) == before
    assert [list(table) for table in hook_tables(denoiser).values()] == order


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
    assert not any(hook_tables(module).values())


def test_a_module_that_calls_itself_gives_a_step_for_each_call(recorder: Recorder) -> None:
    class Countdown(nn.Module):
        def forward(self, n: int) -> None:
            if n > 1:
                self(n - 1)

    module = Countdown()
    with recorder.stage("denoising"), recorder.hook_steps(module):
        module(4)
    assert steps_of(recorder) == 4


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


def test_the_compiled_wrapper_can_be_hooked(recorder: Recorder, denoiser: nn.Module) -> None:
    compiled: Any = torch.compile(denoiser, backend="eager")
    with recorder.stage("denoising"), recorder.hook_steps(compiled):
        compiled(torch.zeros(1, 4))
        compiled(torch.zeros(1, 4))
    assert steps_of(recorder) == 2


def test_a_module_compiled_in_place_says_why_it_cannot_be_hooked(
    recorder: Recorder, denoiser: nn.Module
) -> None:
    denoiser.compile(backend="eager")
    with recorder.hook_steps(denoiser):
        denoiser(torch.zeros(1, 4))
    assert "compiled in place" in recorder.run().unavailable["hook_steps"]
    assert not any(hook_tables(denoiser).values())


def test_a_module_that_refuses_hooks_is_left_alone(
    recorder: Recorder, denoiser: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(denoiser, "register_forward_hook", refuse)
    with recorder.hook_steps(denoiser):
        denoiser(torch.zeros(1, 4))
    assert not any(hook_tables(denoiser).values())
    assert recorder.run().unavailable["hook_steps"] == "RuntimeError: no hooks here"
