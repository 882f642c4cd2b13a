import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.lora.journal import Journal


def fill(journal: Journal, *names: str) -> None:
    for number, name in enumerate(names):
        journal.append(name, {"up": torch.full((3, 2), float(number))}, {"number": number})


def copy_of(journal: Journal) -> bytes:
    return journal.path.read_bytes()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "lora.safetensors"


def kept(target: Path, *names: str, job: str = "job") -> Path:
    """A journal as a killed process leaves it."""
    with Journal(target, job) as journal:
        fill(journal, *names)
        content = copy_of(journal)
    path = target.with_name(f".{target.name}.part")
    path.write_bytes(content)
    return path


def test_what_is_appended_is_read_back(target: Path) -> None:
    with Journal(target, "job") as journal:
        journal.append("a", {"x": torch.tensor([1.5, float("nan")]).bfloat16()}, {"rank": 4, "norm": 0.1})
        tensors, facts = journal.read("a")
    assert tensors["x"].dtype == torch.bfloat16
    assert tensors["x"][0] == 1.5
    assert tensors["x"].isnan().tolist() == [False, True]
    assert facts == {"rank": 4, "norm": 0.1}


def test_nothing_is_left_after_the_block_whatever_ends_it(target: Path) -> None:
    with Journal(target, "job") as journal:
        fill(journal, "a")
    assert list(target.parent.iterdir()) == []
    journal = Journal(target, "job")
    with pytest.raises(KeyError), journal:
        journal.read("never written")
    assert list(target.parent.iterdir()) == []


def test_the_same_job_goes_on(target: Path) -> None:
    kept(target, "a", "b")
    with Journal(target, "job") as journal:
        assert len(journal) == 2
        assert journal.read("b")[1] == {"number": 1}
        fill(journal, "c")
        assert journal.read("a")[1] == {"number": 0}
        assert "c" in journal


def test_another_job_starts_anew(target: Path) -> None:
    kept(target, "a", job="rank 32")
    with Journal(target, "rank 16") as journal:
        assert len(journal) == 0


def test_a_later_record_replaces_an_earlier_one(target: Path) -> None:
    path = kept(target, "a", "b", "a")
    with Journal(target, "job") as journal:
        assert len(journal) == 2
        assert journal.read("a")[1] == {"number": 2}
    assert not path.exists()


def test_a_journal_cut_anywhere_keeps_its_whole_records(target: Path) -> None:
    path = kept(target, "a", "b", "c")
    content = path.read_bytes()
    found = []
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with Journal(target, "job") as journal:
            found.append(len(journal))
            fill(journal, "d")
            assert journal.read("d")[1] == {"number": 0}
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}


def test_a_flipped_bit_ends_the_journal_there(target: Path) -> None:
    path = kept(target, "a", "b", "c")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with Journal(target, "job") as journal:
        assert len(journal) < 3


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 100, bytes(500)])
def test_a_file_that_is_no_journal_is_begun_anew(target: Path, content: bytes) -> None:
    target.with_name(f".{target.name}.part").write_bytes(content)
    with Journal(target, "job") as journal:
        fill(journal, "a")
        assert journal.read("a")[1] == {"number": 0}


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no flock")
def test_two_processes_at_one_target_are_refused(target: Path) -> None:
    code = (
        "import sys, pathlib; from sigmascope.lora.journal import Journal\n"
        "with Journal(pathlib.Path(sys.argv[1]), 'job'): print('in', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match="another run"), Journal(target, "job"):
            pass
        other.communicate("")
    with Journal(target, "job") as journal:
        assert len(journal) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_write_error(target: Path) -> None:
    with Journal(target, "job") as journal, Path("/dev/full").open("r+b", buffering=0) as full:
        os.dup2(full.fileno(), journal._file.fileno())
        with pytest.raises(WriteError, match="No space left"):
            fill(journal, "a")


def test_a_folder_that_is_not_there_is_a_write_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError), Journal(tmp_path / "no" / "lora.safetensors", "job"):
        pass


def test_a_record_that_is_damaged_while_the_job_runs_is_named(target: Path) -> None:
    with Journal(target, "job") as journal:
        fill(journal, "a")
        journal.path.write_bytes(b"")
        with pytest.raises(CheckpointError, match="has lost a"):
            journal.read("a")


def test_an_entry_that_cannot_be_removed_hides_no_other_error(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    journal = Journal(target, "job")
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(KeyError, match="never written"), journal:
        journal.read("never written")
    assert "cannot be removed" in caplog.text


def test_nothing_is_left_where_not_even_the_first_record_can_be_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Journal, "_content_at", refuse)
    with pytest.raises(WriteError, match="No space left"), Journal(target, "job"):
        pass
    assert list(target.parent.iterdir()) == []
