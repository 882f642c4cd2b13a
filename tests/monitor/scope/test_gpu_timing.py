from typing import TYPE_CHECKING

import pytest

from sigmascope.monitor import Recorder
from sigmascope.monitor.scope import BACKWARDS, TWO_STREAMS, UNREADABLE
from sigmascope.probes import AcceleratorEvent, NullAccelerator

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
    assert early.unavailable["gpu_seconds"].startswith("1 step: the accelerator had not")
    accelerator.done_seconds = 0.75
    assert timed.run().stages[0].steps.gpu_seconds == (0.5, 0.25)


def test_events_are_used_again(timed: Recorder, accelerator: "FakeAccelerator") -> None:
    with timed.stage("denoising"):
        for _ in range(200):
            launch(accelerator, timed, 0.001)
            accelerator.done_seconds = accelerator.queued_seconds
    assert accelerator.events_made <= 2 * 64 + 2  # the last are those of the stage itself
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
    steps = timed.run().stages[0].steps
    assert steps.gpu_seconds == (None, 0.25)
    assert steps.unavailable["gpu_seconds"].startswith("1 step: events are missing")


@pytest.mark.parametrize(("also_on_the_current_one", "marked"), [(False, "cuda:1"), (True, "cuda:0")])
def test_work_that_is_on_another_device_than_the_current_one_is_timed_there(
    make_accelerator: "type[FakeAccelerator]",
    monkeypatch: pytest.MonkeyPatch,
    also_on_the_current_one: bool,
    marked: str,
) -> None:
    accelerator = make_accelerator(2)
    accelerator.allocate(7, "cuda:1")
    if also_on_the_current_one:
        accelerator.allocate(5, "cuda:0")
    devices, new_event = set(), accelerator.new_event

    def noted(device: str) -> AcceleratorEvent | None:
        devices.add(device)
        return new_event(device)

    monkeypatch.setattr(accelerator, "new_event", noted)
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        launch(accelerator, recorder, 0.5)
        accelerator.done_seconds = accelerator.queued_seconds
    steps = recorder.run().stages[0].steps
    assert devices == {marked}
    assert steps.gpu_seconds == (0.5,)
    assert steps.allocated_bytes == (accelerator.allocated[marked],)


def test_a_stage_has_the_time_between_its_own_edges_on_the_accelerator(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with timed.stage("generation"):
        accelerator.queued_seconds += 0.5
        with timed.stage("latent_decoding"):
            accelerator.queued_seconds += 2.0
    early = timed.run().stages[0]
    assert "device_seconds" not in early.facts
    assert early.unavailable["device_seconds"].startswith("the accelerator had not been seen")
    accelerator.done_seconds = accelerator.queued_seconds
    found = {stage.name: stage.facts["device_seconds"] for stage in timed.run().walk()}
    assert found == {"generation": 2.5, "latent_decoding": 2.0}


def test_a_stage_that_began_before_the_accelerator_was_in_use_says_so(
    timed: Recorder, accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "current_device", lambda: None)
    with timed.stage("model_loading"):
        monkeypatch.undo()
    assert timed.run().stages[0].unavailable["device_seconds"].startswith("the accelerator was not in use")


def test_stages_of_a_long_run_use_their_events_again(timed: Recorder, accelerator: "FakeAccelerator") -> None:
    for _ in range(200):
        with timed.stage("generation"):
            accelerator.queued_seconds += 0.25
        accelerator.done_seconds = accelerator.queued_seconds
    assert accelerator.events_made <= 4
    assert [stage.facts["device_seconds"] for stage in timed.run().stages] == [0.25] * 200


def test_an_accelerator_without_events_says_why_and_its_memory_is_read(
    accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "untimed", "its events wait", raising=False)
    monkeypatch.setattr(accelerator, "new_event", lambda _device: None)
    accelerator.allocate(7)
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        launch(accelerator, recorder, 0.5)
    stage = recorder.run().stages[0]
    assert stage.unavailable["device_seconds"] == "its events wait"
    assert stage.steps.unavailable["gpu_seconds"] == "its events wait"
    assert stage.steps.allocated_bytes == (7,)


def test_without_an_accelerator_a_stage_has_no_time_of_it() -> None:
    recorder = Recorder(sample_hz=None, accelerator=NullAccelerator("none"))
    with recorder.stage("denoising"):
        pass
    stage = recorder.run().stages[0]
    assert "device_seconds" not in {**stage.facts, **stage.unavailable}


@pytest.mark.parametrize("ahead", [3.0, 0.0])
def test_edges_on_two_streams_tell_no_time(
    timed: Recorder, accelerator: "FakeAccelerator", ahead: float
) -> None:
    accelerator.queued_seconds = ahead
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5)
        with timed.step():
            accelerator.stream = 7  # which has nothing to do: its mark is passed at once
    accelerator.done_seconds = 10.0
    stage = timed.run().stages[0]
    assert stage.steps.gpu_seconds == (0.5, None)
    assert stage.steps.unavailable["gpu_seconds"] == f"1 step: {TWO_STREAMS}"
    assert "device_seconds" not in stage.facts
    assert stage.unavailable["device_seconds"] == TWO_STREAMS
    assert accelerator.events_made == 5  # those of the second step came back at once


def test_a_clock_that_goes_backwards_tells_no_time(timed: Recorder, accelerator: "FakeAccelerator") -> None:
    accelerator.queued_seconds = 1.0
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5, -0.002)
        accelerator.queued_seconds = 0.9
    accelerator.done_seconds = 10.0
    stage = timed.run().stages[0]
    assert stage.steps.gpu_seconds == (0.5, None)
    assert stage.steps.unavailable["gpu_seconds"] == f"1 step: {BACKWARDS}"
    assert stage.unavailable["device_seconds"] == BACKWARDS


def test_a_time_that_the_accelerator_refuses_is_told_of_as_that(
    timed: Recorder, accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.monitor.conftest import FakeEvent

    monkeypatch.setattr(FakeEvent, "elapsed_seconds", lambda *_: None)
    with timed.stage("denoising"):
        launch(accelerator, timed, 0.5)
    accelerator.done_seconds = 10.0
    assert timed.run().stages[0].unavailable["device_seconds"] == UNREADABLE


def test_an_event_that_a_capture_refuses_is_kept_for_later(
    accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    """To let go of it would destroy it in the driver, in the middle of the host's capture."""
    recorder = Recorder(sample_hz=None, accelerator=accelerator)

    def five_steps() -> None:
        for _ in range(5):
            with recorder.stage("denoising"), recorder.step():
                pass

    five_steps()
    made = accelerator.events_made
    with monkeypatch.context() as capture:
        capture.setattr(type(accelerator.new_event()), "record", lambda _event: False)
        five_steps()
    five_steps()
    assert accelerator.events_made == made + 1
