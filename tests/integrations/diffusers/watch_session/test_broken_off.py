"""Generations that end early: what was seen stays, marked, and nothing is left."""

import threading
from typing import Any

import pytest
import torch
from tests.families import generate
from tests.integrations.diffusers.marks import left_behind, marks, staying
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers.denoising import Denoising
from sigmascope.integrations.diffusers.watch_session import Session
from sigmascope.monitor import current_recorder
from sigmascope.monitor.hooks import MethodHook


def raising(error: BaseException, at_step: int) -> Any:
    def callback(_pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == at_step:
            raise error
        return tensors

    return callback


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_in_the_middle_passes_and_the_partial_record_stays(
    pipeline: Any, error: BaseException
) -> None:
    before = marks(pipeline)
    with sigmascope.watch(pipeline) as run, pytest.raises(type(error)) as caught:
        generate(pipeline, "sd15", num_inference_steps=4, callback_on_step_end=raising(error, 1))
    assert caught.value is error
    generation = run.stage("generation")
    assert not generation.success
    assert len(run.stage("denoising").steps) == 2
    assert [stage.name for stage in generation.children] == ["text_encoding", "model_sampling", "denoising"]
    assert marks(pipeline) == before
    assert left_behind() == []


def test_ctrl_c_while_the_watch_is_put_on_leaves_nothing(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before, told = marks(pipeline), list[object]()
    monkeypatch.setattr(Session, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt), sigmascope.watch(pipeline, on_run=told.append):
        told.append("entered")
    assert marks(pipeline) == before
    assert left_behind() == []
    assert current_recorder() is None
    assert told == []


def with_a_stage_never_left(pipeline: Any) -> Any:
    watch = sigmascope.watch(pipeline, sample_hz=10.0)
    watch.__enter__()
    sigmascope.stage("never left").__enter__()
    assert samplers() == ["sigmascope-sampler"]
    return watch


def samplers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sigmascope-sampler"]


def test_a_stage_that_is_never_left_keeps_no_thread_behind_its_watch(pipeline: Any) -> None:
    watch = with_a_stage_never_left(pipeline)
    watch.__exit__(None, None, None)
    assert samplers() == []
    assert left_behind() == []


def test_ctrl_c_while_the_stages_of_a_watch_are_closed_keeps_no_thread(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    watch = with_a_stage_never_left(pipeline)
    monkeypatch.setattr(Session, "_close_left", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch.__exit__(None, None, None)
    assert samplers() == []
    assert left_behind() == []


def test_ctrl_c_while_the_watch_is_taken_off_is_raised_when_it_is_off(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_off, interrupts = MethodHook.take_off, [KeyboardInterrupt()]

    def interrupted(hook: MethodHook) -> None:
        take_off(hook)
        if interrupts:
            raise interrupts.pop()

    before = marks(pipeline)
    watch = sigmascope.watch(pipeline)
    watch.__enter__()
    monkeypatch.setattr(MethodHook, "take_off", interrupted)
    with pytest.raises(KeyboardInterrupt):
        watch.__exit__(None, None, None)
    assert marks(pipeline) == before
    assert left_behind() == []
    assert current_recorder() is None


def test_ctrl_c_while_a_stage_is_closed_leaves_none_around_it_open(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    threads = {*threading.enumerate()}
    monkeypatch.setattr(Denoising, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt), sigmascope.watch(pipeline):
        generate(pipeline, "sd15", num_inference_steps=1)
    assert left_behind() == []
    assert current_recorder() is None
    assert staying(threads) == set()


def test_a_watch_whose_own_end_fails_leaves_no_recorder(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("planted")

    threads = {*threading.enumerate()}
    with sigmascope.watch(pipeline):
        monkeypatch.setattr(Session, "_close_left", fail)
    assert current_recorder() is None
    assert left_behind() == []
    assert staying(threads) == set()


def test_a_run_that_an_exception_left_is_not_complete(pipeline: Any) -> None:
    watch = sigmascope.watch(pipeline)
    with pytest.raises(KeyboardInterrupt), watch as run:
        generate(pipeline, "sd15", callback_on_step_end=raising(KeyboardInterrupt(), 0))
    assert not run.complete


def test_a_denoiser_that_raises_has_begun_a_step(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_args: Any, **_kwargs: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(pipeline.unet, "forward", forward)
    with sigmascope.watch(pipeline) as run, pytest.raises(MemoryError):
        generate(pipeline, "sd15")
    denoising = run.stage("denoising")
    assert denoising.error == "MemoryError: no room"
    assert len(denoising.steps) == 1


def test_the_next_generation_is_watched_as_if_nothing_had_been(pipeline: Any, unwatched: Tensor) -> None:
    with sigmascope.watch(pipeline) as run:
        with pytest.raises(RuntimeError):
            generate(pipeline, "sd15", callback_on_step_end=raising(RuntimeError(), 0))
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    assert [stage.success for stage in run.stages] == [False, True]


def test_an_interrupted_pipeline_has_its_steps_and_its_decoding(pipeline: Any) -> None:
    def stop(pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipeline._interrupt = step == 1
        return tensors

    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=5, callback_on_step_end=stop)
    generation = run.stage("generation")
    assert [stage.name for stage in generation.children][-2:] == ["denoising", "latent_decoding"]
    assert len(run.stage("denoising").steps) == 2
