from typing import TYPE_CHECKING

import pytest

from sigmascope.monitor import Recorder

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeHost


@pytest.fixture
def timed(accelerator: "FakeAccelerator", host: "FakeHost") -> Recorder:
    return Recorder(sample_hz=None, accelerator=accelerator)


def launch(accelerator: "FakeAccelerator", recorder: Recorder, *seconds: float) -> None:
    for length in seconds:
        with recorder.step():
            accelerator.queued_seconds += length


def test_steps_have_the_time_between_the_events_at_their_edges(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5, 0.25)
        accelerator.done_seconds = accelerator.queued_seconds
    steps = timed.run().stages[0].steps
    assert steps.gpu_seconds == (0.5, 0.25)
    assert "gpu_seconds" not in steps.unavailable


def test_steps_that_finish_after_their_stage_are_resolved_when_the_run_is_read(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5, 0.25)
    accelerator.done_seconds = accelerator.queued_seconds
    assert timed.run().stages[0].steps.gpu_seconds == (0.5, 0.25)


def test_a_step_that_is_not_finished_is_none_with_the_reason_until_it_is(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5, 0.25)
    accelerator.done_seconds = 0.5
    early = timed.run().stages[0].steps
    assert early.gpu_seconds == (0.5, None)
    assert early.unavailable["gpu_seconds"].startswith("1 steps: the accelerator had not")
    accelerator.done_seconds = 0.75
    assert timed.run().stages[0].steps.gpu_seconds == (0.5, 0.25)


def test_events_are_used_again(timed: Recorder, accelerator: "FakeAccelerator") -> None:
    with timed.stage("denoising"):
        for _ in range(200):
            launch(accelerator, timed, 0.001)
            accelerator.done_seconds = accelerator.queued_seconds
    assert accelerator.events_made <= 2 * 64
    assert timed.run().stages[0].steps.gpu_seconds == pytest.approx((0.001,) * 200)


def test_a_device_that_cannot_be_timed_yet_leaves_single_gaps(
    timed: Recorder, accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    with timed.stage("denoising"):
        with monkeypatch.context() as before_first_use:
            before_first_use.setattr(accelerator, "current_device", lambda: None)
            launch(accelerator, timed, 0.5)
        launch(accelerator, timed, 0.25)
        accelerator.done_seconds = accelerator.queued_seconds
    assert timed.run().stages[0].steps.gpu_seconds == (None, 0.25)
