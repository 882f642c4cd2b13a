"""The files of a process that lives long: a record of bounded size, and parts that are written once."""

from pathlib import Path

import pytest
from tests.integrations.programs import watched, write

from sigmascope import load_run
from sigmascope.errors import ConfigError, WriteError
from sigmascope.integrations.process_recording import MOST_PARTS, OlderGenerations, PeriodicSaver, kept_of
from sigmascope.integrations.watch_settings import Settings
from sigmascope.monitor import Recorder


def generate(recorder: Recorder, times: int) -> None:
    for _ in range(times):
        with recorder.stage("generation"):
            pass


def starts_in(*paths: Path) -> list[float]:
    return [stage.started_seconds for path in paths for stage in load_run(path).stages]


@pytest.fixture
def recorder() -> Recorder:
    """One that keeps 3, and so many more until they are taken."""
    recorder = Recorder("server", sample_hz=None, keep=3)
    recorder.spare = 9
    return recorder


def test_each_part_is_written_once_and_all_generations_lie_in_one_file(
    recorder: Recorder, tmp_path: Path
) -> None:
    parts = OlderGenerations(recorder.take_older, tmp_path / "run.json")
    keeper = PeriodicSaver(recorder.run, tmp_path / "run.json", before=lambda: parts.write(3))
    written: dict[Path, tuple[int, int]] = {}
    with recorder:
        for _ in range(10):
            generate(recorder, 2)
            keeper.keep()
            for path in (tmp_path / "run.parts").glob("*"):
                now = (path.stat().st_ino, path.stat().st_mtime_ns)
                assert written.setdefault(path, now) == now
    files = sorted(written)
    assert [path.name for path in files] == ["0001.json", "0002.json", "0003.json", "0004.json"]
    starts = starts_in(*files, tmp_path / "run.json")
    assert len(starts) == 20
    assert starts == sorted(set(starts))
    live = load_run(tmp_path / "run.json")
    assert {load_run(path).id for path in files} == {live.id}
    assert live.folded is not None
    assert live.folded.generations == sum(len(load_run(path).stages) for path in files)


def test_a_run_that_is_shorter_has_no_parts(recorder: Recorder, tmp_path: Path) -> None:
    parts = OlderGenerations(recorder.take_older, tmp_path / "run.json")
    generate(recorder, 3)
    parts.write()
    assert not parts.folder.exists()


def test_the_last_parts_stay(recorder: Recorder, tmp_path: Path) -> None:
    parts = OlderGenerations(recorder.take_older, tmp_path / "run.json")
    for _ in range(MOST_PARTS + 4):
        generate(recorder, 3)
        parts.write()
    numbers = [int(path.stem) for path in sorted(parts.folder.iterdir())]
    assert numbers == list(range(4, MOST_PARTS + 4))


def test_parts_of_an_earlier_run_of_that_name_go_with_its_record(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "run.parts").mkdir()
    for name in ("0001.json", "0007.json", "notes.txt"):
        (tmp_path / "run.parts" / name).write_text("earlier")
    generate(recorder, 5)
    OlderGenerations(recorder.take_older, tmp_path / "run.json").write()
    assert sorted(path.name for path in (tmp_path / "run.parts").iterdir()) == ["0001.json", "notes.txt"]
    assert len(load_run(tmp_path / "run.parts" / "0001.json").stages) == 2


def test_a_part_that_cannot_be_written_is_in_the_sums(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "run.parts").write_text("a file in the folder's place")
    parts = OlderGenerations(recorder.take_older, tmp_path / "run.json")
    generate(recorder, 5)
    with pytest.raises(WriteError):
        parts.write()
    PeriodicSaver(recorder.run, tmp_path / "run.json", before=parts.write).keep()
    folded = load_run(tmp_path / "run.json").folded
    assert folded is not None
    assert folded.generations == 2


@pytest.mark.parametrize("told", ["0", "-1", "2.5", "many"])
def test_a_number_that_is_none_is_refused_by_the_variable_s_name(told: str) -> None:
    with pytest.raises(
        ConfigError, match=f"SIGMASCOPE_KEEP_GENERATIONS={told} is not a whole number above 0"
    ):
        kept_of(Settings(keep_generations=told))
    assert (kept_of(Settings()), kept_of(Settings(keep_generations="7"))) == (100, 7)


SERVES = """
import itertools, os, signal, sys
from sigmascope.integrations.process_recording import PeriodicSaver
PeriodicSaver.__init__.__defaults__ = (0.01,)
import sigmascope
for number in itertools.count():
    with sigmascope.stage("generation"), sigmascope.stage("denoising"), sigmascope.step():
        pass
    if ENDS:
        break
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    killed = SERVES.replace(
        "if ENDS:",
        "if os.path.exists('run.parts/0004.json'):\n        os.kill(os.getpid(), signal.SIGKILL)\n    if False:",
    )
    write(tmp_path, "script.py", killed)
    done = watched(["script.py"], tmp_path, Settings(output="run.json", quiet="1", keep_generations="5"))
    assert done.code == -9
    files = sorted((tmp_path / "run.parts").glob("*.json"))
    assert [path.name for path in files[:4]] == ["0001.json", "0002.json", "0003.json", "0004.json"]
    assert all(5 <= len(load_run(path).stages) <= 20 for path in files)
    assert not load_run(tmp_path / "run.json").complete
    starts = starts_in(*files)
    assert starts == sorted(set(starts))


@pytest.mark.slow
def test_a_process_that_ends_tells_where_its_earlier_generations_are(tmp_path: Path) -> None:
    write(tmp_path, "script.py", SERVES.replace("if ENDS:", "if number == 11:"))
    settings = Settings(output="run.json", quiet="1", launched="1", keep_generations="5")
    done = watched(["script.py"], tmp_path, settings)
    run, part = load_run(tmp_path / "run.json"), load_run(tmp_path / "run.parts" / "0001.json")
    assert f"earlier generations are in {tmp_path / 'run.parts'}" in done.told
    assert (len(run.stages), run.complete) == (5, True)
    assert run.folded is not None
    assert (run.folded.generations, run.folded.stages["generation/denoising"].steps) == (7, 7)
    assert len(part.stages) in (5, 6, 7)
