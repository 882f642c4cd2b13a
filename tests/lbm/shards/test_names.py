from pathlib import Path

import pytest

from sigmascope.errors import ConfigError, FileError
from sigmascope.lbm.shards import expand_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train-000.tar", "train-001.tar", "train-002.tar.gz", "notes.txt"):
        (tmp_path / name).touch()
    return tmp_path


def names(patterns: list[str], *, allow_pipe: bool = False) -> list[str]:
    return [Path(shard).name for shard in expand_shards(patterns, allow_pipe=allow_pipe)]


def test_braces_expand_in_order(folder: Path) -> None:
    assert names([f"{folder}/train-{{001..000}}.tar"]) == ["train-001.tar", "train-000.tar"]
    assert names([f"{folder}/train-{{000,001}}.tar"]) == ["train-000.tar", "train-001.tar"]


def test_a_glob_gives_its_files_sorted(folder: Path) -> None:
    assert names([f"{folder}/train-*"]) == ["train-000.tar", "train-001.tar", "train-002.tar.gz"]


def test_a_glob_passes_over_folders(folder: Path) -> None:
    (folder / "train-old").mkdir()
    assert names([f"{folder}/train-*"]) == ["train-000.tar", "train-001.tar", "train-002.tar.gz"]


def test_a_folder_gives_its_tar_files(folder: Path) -> None:
    assert names([str(folder)]) == ["train-000.tar", "train-001.tar", "train-002.tar.gz"]


def test_home_addresses_and_joined_patterns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert names(["~/train-000.tar"]) == ["train-000.tar"]
    assert names([f"file://{folder}/train-001.tar"]) == ["train-001.tar"]
    assert names([f"{folder}/train-001.tar::{folder}/train-000.tar"]) == ["train-001.tar", "train-000.tar"]


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path: Path) -> None:
    (tmp_path / "set[1].tar").touch()
    assert names([f"{tmp_path}/set[1].tar"]) == ["set[1].tar"]


def test_a_missing_shard_names_the_file_and_the_pattern(folder: Path) -> None:
    pattern = f"{folder}/train-{{000..003}}.tar"
    with pytest.raises(FileError) as error:
        expand_shards([pattern])
    assert error.value.path == folder / "train-002.tar"
    assert pattern in error.value.message


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{folder}/valid-*.tar", "no file matches"),
        ("{folder}/empty", "holds no .tar file"),
        ("https://host/train.tar", "is not a local file"),
        ("hf://datasets/x/train.tar", "is not a local file"),
        ("pipe:cat x.tar", "commands run only with --allow_pipe"),
        ("${{MISSING_VARIABLE}}/x.tar", "cannot be expanded"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_next_step(folder: Path, pattern: str, words: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=words) as error:
        expand_shards([pattern.format(folder=folder)])
    assert error.value.hint


def test_no_pattern_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no shards are named"):
        expand_shards([])


def test_commands_pass_when_allowed_and_say_something() -> None:
    assert expand_shards(["pipe:cat {a,b}.tar"], allow_pipe=True) == ("pipe:cat a.tar", "pipe:cat b.tar")
    with pytest.raises(ConfigError, match="no command"):
        expand_shards(["pipe: "], allow_pipe=True)
