import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import pytest

from sigmascope.monitor import Recorder, guard, scope
from sigmascope.monitor.peaks import reader_for
from sigmascope.monitor.utilization import MAX_SAMPLE_HZ, SAMPLER, SamplerClient

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeHost


def sampler_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sigmascope-sampler"]


def peak_rss(recorder: Recorder) -> int | None:
    peak = recorder.run().stages[0].peak
    return None if peak is None else peak.rss_bytes


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happened()


def test_the_thread_lives_from_the_first_open_stage_to_the_last() -> None:
    recorder = Recorder(sample_hz=10.0)
    assert sampler_threads() == []
    with recorder.stage("outer"):
        with recorder.stage("inner"):
            assert len(sampler_threads()) == 1
        assert len(sampler_threads()) == 1
    assert sampler_threads() == []


def test_all_recorders_share_one_thread() -> None:
    with Recorder(sample_hz=10.0), Recorder(sample_hz=2.0).stage("other"):
        assert len(sampler_threads()) == 1
    assert sampler_threads() == []


def test_no_thread_remains_when_a_stage_raises() -> None:
    recorder = Recorder(sample_hz=10.0)
    with pytest.raises(KeyboardInterrupt), recorder, recorder.stage("stopped"):
        raise KeyboardInterrupt
    assert sampler_threads() == []


def test_ctrl_c_while_the_thread_begins_leaves_nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    recorder = Recorder(sample_hz=10.0)
    with monkeypatch.context() as patched:
        patched.setattr(SAMPLER, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recorder.stage("stopped").__enter__()
    with recorder.stage("next"):
        assert len(sampler_threads()) == 1
    assert sampler_threads() == []


@pytest.mark.parametrize("where", ["memory_snapshot", "reader.read", "SAMPLER.close"])
def test_ctrl_c_while_a_stage_closes_leaves_nothing_of_ours_running(
    where: str, accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    recorder = Recorder(sample_hz=10.0, accelerator=accelerator)
    tracker = recorder._instruments.tracker
    reader = reader_for(accelerator)
    assert reader is not None
    stage = recorder.stage("denoising")
    stage.__enter__()
    if where == "memory_snapshot":
        monkeypatch.setattr(scope, "memory_snapshot", interrupted)
    elif where == "reader.read":
        monkeypatch.setattr(reader, "read", interrupted)
    else:
        close = SAMPLER.close
        monkeypatch.setattr(SAMPLER, "close", lambda *scope: (close(*scope), interrupted()))
    with pytest.raises(KeyboardInterrupt):
        stage.__exit__(None, None, None)
    monkeypatch.undo()
    assert sampler_threads() == []
    assert (tracker._open, reader.listeners) == ([], [])
    assert recorder._instruments.sampled._open == []
    assert recorder._extent.open == set()
    assert not recorder.run().complete


def test_a_stage_ends_also_where_what_closes_it_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(sample_hz=10.0)
    entered = recorder.stage("denoising").__enter__()

    def fails_once(kept: bool) -> NoReturn:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(guard, "keeping_words", fails_once)
    entered.__exit__(None, None, None)
    assert sampler_threads() == []
    assert recorder.run().stages[0].seconds > 0
    assert recorder.run().complete


def test_without_a_rate_there_is_no_thread() -> None:
    for rate in (None, 0.0):
        with Recorder(sample_hz=rate).stage("quiet"):
            assert sampler_threads() == []


@pytest.mark.parametrize("rate", [1e-12, 5e-324])
def test_a_rate_of_once_in_centuries_waits_no_longer_than_a_thread_can(rate: float) -> None:
    client = SamplerClient(lambda: None, rate)
    assert client.period_seconds <= threading.TIMEOUT_MAX
    with Recorder(sample_hz=rate).stage("quiet"):
        assert sampler_threads() == ["sigmascope-sampler"]
        time.sleep(0.02)
        assert sampler_threads() == ["sigmascope-sampler"]


def test_it_never_samples_more_than_ten_times_a_second() -> None:
    assert SamplerClient(lambda: None, 1000.0).period_seconds == 1.0 / MAX_SAMPLE_HZ == 0.1


def test_it_sees_a_peak_between_the_boundaries(host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=10.0)
    usual = host.rss
    with recorder.stage("latent_decoding"):
        host.rss = 3 * usual
        for _ in range(2):  # the second reading begins when the first has been taken over
            host.was_read.clear()
            assert host.was_read.wait(20)
        host.rss = usual
    assert peak_rss(recorder) == 3 * usual


def test_a_sampler_that_fails_is_switched_off_and_its_thread_still_ends(
    accelerator: "FakeAccelerator", monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(sample_hz=10.0, accelerator=accelerator)
    with recorder.stage("watched"):
        monkeypatch.setattr(recorder._instruments.tracker, "look", lambda *_: 1 / 0)
        wait_until(lambda: "peaks" in recorder._instruments.guard.reasons)
    assert sampler_threads() == []
    assert "ZeroDivisionError" in recorder.run().unavailable["peaks"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on_recording_and_ends() -> None:
    recorder = Recorder(sample_hz=10.0)
    with recorder.stage("before"):
        child = os.fork()
        if child == 0:
            try:
                before = sampler_threads()
                with recorder.step():
                    pass
                with Recorder(sample_hz=10.0).stage("inside"):
                    inside = sampler_threads()
                after = sampler_threads()
                os._exit(0 if (len(before), len(inside), len(after)) == (0, 1, 0) else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_it_never_keeps_the_process_alive() -> None:
    script = """
from sigmascope.monitor import Recorder
Recorder(sample_hz=10.0).stage("never closed").__enter__()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_sample_that_fails_stops_nobody_else_s(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def fail() -> None:
        seen.append("failing")
        raise ZeroDivisionError

    failing, sound = SamplerClient(fail, 10.0), SamplerClient(lambda: seen.append("sound"), 10.0)
    SAMPLER.open(failing, failing)
    SAMPLER.open(sound, sound)
    try:
        wait_until(lambda: seen.count("sound") > 1)
    finally:
        SAMPLER.close(failing, failing)
        SAMPLER.close(sound, sound)
    assert seen.count("failing") == 1
    assert "A sampler is switched off: ZeroDivisionError" in caplog.text
