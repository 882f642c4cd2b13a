"""Whatever of ours fails, the watched program does not notice, and the record says what was lost."""

import logging
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch

from sigmascope.monitor import Recorder
from sigmascope.records.run import Run

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator

FUNCTIONS = {
    "scope.accelerator_of_this_process": "accelerator",
    "scope.process_rss_bytes": "process_rss",
    "scope.process_peak_rss_bytes": "process_peak_rss",
    "scope.system_memory": "system_memory",
    "scope.memory_snapshot": "memory_snapshot",
    "scope.host_facts": "host_facts",
    "scope.SAMPLER.open": "sampler",
    "scope.reader_for": "accelerator_peak",
    "recorder.tensor_facts": "tensors.latent",
    "recorder.module_facts": "modules.unet",
    "recorder.as_json": "facts.seed",
    "guard.exception_details": "exception_details",
}
METHODS = {
    "devices": "accelerator_peak",
    "current_device": "gpu_timing",
    "memory": "memory_snapshot",
    "allocated_and_peak": "accelerator_peak",
    "unavailable": "accelerator_reasons",
    "reset_peak": "accelerator_peak",
    "new_event": "gpu_timing",
    "facts": "host_facts",
}


def watched_work(recorder: Recorder) -> list[int]:
    """Stand for a pipeline: three steps, and a stage whose failure it deals with."""
    done = []
    with recorder:
        with recorder.stage("denoising") as denoising:
            for index in range(3):
                with recorder.step():
                    done.append(index)
            denoising.tensor("latent", torch.zeros(2))
            denoising.module("unet", torch.nn.Identity())
            denoising.fact("seed", 7)
        try:
            with recorder.stage("latent_decoding"):
                raise MemoryError
        except MemoryError:
            done.append(3)
    return done


def lost(run: Run) -> dict[str, str]:
    reasons = dict(run.unavailable)
    for stage in run.walk():
        reasons |= stage.unavailable
    return reasons


def check(run: Run) -> None:
    assert run.complete
    assert [stage.success for stage in run.stages] == [True, False]
    assert len(run.stages[0].steps) == 3


@pytest.mark.parametrize(("function", "instrument"), FUNCTIONS.items())
def test_a_probe_that_raises_costs_its_own_facts_and_one_log_line(
    function: str, instrument: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise OSError("it is broken")

    monkeypatch.setattr("sigmascope.monitor.scope._host_facts", {})
    monkeypatch.setattr(f"sigmascope.monitor.{function}", broken)
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(sample_hz=10.0)
        assert watched_work(recorder) == [0, 1, 2, 3]
        run = recorder.run()
    check(run)
    assert lost(run)[instrument] == "OSError: it is broken"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("method", "instrument"), METHODS.items())
def test_an_accelerator_that_raises_costs_its_own_facts_and_one_log_line_each(
    method: str, instrument: str, accelerator: "FakeAccelerator", caplog: pytest.LogCaptureFixture
) -> None:
    accelerator.fails = method
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(sample_hz=None, accelerator=accelerator)
        assert watched_work(recorder) == [0, 1, 2, 3]
        run = recorder.run()
    check(run)
    assert lost(run)[instrument] == f"OSError: {method} is broken"
    logged = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert len(logged) == len(set(logged))


def test_an_accelerator_that_fails_in_the_middle_leaves_the_other_columns_whole(
    accelerator: "FakeAccelerator",
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        for fails in (None, "allocated_and_peak", None):
            accelerator.fails = fails
            with recorder.step():
                accelerator.allocate(1)
    steps = recorder.run().stages[0].steps
    assert len(steps.seconds) == len(steps.rss_bytes) == 3
    assert steps.allocated_bytes == (1, None, None)


def test_a_column_that_was_never_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.monitor.scope.process_rss_bytes", lambda: 1 / 0)
    recorder = Recorder(sample_hz=None)
    with recorder.stage("denoising"), recorder.step():
        pass
    steps = recorder.run().stages[0].steps
    assert steps.rss_bytes == ()
    assert steps.unavailable["rss_bytes"] == "ZeroDivisionError: division by zero"


def test_a_fact_whose_text_raises_costs_only_itself(recorder: Recorder) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    with recorder.stage("denoising") as stage:
        stage.fact("odd", Odd())
        stage.fact("seed", 7)
    found = recorder.run().stages[0]
    assert found.facts.keys() - {"processor"} == {"seed"}
    assert found.unavailable["facts.odd"] == "ValueError: no text"


def test_an_exception_whose_text_raises_is_still_recorded(recorder: Recorder) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    error = OddError()
    with pytest.raises(OddError) as caught, recorder.stage("denoising"):
        raise error
    assert caught.value is error
    [found] = recorder.run().stages
    assert not found.success
    assert found.error == "OddError: (its message cannot be read)"


def test_a_log_handler_that_raises_does_not_reach_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no log")

    monkeypatch.setattr("sigmascope.monitor.scope.memory_snapshot", lambda _: 1 / 0)
    handler = Broken()
    logging.getLogger("sigmascope").addHandler(handler)
    try:
        assert watched_work(Recorder(sample_hz=None)) == [0, 1, 2, 3]
    finally:
        logging.getLogger("sigmascope").removeHandler(handler)


def test_a_stage_whose_path_cannot_be_made_is_recorded_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> NoReturn:
        raise MemoryError("planted")

    monkeypatch.setattr("sigmascope.monitor.recorder.stage_path", broken)
    monkeypatch.setattr("sigmascope.monitor.scope.stage_path", broken)
    recorder = Recorder(sample_hz=None)
    assert watched_work(recorder) == [0, 1, 2, 3]
    assert [stage.name for stage in recorder.run().stages] == ["denoising", "latent_decoding"]
