import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import NoReturn

import jsonschema
import pytest
from tests.families import make_pipeline
from tests.monitor.conftest import FakeAccelerator, FakeClock

from sigmascope.errors import ConfigError, WriteError
from sigmascope.monitor import Recorder
from sigmascope.monitor.live_line import StepProgress
from sigmascope.monitor.performance import (
    PerformanceMonitor,
    create_mmdit_performance_monitor,
    monitor_generation_performance,
)
from sigmascope.monitor.recorder import current_recorder
from sigmascope.records.performance import PerformanceMetrics


def generate(monitor: PerformanceMonitor, clock: FakeClock, steps: list[float], setup: float = 0.0) -> None:
    with monitor.monitor_generation("model", num_steps=len(steps), resolution=(1024, 768)) as watching:
        clock.pass_seconds(setup)
        for seconds in steps:
            watching.start_step_timing()
            clock.pass_seconds(seconds)
            assert watching.end_step_timing() == pytest.approx(seconds)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def monitor(clock: FakeClock) -> PerformanceMonitor:
    return PerformanceMonitor(5.0, clock=clock, sample_hz=None)


def test_the_defaults_are_those_of_the_contract() -> None:
    made = PerformanceMetrics()
    assert made.target_generation_time == 5.0
    assert made.image_resolution == (0, 0)
    assert (made.architecture_type, made.torch_dtype, made.device) == ("MMDiT", "float16", "cuda")
    assert (made.batch_size, made.num_inference_steps, made.target_met) == (1, 0, False)
    assert made.total_generation_time == made.performance_score == made.gpu_memory_total_gb == 0.0
    assert made.gpu_name == made.driver_version == made.model_name == ""


@pytest.mark.parametrize(("step", "score", "met"), [(0.8, 31.2, False), (0.12, 100.0, True)])
def test_a_generation_is_held_to_its_target(
    monitor: PerformanceMonitor, clock: FakeClock, step: float, score: float, met: bool
) -> None:
    generate(monitor, clock, [step] * 20)
    current = monitor.get_performance_summary()["current_generation"]
    assert current["total_time"] == pytest.approx(20 * step)
    assert current["per_step_time"] == pytest.approx(step)
    assert current["performance_score"] == score
    assert current["target_met"] is met
    assert (current["model_name"], current["steps"], current["resolution"]) == ("model", 20, "1024x768")


def test_setup_lasts_until_the_first_step(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    generate(monitor, clock, [0.5, 0.5], setup=1.5)
    assert monitor.current_metrics.pipeline_setup_time == pytest.approx(1.5)
    assert monitor.current_metrics.total_generation_time == pytest.approx(2.5)


def test_the_block_gives_the_monitor_itself(monitor: PerformanceMonitor) -> None:
    with monitor.monitor_generation() as watching:
        assert watching is monitor


def test_an_exception_passes_unchanged_and_enters_no_history(monitor: PerformanceMonitor) -> None:
    error = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs") as caught, monitor.monitor_generation():
        raise error
    assert caught.value is error
    assert "historical_performance" not in monitor.get_performance_summary()
    assert monitor.runs[0].stages[0].error == "ValueError: theirs"


def test_without_an_accelerator_every_figure_of_it_is_none(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    generate(monitor, clock, [0.1])
    summary = monitor.get_performance_summary()
    assert summary["memory_usage"]["gpu_memory_gb"] is None
    assert summary["memory_usage"]["gpu_utilization_percent"] is None
    assert summary["hardware_info"] == {
        "gpu_name": None,
        "gpu_total_memory_gb": None,
        "device": "cpu",
        "driver_version": None,
    }
    assert (summary["memory_usage"]["system_memory_gb"] or 0) > 0


def test_gigabytes_are_ten_to_the_ninth_and_the_peak_counts(clock: FakeClock) -> None:
    accelerator = FakeAccelerator()
    monitor = PerformanceMonitor(accelerator=accelerator, clock=clock, sample_hz=None)
    with monitor.monitor_generation(num_steps=1):
        accelerator.allocate(3_000_000_000)
        accelerator.free(2_000_000_000)
    assert monitor.current_metrics.gpu_memory_used_gb == pytest.approx(3.0)
    assert monitor.current_metrics.device == "cuda:0"


def test_the_warning_comes_once_at_the_first_step_that_heads_beyond_the_target(clock: FakeClock) -> None:
    warnings: list[StepProgress] = []
    monitor = PerformanceMonitor(5.0, on_warning=warnings.append, clock=clock, sample_hz=None)
    # 0.2 s a step heads for 4 s; after the slow third, 1.4 + mean 0.4667 · 17 = 9.3 s.
    generate(monitor, clock, [0.2, 0.2, 1.0] + [0.2] * 17)
    assert [warning.step for warning in warnings] == [3]
    assert warnings[0].projected_seconds == pytest.approx(1.4 + 1.4 / 3 * 17)


def test_the_projection_forgets_a_slow_first_step(clock: FakeClock) -> None:
    seen: list[StepProgress] = []
    monitor = PerformanceMonitor(5.0, on_step=seen.append, clock=clock, sample_hz=None)
    generate(monitor, clock, [2.0] + [0.1] * 9)
    assert seen[-1].projected_seconds == pytest.approx(2.9)
    # After step 4: 2.3 + 0.575 · 6 = 5.75 s; after step 5: 2.4 + 0.48 · 5 = 4.8 s.
    assert [one.misses_target for one in seen] == [True] * 4 + [False] * 6


def test_a_missed_target_is_logged_where_nobody_listens(
    monitor: PerformanceMonitor, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        generate(monitor, clock, [1.0] * 20)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "At step 1 of 20 the generation heads for 20.00 s, above its target of 5.00 s."
    assert [message for message in said if "At step" in message] == said[:1]


def test_a_listener_that_fails_is_called_no_more_and_hurts_nobody(clock: FakeClock) -> None:
    calls = []

    def fails(progress: StepProgress) -> None:
        calls.append(progress)
        raise RuntimeError("a display is gone")

    monitor = PerformanceMonitor(on_step=fails, clock=clock, sample_hz=None)
    generate(monitor, clock, [0.1] * 3)
    assert len(calls) == 1
    assert monitor.get_performance_summary()["step_performance"]["total_steps"] == 3


@pytest.mark.parametrize("function", ["generation.projected_seconds", "performance.per_step_time"])
def test_a_figure_that_cannot_be_computed_takes_no_other_away(
    function: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(f"sigmascope.monitor.{function}", broken)
    monitor = PerformanceMonitor(clock=clock, sample_hz=None)
    generate(monitor, clock, [0.25] * 4)
    summary = monitor.get_performance_summary()
    assert summary["current_generation"]["per_step_time"] == pytest.approx(0.25)
    assert summary["step_performance"]["total_steps"] == 4


def test_a_stopwatch_stands_alone(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    monitor.start_timing()
    clock.pass_seconds(6.0)
    assert monitor.end_timing() == pytest.approx(6.0)
    assert monitor.current_metrics.performance_score == 83.3
    assert monitor.end_timing() is None


def test_a_stopwatch_inside_a_generation_leaves_its_time_alone(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    with monitor.monitor_generation():
        clock.pass_seconds(1.0)
        monitor.start_timing()
        clock.pass_seconds(2.0)
        assert monitor.end_timing() == pytest.approx(2.0)
    assert monitor.current_metrics.total_generation_time == pytest.approx(3.0)


def test_a_step_that_was_never_begun_has_no_time(monitor: PerformanceMonitor) -> None:
    assert monitor.end_step_timing() is None
    monitor.start_step_timing()
    with monitor.monitor_generation():
        assert monitor.end_step_timing() is None
        monitor.start_step_timing()
        assert monitor.end_step_timing() == 0.0
        assert monitor.end_step_timing() is None


def test_a_step_begun_again_is_one_step_from_then_on(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    with monitor.monitor_generation():
        monitor.start_step_timing()
        clock.pass_seconds(1.0)
        monitor.start_step_timing()
        clock.pass_seconds(0.5)
        assert monitor.end_step_timing() == pytest.approx(0.5)
        assert monitor.end_step_timing() is None
    assert monitor.get_performance_summary()["step_performance"]["total_steps"] == 1
    assert monitor.runs[0].stages[0].steps.seconds == pytest.approx((0.5,))


def test_loading_is_measured_and_its_result_given(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    def load(name: str, *, fast: bool) -> str:
        clock.pass_seconds(3.0)
        return f"{name} {fast}"

    assert monitor.measure_model_load_time(load, "weights", fast=True) == ("weights True", 3.0)
    generate(monitor, clock, [0.1])
    assert monitor.current_metrics.model_load_time == 3.0


def test_history_averages_what_went_well(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    generate(monitor, clock, [2.0, 2.0])
    generate(monitor, clock, [4.0, 4.0])
    summary = monitor.get_performance_summary()
    assert summary["historical_performance"] == {
        "total_generations": 2,
        "avg_generation_time": pytest.approx(6.0),
        "min_generation_time": pytest.approx(4.0),
        "max_generation_time": pytest.approx(8.0),
        "avg_performance_score": pytest.approx((100.0 + 62.5) / 2),
        "success_rate": 50.0,
    }
    assert summary["step_performance"]["avg_step_time"] == pytest.approx(3.0)


def test_history_is_bounded_and_cleared_on_request(clock: FakeClock) -> None:
    monitor = PerformanceMonitor(history=3, step_history=4, clock=clock, sample_hz=None)
    for _ in range(5):
        generate(monitor, clock, [0.1, 0.1])
    summary = monitor.get_performance_summary()
    assert summary["historical_performance"]["total_generations"] == len(monitor.runs) == 3
    assert summary["step_performance"]["total_steps"] == 4
    monitor.clear_history()
    assert {"historical_performance", "step_performance"}.isdisjoint(monitor.get_performance_summary())
    assert not monitor.runs


def test_reset_begins_anew_but_leaves_a_running_generation_alone(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    with monitor.monitor_generation("first"):
        monitor.reset_metrics()
        assert monitor.current_metrics.model_name == "first"
    monitor.reset_metrics()
    assert monitor.current_metrics.model_name == ""


def test_before_and_after_by_metrics_or_by_an_export(
    monitor: PerformanceMonitor, clock: FakeClock, tmp_path: Path
) -> None:
    generate(monitor, clock, [16.0])
    before = monitor.get_current_metrics()
    monitor.export_metrics_to_json(tmp_path / "before.json")
    generate(monitor, clock, [2.4])
    compared = monitor.get_before_after_comparison(before)
    assert compared["improvement"]["total_time_percent"] == pytest.approx(85.0)
    exported = json.loads((tmp_path / "before.json").read_text())["current_metrics"]
    assert monitor.get_before_after_comparison(exported) == compared


@pytest.mark.parametrize("generations", [0, 2])
def test_an_export_is_of_the_schema_that_ships(
    monitor: PerformanceMonitor, clock: FakeClock, tmp_path: Path, generations: int
) -> None:
    for _ in range(generations):
        generate(monitor, clock, [0.5])
    monitor.export_metrics_to_json(tmp_path / "metrics.json")
    schema = json.loads(
        resources.files("sigmascope.records").joinpath("schemas/performance.json").read_text()
    )
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads((tmp_path / "metrics.json").read_text()), schema)


def test_an_export_that_cannot_be_written_says_so(monitor: PerformanceMonitor, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError):
        monitor.export_metrics_to_json(tmp_path / "taken" / "metrics.json")


def test_a_model_tells_its_dtype_and_architecture_and_is_not_kept(monitor: PerformanceMonitor) -> None:
    unet = make_pipeline("sd15").unet.double()
    kept = weakref.ref(unet)
    block = monitor.monitor_generation(model=unet)
    del unet
    gc.collect()
    assert kept() is None
    with block:
        pass
    metrics = monitor.current_metrics
    assert (metrics.torch_dtype, metrics.architecture_type) == ("float64", "UNet")
    assert monitor.runs[0].stages[0].facts["pipeline"]["class_name"] == "UNet2DConditionModel"


def test_a_missed_target_is_diagnosed_and_logged(
    monitor: PerformanceMonitor, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    generate(monitor, clock, [0.1] * 20)
    assert monitor.diagnose() == ()
    generate(monitor, clock, [10.0] + [0.5] * 19)
    assert {"time.target_missed", "time.first_step_compiles"} == {one.id for one in monitor.diagnose()}
    assert "3.9 times the target of 5.00 s" in caplog.text


def test_nothing_is_diagnosed_without_a_generation(monitor: PerformanceMonitor) -> None:
    assert monitor.diagnose() == ()


def test_a_generation_lies_in_the_recorder_that_is_current(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    recorder = Recorder("all", sample_hz=None, clock=clock)
    with recorder, recorder.stage("request"):
        generate(monitor, clock, [0.5, 0.5])
    stage = recorder.run().stage("generation")
    assert len(stage.steps) == 2
    assert stage.facts["performance"]["performance_score"] == 100.0
    (own,) = monitor.runs
    assert (own.id, own.stages[0].facts, own.seconds) == (recorder.id, stage.facts, stage.seconds)


def test_a_stage_of_another_recorder_lies_in_the_generation_around_it(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    recorder = Recorder("inner", sample_hz=None, clock=clock)
    with monitor.monitor_generation("model"), recorder, recorder.stage("denoising"):
        clock.pass_seconds(0.5)
    (outer,), inner = monitor.runs, recorder.run()
    assert [stage.name for stage in outer.walk()] == ["generation", "denoising"]
    assert outer.stage("denoising").seconds == inner.stage("denoising").seconds == 0.5
    assert (outer.facts["runs_within"], inner.facts["within_run"]) == ([inner.id], outer.id)


def test_what_nobody_gave_is_told_from_what_was_given(clock: FakeClock) -> None:
    monitor = PerformanceMonitor(clock=clock, sample_hz=None)
    with monitor.monitor_generation():
        monitor.start_step_timing()
        clock.pass_seconds(0.5)
        monitor.end_step_timing()
    current = monitor.get_performance_summary()["current_generation"]
    assert (current["steps"], current["resolution"]) == (1, "1024x1024")
    assert current["assumed"] == ["architecture", "resolution"]
    assert monitor.current_metrics.assumed == (
        "image_resolution", "batch_size", "architecture_type", "target_generation_time",
    )  # fmt: skip
    call = monitor.runs[-1].stages[0].facts["call"]
    assert (call["num_inference_steps"], call["width"], call["height"], call["batch_size"]) == (
        1,
        None,
        None,
        None,
    )
    given = PerformanceMonitor(5.0, clock=clock, sample_hz=None)
    with given.monitor_generation("", "MMDiT", 20, (1024, 1024), batch_size=1):
        pass
    assert given.current_metrics.assumed == ()


def test_nobody_is_warned_of_a_target_or_of_steps_that_nobody_gave(clock: FakeClock) -> None:
    """Four steps of 2 s: beyond the default target of 5 s, and no 20 steps, which is the default too."""
    warned: list[object] = []
    for monitor, expected in (
        (PerformanceMonitor(clock=clock, sample_hz=None), []),
        (PerformanceMonitor(9.0, clock=clock, sample_hz=None), []),
        (PerformanceMonitor(5.0, clock=clock, sample_hz=None), ["time.target_missed"]),
    ):
        monitor.on_warning = warned.append
        seen: list[StepProgress] = []
        monitor.on_step = seen.append
        with monitor.monitor_generation("model"):
            for _ in range(4):
                monitor.start_step_timing()
                clock.pass_seconds(2.0)
                monitor.end_step_timing()
        assert [(one.steps, one.projected_seconds) for one in seen] == [
            (0, 2.0),
            (0, 4.0),
            (0, 6.0),
            (0, 8.0),
        ]
        assert [finding.id for finding in monitor.diagnose()] == expected
        assert len(warned) == len(expected)
    with monitor.monitor_generation("model"):
        clock.pass_seconds(8.0)
    assert "per_step_time_derived" not in monitor.get_performance_summary()["current_generation"]


def test_a_generation_inside_another_gives_way_to_it_again(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    with monitor.monitor_generation("outer"):
        with monitor.monitor_generation("inner"):
            clock.pass_seconds(1.0)
            assert monitor.current_metrics.model_name == "inner"
        assert monitor.current_metrics.model_name == "outer"
        clock.pass_seconds(1.0)
    assert monitor.current_metrics.total_generation_time == pytest.approx(2.0)


def test_the_thread_that_did_not_generate_sees_the_last_that_finished(monitor: PerformanceMonitor) -> None:
    def work() -> None:
        with monitor.monitor_generation("elsewhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert monitor.current_metrics.model_name == "elsewhere"


@pytest.mark.parametrize("each", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_32_threads_of_200_generations_lose_nothing_and_mix_nothing(each: int) -> None:
    monitor = PerformanceMonitor(history=6400, step_history=20_000, sample_hz=None)

    def work(thread: int) -> None:
        for index in range(each):
            name = f"{thread}/{index}"
            with monitor.monitor_generation(name, num_steps=thread % 3):
                for _ in range(thread % 3):
                    monitor.start_step_timing()
                    assert monitor.end_step_timing() is not None
                assert monitor.current_metrics.model_name == name
            assert monitor.current_metrics.model_name == name

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(work, range(32)))
    summary = monitor.get_performance_summary()
    assert summary["historical_performance"]["total_generations"] == 32 * each
    assert summary["step_performance"]["total_steps"] == sum(each * (thread % 3) for thread in range(32))
    for run in monitor.runs:
        facts = run.stages[0].facts["performance"]
        assert facts["model_name"] == run.name
        assert facts["num_inference_steps"] == len(run.stages[0].steps)


def test_tasks_that_take_turns_see_their_own() -> None:
    monitor = PerformanceMonitor(sample_hz=None)

    async def work(name: str) -> str:
        with monitor.monitor_generation(name):
            for _ in range(3):
                await asyncio.sleep(0)
                assert monitor.current_metrics.model_name == name
        return monitor.current_metrics.model_name

    async def everyone() -> list[str]:
        return await asyncio.gather(*(work(f"task {index}") for index in range(8)))

    assert asyncio.run(everyone()) == [f"task {index}" for index in range(8)]


def test_it_decorates_functions_and_coroutine_functions(monitor: PerformanceMonitor) -> None:
    @monitor.monitor_generation("plain")
    def plain(value: int) -> int:
        return value + 1

    @monitor.monitor_generation("task")
    async def task(value: int) -> int:
        await asyncio.sleep(0)
        assert monitor.current_metrics.model_name == "task"
        return value + 2

    assert (plain(1), asyncio.run(task(1))) == (2, 3)
    assert [run.name for run in monitor.runs] == ["plain", "task"]


def test_a_generator_is_watched_while_it_is_run_through(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    @monitor.monitor_generation("values", num_steps=2)
    def values() -> Iterator[int]:
        for number in range(2):
            clock.pass_seconds(1.0)
            yield number

    assert list(values()) == [0, 1]
    assert monitor.current_metrics.total_generation_time == pytest.approx(2.0)
    for first in values():
        clock.pass_seconds(0.5)
        assert first == 0
        break
    gc.collect()  # one that is given up ends where it stood
    assert monitor.current_metrics.total_generation_time == pytest.approx(1.5)
    assert monitor.recorder is None


def test_an_asynchronous_generator_is_watched_while_it_is_run_through(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    @monitor.monitor_generation("stream", num_steps=2)
    async def stream() -> AsyncIterator[int]:
        for number in range(2):
            clock.pass_seconds(1.0)
            yield number

    async def all_of_it() -> list[int]:
        return [number async for number in stream()]

    assert asyncio.run(all_of_it()) == [0, 1]
    (run,) = monitor.runs
    assert run.name == "stream"
    assert run.stages[0].seconds == pytest.approx(2.0)


def test_the_short_ways_make_a_monitor_with_that_target() -> None:
    assert create_mmdit_performance_monitor(target_time=3.0).target_generation_time == 3.0
    with monitor_generation_performance("Qwen-Image", target_time=2.0) as monitor:
        assert monitor.current_metrics.model_name == "Qwen-Image"
    assert monitor.get_performance_summary()["target_configuration"]["target_time"] == 2.0


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_a_time_that_is_not_known_meets_no_target(
    monitor: PerformanceMonitor, unknown: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert monitor.validate_performance_target(unknown) is False
    assert "Cannot check the target" in caplog.text


def test_a_whole_export_can_be_compared_and_anything_else_is_refused(
    monitor: PerformanceMonitor, clock: FakeClock, tmp_path: Path
) -> None:
    generate(monitor, clock, [16.0])
    monitor.export_metrics_to_json(tmp_path / "before.json")
    generate(monitor, clock, [2.4])
    exported = json.loads((tmp_path / "before.json").read_text())
    assert monitor.get_before_after_comparison(exported)["before"]["total_time"] == pytest.approx(16.0)
    for nothing in ({}, {"seconds": 3}):
        with pytest.raises(ConfigError, match="before_metrics"):
            monitor.get_before_after_comparison(nothing)
    for name, value in (
        ("image_resolution", None),
        ("total_generation_time", "16 s"),
        ("performance_score", [31.2]),
    ):
        with pytest.raises(ConfigError, match=rf"before_metrics cannot be read.*current_metrics\.{name}"):
            monitor.get_before_after_comparison(exported["current_metrics"] | {name: value})
    impossible = exported["current_metrics"] | {"total_generation_time": -16.0}
    assert monitor.get_before_after_comparison(impossible)["improvement"]["total_time_percent"] is None


def test_a_monitor_that_is_gone_is_not_kept_by_the_thread_that_used_it() -> None:
    kept: list[weakref.ref[object]] = []
    for _ in range(6):
        with monitor_generation_performance("model") as monitor:
            assert monitor.recorder is not None
            kept += [weakref.ref(monitor), weakref.ref(monitor.recorder)]
    del monitor
    gc.collect()
    assert (
        sum(one() is not None for one in kept) <= 2
    )  # recorders that go when this thread has its next generation


def test_one_block_may_be_entered_by_many_threads_at_once(monitor: PerformanceMonitor) -> None:
    block = monitor.monitor_generation("shared")
    first_is_in, second_is_in, first_is_over = (threading.Event() for _ in range(3))

    def first() -> None:
        with block:
            first_is_in.set()
            second_is_in.wait(10)
        first_is_over.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with block:
        second_is_in.set()
        first_is_over.wait(10)
        assert monitor.recorder is not None
    thread.join()
    assert monitor.recorder is None


def test_validating_a_time_says_whether_it_meets_the_target(
    monitor: PerformanceMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert monitor.validate_performance_target(2.4) is True
        assert monitor.validate_performance_target(16.0) is False
    assert "16.00 s misses the target of 5.00 s: score 31.2 of 100." in caplog.text


def test_without_a_timed_step_the_metrics_have_total_by_steps(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    with monitor.monitor_generation("model", num_steps=20):
        clock.pass_seconds(16.0)
        early = monitor.current_metrics.generation_time_per_step
    assert early is None  # who knows how many steps are done
    metrics = monitor.current_metrics
    assert (metrics.generation_time_per_step, metrics.derived_time_per_step) == (0.8, 0.8)  # 16 s / 20
    assert monitor.runs[-1].stages[0].facts["performance"]["generation_time_per_step"] == 0.8
    metrics.total_generation_time = 2.4
    assert monitor.current_metrics.generation_time_per_step == pytest.approx(0.12)  # 2.4 s / 20
    metrics.generation_time_per_step = 0.1
    assert (monitor.current_metrics.generation_time_per_step, metrics.derived_time_per_step) == (0.1, None)
    current = monitor.get_performance_summary()["current_generation"]
    assert current["per_step_time"] == 0.1
    assert "per_step_time_derived" not in current


def test_a_timed_step_is_not_derived_and_a_broken_off_generation_neither(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    generate(monitor, clock, [1.0, 3.0])
    assert monitor.current_metrics.generation_time_per_step == 2.0
    assert monitor.current_metrics.derived_time_per_step is None
    with suppress(RuntimeError), monitor.monitor_generation("model", num_steps=20):
        clock.pass_seconds(16.0)
        raise RuntimeError("broken off")
    assert monitor.current_metrics.generation_time_per_step is None


def test_what_is_written_into_the_metrics_counts_until_the_next_generation(
    monitor: PerformanceMonitor, clock: FakeClock, tmp_path: Path
) -> None:
    assert monitor.current_metrics is monitor.current_metrics
    monitor.current_metrics.total_generation_time = 2.4
    monitor.current_metrics.num_inference_steps = 20
    current = monitor.get_performance_summary()["current_generation"]
    assert current["total_time"] == 2.4
    assert current["per_step_time"] == pytest.approx(0.12)  # 2.4 s / 20
    assert current["per_step_time_derived"] is True
    before = PerformanceMetrics(total_generation_time=16.0)
    factor = monitor.get_before_after_comparison(before)["summary"]["improvement_factor"]
    assert factor == pytest.approx(6.6667, abs=1e-4)  # 16 / 2.4
    monitor.export_metrics_to_json(tmp_path / "metrics.json")
    exported = json.loads((tmp_path / "metrics.json").read_text())
    assert exported["current_metrics"]["total_generation_time"] == 2.4
    assert exported["current_metrics"]["generation_time_per_step"] == pytest.approx(0.12)
    schema = resources.files("sigmascope.records.schemas").joinpath("performance.json").read_text()
    jsonschema.validate(exported, json.loads(schema))
    written = monitor.current_metrics
    generate(monitor, clock, [1.0])
    assert monitor.current_metrics is not written
    assert monitor.current_metrics.total_generation_time == pytest.approx(1.0)
    monitor.reset_metrics()
    assert monitor.current_metrics.total_generation_time == 0.0


def test_the_load_time_is_known_at_once(monitor: PerformanceMonitor, clock: FakeClock) -> None:
    def load() -> str:
        clock.pass_seconds(3.0)
        return "model"

    loaded, seconds = monitor.measure_model_load_time(load)
    assert loaded == "model"
    assert seconds == pytest.approx(3.0)
    assert monitor.current_metrics.model_load_time == seconds
    generate(monitor, clock, [1.0])
    assert monitor.current_metrics.model_load_time == seconds


def test_nothing_is_derived_for_a_generation_that_broke_off(
    monitor: PerformanceMonitor, clock: FakeClock
) -> None:
    def break_off() -> None:
        with monitor.monitor_generation(num_steps=20):
            clock.pass_seconds(1.0)
            running.append(monitor.get_performance_summary()["current_generation"]["per_step_time"])
            raise OSError("the disk is gone")

    running: list[float | None] = []
    with pytest.raises(OSError, match="the disk is gone"):
        break_off()
    assert not any(running)
    assert not monitor.get_performance_summary()["current_generation"]["per_step_time"]


def test_metrics_are_logged_from_dicts_too(
    monitor: PerformanceMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monitor.log_performance_metrics({"total_generation_time": 7.5, "model_name": "Qwen-Image"})
    assert "Qwen-Image" in caplog.text
    assert "7.5" in caplog.text
    monitor.log_performance_metrics({"total_time": 2.25, "note": "of my own"})
    assert "total_time: 2.25, note: of my own" in caplog.text


def test_ctrl_c_while_a_generation_begins_leaves_no_recorder_behind(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> list[str]:
        raise KeyboardInterrupt

    accelerator = FakeAccelerator()
    monkeypatch.setattr(accelerator, "devices", interrupt)
    monitor = PerformanceMonitor(5.0, clock=clock, sample_hz=None, accelerator=accelerator)
    with pytest.raises(KeyboardInterrupt), monitor.monitor_generation("interrupted"):
        pass
    assert current_recorder() is None
    assert monitor.current_metrics.model_name == ""
