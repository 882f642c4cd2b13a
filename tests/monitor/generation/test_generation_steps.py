"""Steps that a generation's recorder takes, without `start_step_timing`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from PIL import Image
from tests.families import generate, make_pipeline
from tests.monitor.conftest import FakeAccelerator, FakeClock

import sigmascope
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import TUNED_PATH
from sigmascope.monitor import Recorder
from sigmascope.monitor import recorder as recorder_module
from sigmascope.monitor.live_line import StepProgress
from sigmascope.monitor.performance import PerformanceMonitor

OneStep = Callable[[float], None]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def monitor(clock: FakeClock) -> PerformanceMonitor:
    return PerformanceMonitor(5.0, clock=clock, sample_hz=None)


@pytest.fixture
def one_step(clock: FakeClock) -> OneStep:
    def pass_one(seconds: float) -> None:
        with sigmascope.step():
            clock.pass_seconds(seconds)

    return pass_one


@contextmanager
def denoising_of(monitor: PerformanceMonitor, num_steps: int) -> Iterator[None]:
    with monitor.monitor_generation("library", num_steps=num_steps), sigmascope.stage("denoising"):
        yield


def test_steps_of_a_library_s_own_stage_are_the_generation_s(
    monitor: PerformanceMonitor, clock: FakeClock, one_step: OneStep
) -> None:
    with monitor.monitor_generation(num_steps=2):
        clock.pass_seconds(1.0)
        with sigmascope.stage("denoising"):
            one_step(0.4)
            one_step(0.6)
    metrics = monitor.current_metrics
    assert metrics.generation_time_per_step == pytest.approx(0.5)
    assert metrics.pipeline_setup_time == pytest.approx(1.0)
    assert monitor.get_performance_summary()["step_performance"] == {
        "total_steps": 2,
        "avg_step_time": pytest.approx(0.5),
        "min_step_time": pytest.approx(0.4),
        "max_step_time": pytest.approx(0.6),
    }


def test_they_are_told_and_warned_of_while_they_run(clock: FakeClock, one_step: OneStep) -> None:
    told: list[StepProgress] = []
    warned: list[StepProgress] = []
    monitor = PerformanceMonitor(
        5.0, on_step=told.append, on_warning=warned.append, clock=clock, sample_hz=None
    )
    with denoising_of(monitor, 20):
        for seconds in [0.2, 0.2, 1.0] + [0.2] * 17:
            one_step(seconds)
    assert [one.step for one in told] == list(range(1, 21))
    assert [one.step for one in warned] == [3]


def test_calls_count_alone_so_that_nothing_counts_twice(
    monitor: PerformanceMonitor, one_step: OneStep
) -> None:
    with denoising_of(monitor, 2):
        for _ in range(2):
            monitor.start_step_timing()
            one_step(0.5)
            monitor.end_step_timing()
    assert monitor.get_performance_summary()["step_performance"]["total_steps"] == 2


@pytest.mark.parametrize("other", ["latent_decoding", "text_encoding", "model_loading"])
def test_tiles_and_prompts_are_no_denoising_steps(
    monitor: PerformanceMonitor, one_step: OneStep, other: str
) -> None:
    with monitor.monitor_generation(num_steps=4), sigmascope.stage(other):
        one_step(0.5)
    assert monitor.current_metrics.derived_time_per_step == pytest.approx(0.5 / 4)  # none was timed


def test_of_nested_generations_the_inner_one_has_its_steps(
    monitor: PerformanceMonitor, one_step: OneStep
) -> None:
    with monitor.monitor_generation("outer"):
        one_step(1.0)
        with monitor.monitor_generation("inner"):
            one_step(0.25)
        assert monitor.current_metrics.model_name == "outer"
        one_step(2.0)
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(1.5)


def test_steps_after_its_end_are_nobody_s(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    recorder = Recorder("all", sample_hz=None, clock=clock)
    with recorder:
        with monitor.monitor_generation():
            late = recorder.stage("denoising")
            late.__enter__()
        with recorder.step():
            clock.pass_seconds(1.0)
        late.__exit__(None, None, None)
    assert monitor.current_metrics.generation_time_per_step is None
    assert "step_performance" not in monitor.get_performance_summary()


def test_another_recorder_s_steps_inside_count_too(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    inner = Recorder("of a library", sample_hz=None, clock=clock)
    with monitor.monitor_generation(num_steps=1), inner, inner.stage("denoising"), inner.step():
        clock.pass_seconds(0.5)
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(0.5)


def test_on_an_accelerator_a_step_lasts_as_long_as_the_device_worked(clock: FakeClock) -> None:
    accelerator = FakeAccelerator()
    monitor = PerformanceMonitor(accelerator=accelerator, clock=clock, sample_hz=None)
    with monitor.monitor_generation(num_steps=4):
        for _ in range(4):
            monitor.start_step_timing()
            clock.pass_seconds(0.002)  # what queueing took
            accelerator.queued_seconds += 0.4
            monitor.end_step_timing()
        accelerator.done_seconds = accelerator.queued_seconds
        clock.pass_seconds(1.6)
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(0.4)


def test_a_step_that_the_device_was_not_seen_to_finish_does_not_bring_back_what_queueing_took(
    clock: FakeClock,
) -> None:
    accelerator = FakeAccelerator()
    monitor = PerformanceMonitor(accelerator=accelerator, clock=clock, sample_hz=None)
    with monitor.monitor_generation(num_steps=4):
        for _ in range(4):
            monitor.start_step_timing()
            clock.pass_seconds(0.002)
            accelerator.queued_seconds += 0.4
            monitor.end_step_timing()
        accelerator.done_seconds = 1.3  # the fourth is on its way
        clock.pass_seconds(1.3)
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(0.4)


def test_tiles_of_the_vae_are_none_of_the_steps_that_the_device_timed(clock: FakeClock) -> None:
    accelerator = FakeAccelerator()
    monitor = PerformanceMonitor(accelerator=accelerator, clock=clock, sample_hz=None)
    with monitor.monitor_generation(num_steps=1):
        for name, seconds in (("denoising", 0.4), ("latent_decoding", 3.0)):
            with recorder_module.stage(name), recorder_module.step():
                clock.pass_seconds(0.002)
                accelerator.queued_seconds += seconds
                accelerator.done_seconds = accelerator.queued_seconds
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(0.4)


def test_the_pocket_model_s_steps_are_seen(monitor: PerformanceMonitor) -> None:
    model = load_lbm(TUNED_PATH)
    watching = PerformanceMonitor(60.0, sample_hz=None)
    with torch.no_grad(), watching.monitor_generation("pocket", num_steps=2, model=model):
        translate_image(model, Image.new("RGB", (32, 32)), num_inference_steps=2, seed=0, size=(32, 32))
    metrics = watching.current_metrics
    assert (metrics.generation_time_per_step or 0) > 0
    assert watching.get_performance_summary()["step_performance"]["total_steps"] == 2
    assert metrics.architecture_type == "UNet"


def test_a_watched_pipeline_s_steps_are_seen() -> None:
    pipe: Any = make_pipeline("sd15")
    monitor = PerformanceMonitor(60.0, sample_hz=None)
    with monitor.monitor_generation("sd15", num_steps=2), sigmascope.watch(pipe):
        generate(pipe, "sd15")
    assert monitor.get_performance_summary()["step_performance"]["total_steps"] == 2
