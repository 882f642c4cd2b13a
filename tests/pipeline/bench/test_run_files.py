from pathlib import Path

import pytest
from tests.analysis.run_sets import run

from sigmascope.errors import ConfigError, WriteError
from sigmascope.pipeline.bench import RunFiles
from sigmascope.records.performance import BenchCase


def test_runs_are_numbered_by_case(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "new" / "folder")
    cases = [BenchCase(batch=1), BenchCase(batch=2), BenchCase(batch=1)]
    assert [files.save(run([1.0]), case).name for case in cases] == [
        "b1-001.json",
        "b2-001.json",
        "b1-002.json",
    ]


def test_a_folder_with_other_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b1-001.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--output: .* holds \.json files already"):
        RunFiles(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match="cannot be made a folder"):
        RunFiles(tmp_path / "taken")


def test_folders_that_were_made_for_nothing_go(tmp_path: Path) -> None:
    RunFiles(tmp_path / "a" / "b").tidy()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_runs_stays_and_so_does_one_that_was_there(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "a")
    files.save(run([1.0]), BenchCase())
    files.tidy()
    (tmp_path / "empty").mkdir()
    RunFiles(tmp_path / "empty").tidy()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "empty"]
