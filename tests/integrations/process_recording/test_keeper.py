import threading
from pathlib import Path

import pytest
from tests.integrations.diffusers.marks import left_behind, staying

from sigmascope import load_run
from sigmascope.integrations.autostart import say
from sigmascope.integrations.diffusers.watch import Watch
from sigmascope.integrations.imports import ImportTimes
from sigmascope.integrations.process_recording import OlderGenerations, PeriodicSaver, Recording
from sigmascope.integrations.watch_settings import Settings
from sigmascope.monitor import Recorder, current_recorder
from sigmascope.records.run import Run


def test_what_is_known_so_far_is_kept(tmp_path: Path) -> None:
    recorder, asked = Recorder("long", sample_hz=None), threading.Event()

    def record() -> Run:
        if (tmp_path / "run.json").exists():
            asked.set()
        return recorder.run()

    with recorder, recorder.stage("denoising"):
        keeper = PeriodicSaver(record, tmp_path / "run.json", seconds=0.001)
        keeper.start()
        assert asked.wait(30)
        keeper.stop()
        kept = load_run(tmp_path / "run.json")
    assert not kept.complete
    assert kept.stages[0].name == "denoising"


def test_a_run_without_stages_is_not_kept(tmp_path: Path) -> None:
    PeriodicSaver(Recorder(sample_hz=None).run, tmp_path / "run.json").keep()
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_cannot_be_had_is_no_error(tmp_path: Path) -> None:
    def fail() -> Run:
        raise AttributeError("nothing has been recorded")

    PeriodicSaver(fail, tmp_path / "run.json").keep()
    assert list(tmp_path.iterdir()) == []


def test_the_thread_is_gone_afterwards(tmp_path: Path) -> None:
    keeper = PeriodicSaver(Recorder(sample_hz=None).run, tmp_path / "run.json")
    keeper.start()
    assert "sigmascope-keeper" in [thread.name for thread in threading.enumerate()]
    keeper.stop()
    assert "sigmascope-keeper" not in [thread.name for thread in threading.enumerate()]


def test_ctrl_c_while_a_recording_ends_leaves_no_watch_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    threads = {*threading.enumerate()}
    recording = Recording(Settings(output="run.json"), str(tmp_path), say)
    monkeypatch.setattr(OlderGenerations, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recording.end()
    assert left_behind() == []
    assert current_recorder() is None
    assert staying(threads) == set()


@pytest.mark.parametrize(
    ("owner", "method", "failure"),
    [(PeriodicSaver, "start", OSError), (Watch, "begin_at", KeyboardInterrupt)],
)
def test_a_recording_that_cannot_begin_leaves_no_watch_behind(
    owner: type, method: str, failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise failure("just now")

    monkeypatch.setattr(owner, method, refuse)
    before, threads = left_behind(), {*threading.enumerate()}
    with pytest.raises(failure, match="just now"):
        Recording(Settings(output="run.json"), str(tmp_path), say, times=ImportTimes())
    assert left_behind() == before
    assert staying(threads) == set()
