import threading
from pathlib import Path

from sigmascope import load_run
from sigmascope.integrations.process_recording import PeriodicSaver
from sigmascope.monitor import Recorder
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
