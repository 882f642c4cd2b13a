from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from sigmascope.monitor import Recorder
from sigmascope.monitor.scope import NOT_AT_STEPS, StepColumns

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost


@pytest.fixture
def timed(clock: "FakeClock", host: "FakeHost") -> Recorder:
    return Recorder(sample_hz=None, clock=clock)


def test_steps_have_their_start_since_the_stage_began_and_their_length(
    timed: Recorder, clock: "FakeClock"
) -> None:
    clock.pass_seconds(100)
    with timed.stage("denoising"):
        clock.pass_seconds(1)
        for length in (2.0, 0.5):
            with timed.step():
                clock.pass_seconds(length)
    steps = timed.run().stages[0].steps
    assert (steps.started, steps.seconds) == ((1.0, 3.0), (2.0, 0.5))


def test_what_is_computed_between_steps_is_in_no_steps_processor_time(
    timed: Recorder, clock: "FakeClock", monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, asked = 0, 0

    def process_time_ns() -> int:
        nonlocal asked
        asked += 1
        return spent

    monkeypatch.setattr("sigmascope.monitor.scope.process_time_ns", process_time_ns)
    with timed.stage("denoising"):
        for seconds_between in (
            0.0,
            1.0,
            -60.0,
            0.0,
        ):  # at once, after a preview, and with the clock set back
            with timed.step():
                spent += 5_000_000
                clock.pass_seconds(0.005)
            spent += round(abs(seconds_between) * 1e9)
            clock.pass_seconds(seconds_between)
    assert timed.run().stages[0].steps.cpu_seconds == (0.005,) * 4
    assert asked == 4 + 3  # at each end, and where a step does not follow the last one at once


def test_a_step_has_the_resident_bytes_at_its_end(
    timed: Recorder, clock: "FakeClock", host: "FakeHost"
) -> None:
    with timed.stage("denoising"):
        for rss in (5000, 7000):
            with timed.step():
                host.rss = rss
    assert timed.run().stages[0].steps.rss_bytes == (5000, 7000)


def test_without_an_accelerator_its_columns_are_empty_and_say_why(timed: Recorder) -> None:
    with timed.stage("denoising"), timed.step():
        pass
    steps = timed.run().stages[0].steps
    assert (steps.gpu_seconds, steps.allocated_bytes) == ((), ())
    assert steps.unavailable.keys() == {"gpu_seconds", "allocated_bytes"}
    assert "no accelerator" in steps.unavailable["gpu_seconds"]


def test_a_stage_without_steps_misses_nothing(timed: Recorder) -> None:
    with timed.stage("latent_decoding"):
        pass
    assert timed.run().stages[0].steps.unavailable == {}


def test_a_step_that_raises_is_recorded_and_its_exception_passes_unchanged(
    timed: Recorder, clock: "FakeClock"
) -> None:
    error = ValueError("the host's own")

    def fail() -> None:
        with timed.stage("denoising"), timed.step():
            clock.pass_seconds(3)
            raise error

    with pytest.raises(ValueError, match="the host's own") as caught:
        fail()
    assert caught.value is error
    assert timed.run().stages[0].steps.seconds == (3.0,)


def test_a_step_belongs_to_the_stage_that_was_open_when_it_began(timed: Recorder, clock: "FakeClock") -> None:
    with timed.stage("outer"):
        with timed.step(), timed.stage("inner"), timed.step():
            clock.pass_seconds(1)
        with timed.step():
            clock.pass_seconds(2)
    outer = timed.run().stages[0]
    assert outer.steps.seconds == (1.0, 2.0)
    assert outer.children[0].steps.seconds == (1.0,)


def test_one_step_object_serves_a_whole_loop_and_several_stages(timed: Recorder, clock: "FakeClock") -> None:
    step = timed.step()
    for name in ("first", "second"):
        with timed.stage(name):
            for _ in range(3):
                with step:
                    clock.pass_seconds(1)
    assert [stage.steps.seconds for stage in timed.run().stages] == [(1.0, 1.0, 1.0)] * 2


def test_a_step_object_entered_inside_itself_gives_two_steps(timed: Recorder, clock: "FakeClock") -> None:
    step = timed.step()
    with timed.stage("denoising"), step:
        clock.pass_seconds(1)
        with step:
            clock.pass_seconds(2)
    steps = timed.run().stages[0].steps
    assert (steps.started, steps.seconds) == ((1.0, 0.0), (2.0, 3.0))


def test_leaving_a_step_that_was_not_entered_does_nothing(timed: Recorder) -> None:
    timed.step().__exit__(None, None, None)
    assert timed.run().stages == ()


def test_steps_outside_all_stages_are_kept_under_a_stage_of_their_own(
    timed: Recorder, clock: "FakeClock"
) -> None:
    clock.pass_seconds(5)
    for _ in range(2):
        with timed.step():
            clock.pass_seconds(1)
    run = timed.run()
    assert run.seconds == 2.0
    assert [(s.name, s.started_seconds, s.seconds, s.steps.started) for s in run.stages] == [
        ("unstaged", 0.0, 2.0, (0.0, 1.0))
    ]


def test_a_step_has_the_allocated_bytes_at_its_end(accelerator: "FakeAccelerator", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        for nbytes in (4, 6):
            with recorder.step():
                accelerator.allocate(nbytes)
    assert recorder.run().stages[0].steps.allocated_bytes == (4, 10)


def test_of_thousands_of_steps_each_keeps_its_row_whenever_they_are_read(
    timed: Recorder, clock: "FakeClock", host: "FakeHost"
) -> None:
    lengths = [number / 8 for number in range(1, 2001)]
    with timed.stage("denoising"):
        for number, length in enumerate(lengths):
            with timed.step():
                clock.pass_seconds(length)
                host.rss = 5000 + number
            if number in {0, 255, 256, 300, 1023}:
                assert timed.run().stages[0].steps.seconds == tuple(lengths[: number + 1])
    steps = timed.run().stages[0].steps
    assert steps.seconds == tuple(lengths)
    assert steps.rss_bytes == tuple(range(5000, 7000))


def test_reading_a_run_while_threads_add_steps_sees_whole_rows_and_loses_none() -> None:
    columns = StepColumns(None)

    def add(thread: int) -> None:
        for number in range(5000):
            at = thread * 10_000 + number
            columns.add(at, at + 7, at + 1, at + 2, at + 3)

    with ThreadPoolExecutor(4) as pool:
        adding = [pool.submit(add, thread) for thread in range(4)]
        read = [columns.freeze(0, {})]
        while not all(future.done() for future in adding):
            read.append(columns.freeze(0, {}))
        for future in adding:
            future.result()
    for steps in [*read, columns.freeze(0, {})]:
        for started, seconds, rss, allocated, cpu in zip(
            steps.started,
            steps.seconds,
            steps.rss_bytes,
            steps.allocated_bytes,
            steps.cpu_seconds,
            strict=True,
        ):
            at = round(started * 1e9)
            assert (round(seconds * 1e9), rss, allocated) == (7, at + 1, at + 2)
            assert cpu == (at + 3) / 1e9
    assert len(columns) == len({*columns.freeze(0, {}).started}) == 20_000


def test_steps_without_memory_have_all_else_and_say_why(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder("light", None, clock=clock, step_memory=False)
    with recorder.stage("denoising"):
        for _ in range(3):
            with recorder.step():
                clock.pass_seconds(1)
                host.rss *= 2
            host.rss //= 2
    stage = recorder.run().stages[0]
    assert (stage.steps.seconds, stage.steps.rss_bytes) == ((1.0, 1.0, 1.0), ())
    assert stage.steps.unavailable["rss_bytes"] == NOT_AT_STEPS
    assert stage.peak is not None
    assert stage.peak.rss_bytes == host.rss
    assert "rss_bytes" not in stage.peak.unavailable


def test_steps_without_the_process_s_memory_have_the_device_s(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder("light", None, accelerator, step_memory=False)
    with recorder.stage("denoising"), recorder.step():
        accelerator.allocate(9)
    steps = recorder.run().stages[0].steps
    assert (steps.rss_bytes, steps.allocated_bytes) == ((), (9,))
