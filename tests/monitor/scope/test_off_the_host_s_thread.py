"""What threads other than the one that the host works in may ask of a device: nothing."""

import ast
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

import sigmascope
from sigmascope.integrations.process_recording import PeriodicSaver
from sigmascope.monitor import Recorder, scope
from sigmascope.monitor.scope import NOT_FINISHED, THREAD_ENDED
from sigmascope.probes import AllocatorBytes
from sigmascope.records.run import device_seconds
from sigmascope.threads import has_hands_off

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeHost

T = TypeVar("T")


def in_a_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def queue_a_step(recorder: Recorder, accelerator: "FakeAccelerator") -> None:
    with recorder.step():
        accelerator.queued_seconds += 0.5


@pytest.fixture
def timed(accelerator: "FakeAccelerator", host: "FakeHost") -> Recorder:
    return Recorder(sample_hz=None, accelerator=accelerator)


def test_events_are_read_by_the_thread_that_recorded_them(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with timed.stage("denoising"):
        queue_a_step(timed, accelerator)
    accelerator.done_seconds = accelerator.queued_seconds
    accelerator.queries.clear()
    there = in_a_thread(timed.run).stages[0]
    assert accelerator.queries == []
    assert there.steps.gpu_seconds == ()
    assert NOT_FINISHED in there.steps.unavailable["gpu_seconds"]
    assert there.unavailable["device_seconds"] == NOT_FINISHED
    timed.settle()
    assert set(accelerator.queries) == {threading.get_ident()}
    assert in_a_thread(timed.run).stages[0].steps.gpu_seconds == (0.5,)


def test_what_a_thread_left_unread_is_asked_for_by_nobody_and_kept_by_nothing(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    def work() -> None:
        with timed.stage("denoising"):
            queue_a_step(timed, accelerator)
            accelerator.done_seconds = accelerator.queued_seconds
            queue_a_step(timed, accelerator)

    for _ in range(3):
        in_a_thread(work)
    accelerator.done_seconds = accelerator.queued_seconds
    accelerator.queries.clear()
    stages = timed.run().stages
    assert accelerator.queries == []
    for stage in stages:
        assert device_seconds(stage) is None
        assert stage.unavailable["device_seconds"] == THREAD_ENDED
        assert stage.steps.gpu_seconds == (0.5, None)
        assert THREAD_ENDED in stage.steps.unavailable["gpu_seconds"]
    made = accelerator.events_made
    with timed.stage("denoising"):
        queue_a_step(timed, accelerator)
    assert accelerator.events_made == made


def test_steps_of_one_stage_in_two_threads_do_not_wait_for_each_other(
    timed: Recorder, accelerator: "FakeAccelerator"
) -> None:
    with ThreadPoolExecutor(1) as pool:  # its thread lives on, and asks for nothing
        pool.submit(lambda: queue_a_step(timed, accelerator)).result()
        queue_a_step(timed, accelerator)
        accelerator.done_seconds = accelerator.queued_seconds
        assert timed.run().stages[0].steps.gpu_seconds == (None, 0.5)


def test_a_stage_that_another_thread_has_open_is_read_without_the_driver(
    accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch, host: "FakeHost"
) -> None:
    asked: list[bool] = []
    read = accelerator.allocated_and_peak

    def noted(device: str) -> AllocatorBytes:
        asked.append(has_hands_off())
        return read(device)

    monkeypatch.setattr(accelerator, "allocated_and_peak", noted)
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        asked.clear()
        in_a_thread(recorder.run)
        assert set(asked) == {True}
        asked.clear()
        recorder.run()
        assert set(asked) == {False}


def test_no_thread_of_ours_touches_the_device(
    accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch, host: "FakeHost", tmp_path: Path
) -> None:
    touched: dict[str, set[bool]] = {}
    looked = threading.Event()

    def noted(method: Callable[..., object], *given: object) -> object:
        touched.setdefault(threading.current_thread().name, set()).add(has_hands_off())
        if {"sigmascope-sampler", "sigmascope-keeper"} <= touched.keys():
            looked.set()
        return method(*given)

    for name in ("devices", "memory", "allocated_and_peak", "current_device"):
        monkeypatch.setattr(accelerator, name, partial(noted, getattr(accelerator, name)))
    monkeypatch.setattr(scope, "accelerator_of_this_process", lambda: accelerator)
    with sigmascope.watch(stacks=True) as watch, sigmascope.stage("denoising"):
        saver = PeriodicSaver(watch.record, tmp_path / "run.json", 0.01)
        saver.start()
        assert looked.wait(20)
        saver.stop()
    assert touched.pop(threading.current_thread().name) == {False}
    assert set().union(*touched.values()) == {True}


def test_all_threads_of_monitors_are_made_in_one_place() -> None:
    root = Path(sigmascope.__file__).parent
    made = {
        path.relative_to(root).as_posix()
        for folder in ("monitor", "integrations", "probes", "stages", "records")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("threading.Thread", "Thread", "threading.Timer")
    }
    assert made == set()
