import gc
import math
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from sigmascope import load_run
from sigmascope.monitor import Recorder

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost


def fail(recorder: Recorder, error: BaseException) -> None:
    with recorder, recorder.stage("outer"), recorder.stage("inner"):
        raise error


def test_stages_nest_and_have_their_start_and_length(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder("portrait", sample_hz=None, clock=clock)
    clock.pass_seconds(50)
    with recorder.stage("outer"):
        clock.pass_seconds(1)
        with recorder.stage("inner"):
            clock.pass_seconds(2)
        clock.pass_seconds(4)
    clock.pass_seconds(8)
    with recorder.stage("second"):
        clock.pass_seconds(16)
    clock.pass_seconds(32)
    run = recorder.run()
    assert [(s.name, s.started_seconds, s.seconds) for s in run.walk()] == [
        ("outer", 0.0, 7.0),
        ("inner", 1.0, 2.0),
        ("second", 15.0, 16.0),
    ]
    assert (run.name, run.seconds, run.complete) == ("portrait", 31.0, True)


def test_the_run_lasts_as_long_as_the_block_of_its_recorder(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock)
    with recorder:
        clock.pass_seconds(1)
        with recorder.stage("only"):
            clock.pass_seconds(1)
        clock.pass_seconds(1)
    clock.pass_seconds(1)
    run = recorder.run()
    assert (run.seconds, run.stages[0].started_seconds) == (3.0, 1.0)


def test_started_at_is_the_wall_clock_in_utc_when_the_first_stage_began(recorder: Recorder) -> None:
    before = datetime.now(UTC)
    with recorder.stage("first"):
        after = datetime.now(UTC)
    started = datetime.fromisoformat(recorder.run().started_at)
    assert (before - started).total_seconds() < 0.05
    assert (started - after).total_seconds() < 0.05


def test_a_stage_has_the_memory_before_and_after_it(host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None)
    host.rss = 10
    with recorder.stage("model_loading"):
        host.rss = 30
    memory = recorder.run().stages[0].memory
    assert memory is not None
    assert (memory.baseline.process_rss_bytes, memory.current.process_rss_bytes) == (10, 30)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_the_hosts_exception_passes_unchanged_and_is_recorded(
    recorder: Recorder, error: BaseException
) -> None:
    cause = OSError("the disk")
    error.__cause__ = cause
    with pytest.raises(type(error)) as caught:
        fail(recorder, error)
    assert caught.value is error
    assert error.__cause__ is cause
    assert [entry.name for entry in caught.traceback] == [
        "test_the_hosts_exception_passes_unchanged_and_is_recorded",
        "fail",
    ]
    run = recorder.run()
    assert not run.complete
    for stage in run.walk():
        assert not stage.success
        assert stage.error == (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        assert stage.exception_details is not None
        assert stage.exception_details.type == type(error).__name__
        assert stage.exception_details.message == str(error)
        assert "OSError: the disk" in stage.exception_details.traceback
        assert "raise error" in stage.exception_details.traceback


def test_a_recorded_exception_keeps_nothing_alive(recorder: Recorder) -> None:
    def work() -> "weakref.ref[torch.Tensor]":
        latent = torch.zeros(4)
        with recorder.stage("denoising"):
            recorder.stage("never entered").tensor("latent", latent)
            raise RuntimeError(weakref.ref(latent))

    with pytest.raises(RuntimeError) as caught:
        work()
    latent: weakref.ref[torch.Tensor] = caught.value.args[0]
    del caught
    gc.collect()
    assert latent() is None


def test_a_failure_that_the_host_deals_with_leaves_the_run_complete(recorder: Recorder) -> None:
    with recorder:
        with pytest.raises(MemoryError), recorder.stage("latent_encoding"):
            raise MemoryError
        with recorder.stage("latent_encoding"):
            pass
    run = recorder.run()
    assert run.complete
    assert [stage.success for stage in run.stages] == [False, True]


def test_without_a_block_a_run_that_ends_in_a_failed_stage_is_not_complete(recorder: Recorder) -> None:
    with pytest.raises(MemoryError), recorder.stage("latent_encoding"):
        raise MemoryError
    assert not recorder.run().complete
    with recorder.stage("latent_encoding"):
        pass
    assert recorder.run().complete


def test_a_run_read_while_a_stage_is_open_says_so(clock: "FakeClock", host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None, clock=clock)
    with recorder.stage("denoising"):
        clock.pass_seconds(2)
        run = recorder.run()
        clock.pass_seconds(2)
    assert not run.complete
    assert (run.seconds, run.stages[0].seconds, "end" in run.stages[0].unavailable) == (2.0, 2.0, True)
    assert recorder.run().complete
    assert run.stages[0].seconds == 2.0


def test_a_recorder_that_saw_nothing_gives_an_empty_run(recorder: Recorder) -> None:
    run = recorder.run()
    assert (run.stages, run.seconds, run.complete) == ((), 0.0, True)


def test_facts_are_read_at_once_and_keep_nothing_alive(recorder: Recorder) -> None:
    latent = torch.arange(4.0)
    module = torch.nn.Linear(3, 2)
    strategies = ["Direct"]
    with recorder.stage("latent_encoding") as stage:
        stage.tensor("latent", latent)
        stage.module("vae", module)
        stage.fact("strategies", strategies)
    alive: list[weakref.ref[object]] = [weakref.ref(latent), weakref.ref(module)]
    latent.add_(100)
    strategies.append("Tiled")
    del latent, module
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    found = recorder.run().stages[0]
    assert (found.tensors["latent"].shape, found.tensors["latent"].max) == ((4,), 3.0)
    assert (found.modules["vae"].class_name, found.modules["vae"].parameters) == ("Linear", 8)
    assert found.facts["strategies"] == ["Direct"]


def test_facts_told_after_a_stage_belong_to_it(recorder: Recorder) -> None:
    with recorder.stage("latent_encoding") as stage:
        pass
    stage.fact("strategy", "Direct")
    assert recorder.run().stages[0].facts["strategy"] == "Direct"


def test_a_stage_entered_again_is_a_new_stage(recorder: Recorder) -> None:
    stage = recorder.stage("text_encoding")
    for prompt in ("positive", "negative"):
        with stage:
            stage.fact("prompt", prompt)
    assert [found.facts["prompt"] for found in recorder.run().stages] == ["positive", "negative"]


def test_a_stage_entered_inside_itself_nests(recorder: Recorder) -> None:
    stage = recorder.stage("pass")
    with stage:
        with stage:
            stage.fact("depth", 2)
        stage.fact("depth", 1)
    [outer] = recorder.run().stages
    assert (outer.facts["depth"], outer.children[0].facts["depth"]) == (1, 2)


def test_facts_of_the_run(recorder: Recorder) -> None:
    recorder.fact("seed", 7)
    assert recorder.run().facts == {"seed": 7}


def test_host_facts_are_in_the_run(accelerator: "FakeAccelerator") -> None:
    run = Recorder(sample_hz=None, accelerator=accelerator).run()
    assert run.host is not None
    # The index's wheel of CUDA has its build, such as "+cu130", only in the module.
    assert run.host.libraries["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert [device.name for device in run.host.accelerators] == ["Fake"]


def test_a_run_survives_saving(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"):
        fail(recorder, ValueError("bad"))
    with recorder.stage("after") as stage, recorder.step():
        stage.fact("odd", {"infinite": [1.5, -math.inf], "path": tmp_path})
        stage.tensor("latent", torch.zeros(2, 3))
    run = recorder.run()
    run.save(tmp_path / "run.json")
    assert load_run(tmp_path / "run.json") == run
