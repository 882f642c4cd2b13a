"""A file that is this user's and this process's alone, whatever others put in its place."""

import errno
import os
from pathlib import Path

import pytest

from sigmascope.errors import ConfigError
from sigmascope.lora.journal import open_own

fcntl = pytest.importorskip("fcntl", reason="Windows has neither flock nor such links")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lora.safetensors.part"


def test_what_is_there_is_kept(path: Path) -> None:
    path.write_bytes(b"records")
    with open_own(path) as file:
        assert file.read() == b"records"


def test_no_other_user_may_read_or_write_it(path: Path) -> None:
    open_own(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_link_is_removed_and_its_target_left_alone(link: str, path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_bytes(b"years of work")
    getattr(path, link)(victim)
    with open_own(path) as file:
        file.write(b"records")
    assert victim.read_bytes() == b"years of work"
    assert path.read_bytes() == b"records"


def test_a_link_to_nowhere_makes_no_file_elsewhere(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "nowhere")
    open_own(path).close()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_pipe_is_removed(path: Path) -> None:
    os.mkfifo(path)
    open_own(path).close()
    assert path.is_file()


def test_the_file_of_another_user_is_not_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"forged")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with open_own(path) as file:
        assert file.read() == b""


def test_a_file_in_use_is_not_removed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_own(path):
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(ConfigError, match="another run is writing the same target"):
            open_own(path)
    assert path.exists()


def test_a_file_that_another_run_removes_as_it_ends_is_begun_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"records of a run that is ending")
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with open_own(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
        assert file.read() == b""


def test_a_disk_without_locks_is_no_other_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open_own(path) as file:
        assert file.write(b"records") == 7
