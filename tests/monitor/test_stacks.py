"""Where a program's own code is while no step runs: planted functions at known lines, on a clock that is told to pass."""

import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.conftest import FakeClock

from sigmascope.monitor import Recorder, stacks
from sigmascope.monitor.stacks import FileKinds, StackSampler
from sigmascope.records.performance import HostPlace, host_stacks
from sigmascope.records.run import Run

PROGRAM = """
def read_image(arrive, wait):
    payload = Payload()
    kept.append(weakref.ref(payload))
    arrive(1); wait()

def compute(is_over):
    while not is_over():
        sum(range(100))

def in_stage(recorder, arrive, wait):
    with recorder.stage("generation"):
        arrive(1); wait()

def in_step(recorder, arrive, wait):
    with recorder.stage("denoising"), recorder.step():
        arrive(1); wait()

def between_steps(recorder, arrive, wait):
    with recorder.stage("generation"), recorder.stage("denoising"):
        with recorder.step():
            pass
        arrive(1); wait()

def two_stages(recorder, arrive, wait):
    arrive(1); wait()
    with recorder.stage("one"):
        pass
    arrive(1); wait()
    with recorder.stage("two"):
        pass
    arrive(1); wait()

def joined(recorder, worker, arrive, wait):
    with recorder.stage("generation"):
        arrive(1)
        worker.join()
"""
"""Of what it holds `read_image` waits in line 5, `in_stage` in 13, `between_steps` in 23."""


class Payload:
    """Something that a function of the program holds."""


@pytest.fixture
def program(tmp_path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"weakref": weakref, "kept": [], "Payload": Payload}
    exec(compile(PROGRAM, str(tmp_path / "script.py"), "exec"), names)
    return names


class Waiting:
    """A thread of the program's that is in a function of it, at a place where it waits, in no frame of Python's."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._go_on: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=function, args=(*arguments, self._arrived.put, self._go_on.get), daemon=True
        )
        self._thread.start()
        self._arrived.get(timeout=10)
        assert self._thread.ident is not None
        self.ident = self._thread.ident

    def next(self) -> None:
        """Go on to the next place."""
        self._go_on.put(1)
        self._arrived.get(timeout=10)

    def end(self) -> None:
        """Go on to the function's end."""
        self._go_on.put(1)
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextmanager
def waiting(function: Callable[..., object], *arguments: object) -> Iterator[Waiting]:
    thread = Waiting(function, *arguments)
    try:
        yield thread
    finally:
        thread.end()


class Looked:
    """A recorder whose sampler looks when it is told to."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.recorder = Recorder("demo", None, clock=self.clock, stacks=True)
        sampler = self.recorder._stacks
        assert sampler is not None
        self.sampler: StackSampler = sampler

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.pass_seconds(stacks._PERIOD_SECONDS)
            self.sampler.look()

    def places(self) -> tuple[HostPlace, ...]:
        seen = host_stacks(self.recorder.run())
        return () if seen is None else seen.places


@pytest.fixture
def looked() -> Looked:
    return Looked()


def told(place: HostPlace) -> tuple[str, str, str]:
    return place.stage, place.part, place.label


def test_time_outside_stages_goes_to_function_and_line(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["read_image"]) as thread:
        looked.sampler._home = thread.ident
        looked.look(10)
    (place,) = looked.places()
    assert told(place) == ("before the first stage", "outside stages", "read_image (script.py:5)")
    assert place.seconds == pytest.approx(10 * 0.05)
    assert place.samples == 10


def test_time_in_a_stage_goes_to_the_stage(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["in_stage"], looked.recorder):
        looked.look()
    assert [told(place) for place in looked.places()] == [("generation", "stage", "in_stage (script.py:13)")]


def test_time_between_steps_goes_there(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["between_steps"], looked.recorder):
        looked.look()
    (place,) = looked.places()
    assert told(place) == ("generation/denoising", "between steps", "between_steps (script.py:23)")


def test_a_step_is_not_looked_into(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["in_step"], looked.recorder):
        looked.look()
    assert looked.places() == ()


def test_before_between_and_after_stages_are_told_apart(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["two_stages"], looked.recorder) as thread:
        looked.sampler._home = thread.ident
        looked.look(3)
        thread.next()
        looked.look(2)
        assert {place.stage for place in looked.places()} == {
            "before the first stage",
            "after the last stage",
        }
        thread.next()
        assert {place.stage for place in looked.places()} == {"before the first stage", "between stages"}
        looked.look(1)
    assert {place.stage: place.samples for place in looked.places()} == {
        "before the first stage": 3,
        "between stages": 2,
        "after the last stage": 1,
    }


def test_a_thread_that_waits_for_another_gives_what_that_one_does(
    looked: Looked, program: dict[str, Any]
) -> None:
    over: list[int] = []
    worker = threading.Thread(target=program["compute"], args=(over.__len__,), daemon=True)
    worker.start()
    with waiting(program["joined"], looked.recorder, worker):
        for _ in range(100_000):  # it may not wait yet
            looked.look()
            if "compute" in {place.function for place in looked.sampler._seconds}:
                break
        over.append(1)
    (place,) = [place for place in looked.places() if place.function == "compute"]
    assert place.in_thread
    assert place.where in ("script.py:8 in a thread", "script.py:9 in a thread")


def test_a_look_that_had_to_wait_counts_no_more_than_the_part_it_saw(
    looked: Looked, program: dict[str, Any]
) -> None:
    looked.clock.pass_seconds(5.0)  # something held the interpreter before the stage
    with waiting(program["in_stage"], looked.recorder):
        looked.clock.pass_seconds(0.5)
        looked.sampler.look()
    (place,) = looked.places()
    assert place.seconds == pytest.approx(0.5)


def test_nothing_of_the_program_stays_alive(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["read_image"]) as thread:
        looked.sampler._home = thread.ident
        looked.look(3)
    (payload,) = program["kept"]
    assert payload() is None


def test_places_are_bounded(
    looked: Looked, program: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_MOST_PLACES", 4)
    for number in range(10):
        names: dict[str, Any] = {}
        exec(
            compile(f"def f{number}(arrive, wait): arrive(1); wait()", str(tmp_path / "script.py"), "exec"),
            names,
        )
        with waiting(names[f"f{number}"]) as thread:
            looked.sampler._home = thread.ident
            looked.look()
    assert len(looked.sampler._seconds) <= 4 + 1  # and one for all others
    assert len(looked.places()) == 4
    assert sum(sums[1] for sums in looked.sampler._seconds.values()) == 10


def test_looks_that_cost_more_are_taken_less_often(looked: Looked, program: dict[str, Any]) -> None:
    with waiting(program["read_image"]) as thread:
        looked.sampler._home = thread.ident
        looked.look(10)
        looked.sampler.pay(10 * 50_000)  # 50 µs each: a tenth of a per cent of 50 ms
        assert looked.sampler.period_seconds == 0.05
        looked.sampler.pay(10 * 2_000_000)
    assert looked.sampler.period_seconds == pytest.approx(0.4)
    seen = host_stacks(looked.recorder.run())
    assert seen is not None
    assert seen.cost_seconds == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/home/me/script.py", "own"),
        ("<stdin>", "own"),
        ("<string>", "standard"),  # what is made while the program runs
        ("<frozen importlib._bootstrap>", "standard"),
        (threading.__file__, "waiting"),
        (os.__file__, "standard"),
        (pytest.__file__, "library"),
        (stacks.__file__, "watch"),
    ],
)
def test_whose_code_a_file_is(file: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert FileKinds().of(file) == kind


def test_code_of_the_command_line_is_the_program_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert FileKinds().of("<string>") == "own"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sigmascope-stacks"]


def test_it_is_off_unless_asked_for() -> None:
    with Recorder("demo", None) as recorder:
        assert threads() == []
    assert host_stacks(recorder.run()) is None


def test_the_thread_ends_with_the_recorder() -> None:
    with Recorder("demo", None, stacks=True):
        assert threads() == ["sigmascope-stacks"]
    assert threads() == []


def test_the_thread_ends_with_an_error_and_with_ctrl_c() -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), Recorder("demo", None, stacks=True):
            raise error
        assert threads() == []


def test_a_sampler_that_nobody_has_any_more_ends_its_thread() -> None:
    sampler = StackSampler(Recorder("demo", None)._instruments.guard, FakeClock())
    sampler.start()
    thread = sampler._thread
    assert thread is not None
    del sampler
    thread.join(10)
    assert not thread.is_alive()


def test_a_failure_is_a_reason_in_the_record_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no frames here")

    with Recorder("demo", None, stacks=True) as recorder:
        monkeypatch.setattr(sys, "_current_frames", fails)
        assert recorder._stacks is not None
        assert recorder._stacks._thread is not None
        recorder._stacks._thread.join(10)
    assert recorder.run().unavailable["stacks"] == "RuntimeError: no frames here"


def test_no_thread_to_be_had_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with Recorder("demo", None, stacks=True) as recorder:
        pass
    assert recorder.run().unavailable["stacks"] == "RuntimeError: can't start new thread"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_block_without_a_thread() -> None:
    with Recorder("demo", None, stacks=True) as recorder:
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                assert recorder._stacks is not None
                recorder.__exit__(None, None, None)
                run: Run = recorder.run()
                os._exit(0 if threads() == [] and run.complete else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert threads() == ["sigmascope-stacks"]


@pytest.mark.parametrize(
    "damage", ["text", {"samples": 1}, {"samples": -1, "places": [{"seconds": "x"}]}, []]
)
def test_a_damaged_note_of_it_is_passed_over(damage: Any) -> None:
    assert host_stacks(Run("1", "demo", "", 1.0, facts={"host_stacks": damage})) is None
