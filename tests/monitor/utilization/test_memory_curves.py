import tracemalloc
from typing import TYPE_CHECKING

import pytest

from sigmascope.analysis.memory import TOLERANCE_BYTES
from sigmascope.monitor import Recorder, scope
from sigmascope.monitor.peaks import HostMemory
from sigmascope.monitor.scope import OUTSIDE, OWN_FACT
from sigmascope.monitor.utilization import NO_READING, NOT_SAMPLED
from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.performance import MemoryCurve, memory_over_time
from sigmascope.records.run import Stage

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost

SELDOM = 1e-6
"""So that the thread never comes, and the tests say when a sample is taken."""


@pytest.fixture
def sampled(clock: "FakeClock", host: "FakeHost") -> Recorder:
    return Recorder("sampled", SELDOM, clock=clock)


def sample(recorder: Recorder) -> None:
    recorder._instruments._sample()


def only(recorder: Recorder) -> Stage:
    (stage,) = recorder.run().stages
    return stage


def test_a_stage_has_the_process_and_the_system_as_each_sample_saw_them(
    sampled: Recorder, clock: "FakeClock", host: "FakeHost"
) -> None:
    clock.pass_seconds(5)
    with sampled.stage("generation"):
        for rss, ram_used in ((300, 4000), (500, 3000)):
            clock.pass_seconds(0.25)
            host.rss, host.ram_used = rss, ram_used
            sample(sampled)
    assert memory_over_time(only(sampled)) == {
        "process": MemoryCurve((0.25, 0.5), (300, 500)),
        "system": MemoryCurve((0.25, 0.5), (4000, 3000)),
    }


def test_each_device_has_what_is_allocated_on_it(
    make_accelerator: "type[FakeAccelerator]", clock: "FakeClock", host: "FakeHost"
) -> None:
    accelerator = make_accelerator(2)
    recorder = Recorder("two", SELDOM, accelerator, clock)
    with recorder.stage("generation"):
        accelerator.allocate(7, "cuda:1")
        clock.pass_seconds(1)
        sample(recorder)
    curves = memory_over_time(only(recorder))
    assert (curves["cuda:0"].nbytes, curves["cuda:1"].nbytes) == ((0,), (7,))


def test_the_curves_lie_in_the_outermost_stage_alone(sampled: Recorder, clock: "FakeClock") -> None:
    with sampled.stage("generation"), sampled.stage("denoising"):
        clock.pass_seconds(1)
        sample(sampled)
    outer = only(sampled)
    assert memory_over_time(outer)["process"].at_seconds == (1.0,)
    assert memory_over_time(outer.children[0]) == {}
    assert "memory_over_time" not in outer.children[0].unavailable


def test_a_stage_has_nothing_of_before_and_after_it(sampled: Recorder, clock: "FakeClock") -> None:
    with sampled:
        for name in ("first", "second"):
            sample(sampled)
            with sampled.stage(name):
                clock.pass_seconds(1)
                sample(sampled)
            clock.pass_seconds(1)
        sample(sampled)
    for stage in sampled.run().stages:
        assert memory_over_time(stage)["process"].at_seconds == (1.0,)


def test_a_stage_that_no_sample_fell_into_says_so(sampled: Recorder) -> None:
    with sampled.stage("short"):
        pass
    assert only(sampled).unavailable["memory_over_time"] == NO_READING


def test_a_reading_from_before_a_stage_is_none_of_its_own(sampled: Recorder, clock: "FakeClock") -> None:
    clock.pass_seconds(1)
    before = clock.ns - 1
    with sampled.stage("generation"):
        sampled._instruments.sampled.sample(before, HostMemory(700, 8000), {})
        sample(sampled)
    assert memory_over_time(only(sampled))["process"].at_seconds == (0.0,)


def test_a_reading_while_a_stage_is_being_closed_is_none_of_its_own(
    sampled: Recorder, clock: "FakeClock", host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(_: object) -> MemorySnapshot:
        clock.pass_seconds(1)
        sample(sampled)
        return host.snapshot()

    with sampled.stage("generation"):
        sample(sampled)
        monkeypatch.setattr(scope, "memory_snapshot", slow)
    assert memory_over_time(only(sampled))["process"].at_seconds == (0.0,)


def test_a_fact_of_the_caller_s_own_stands_in_the_curves_place_and_the_stage_says_so(
    sampled: Recorder,
) -> None:
    with sampled.stage("generation") as stage:
        stage.fact("memory_over_time", "mine")
        sample(sampled)
    assert only(sampled).facts["memory_over_time"] == "mine"
    assert only(sampled).unavailable["memory_over_time"] == OWN_FACT


def test_a_long_stage_s_curves_leave_room_below_what_is_taken_for_a_leak(
    sampled: Recorder, clock: "FakeClock"
) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            with sampled.stage("generation"):
                for nbytes in range(2**40, 2**40 + 255):
                    clock.pass_seconds(0.1)
                    sampled._instruments.sampled.sample(clock.ns, HostMemory(nbytes, nbytes), {})
        kept = (tracemalloc.get_traced_memory()[0] - before) / 10
    finally:
        tracemalloc.stop()
    assert len(memory_over_time(sampled.run().stages[-1])["process"].nbytes) == 255
    assert kept < TOLERANCE_BYTES / 4


def test_steps_outside_all_stages_have_no_curve_and_say_so(sampled: Recorder) -> None:
    with sampled, sampled.step():
        sample(sampled)
    assert only(sampled).unavailable["memory_over_time"] == OUTSIDE


def test_without_a_sampler_the_stage_says_so(recorder: Recorder) -> None:
    with recorder.stage("quiet"):
        pass
    assert only(recorder).unavailable["memory_over_time"] == NOT_SAMPLED


def test_a_reading_that_failed_is_no_point(
    sampled: Recorder, host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    with sampled.stage("generation"):
        monkeypatch.setattr(scope, "process_rss_bytes", lambda: None)
        monkeypatch.setattr(scope, "system_memory", lambda: MemorySnapshot(ram_used_bytes=7))
        sample(sampled)
    assert set(memory_over_time(only(sampled))) == {"system"}


def test_curves_that_fail_are_switched_off_and_all_else_stays(
    sampled: Recorder, host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.monitor.utilization.Series.add", lambda *_: 1 / 0)
    with sampled.stage("generation"):
        host.rss *= 3
        sample(sampled)
        host.rss //= 3
    stage = only(sampled)
    assert stage.peak is not None
    assert stage.peak.rss_bytes == 3 * host.rss
    assert "ZeroDivisionError" in stage.unavailable["memory_over_time"]


def test_an_open_stage_has_its_curve_so_far(sampled: Recorder) -> None:
    with sampled.stage("open"):
        sample(sampled)
        assert len(memory_over_time(only(sampled))["process"].nbytes) == 1
        sample(sampled)
    assert len(memory_over_time(only(sampled))["process"].nbytes) == 2
