import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sigmascope.files import atomic_path, remove_leftovers, temporary_name

fcntl = pytest.importorskip("fcntl", reason="Windows has no flock")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def leave(target: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid)
        file = target.with_name(temporary_name(target))
    file.write_bytes(b"half")
    return file


def test_a_dead_process_s_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "lora.safetensors"
    left = leave(target, dead_pid(), monkeypatch)
    assert remove_leftovers(target) == [left]
    assert list(tmp_path.iterdir()) == []


def test_a_living_process_s_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "lora.safetensors"
    left = leave(target, os.getpid(), monkeypatch)
    assert remove_leftovers(target) == []
    assert left.exists()


def test_another_target_s_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = leave(tmp_path / "other.safetensors", dead_pid(), monkeypatch)
    assert remove_leftovers(tmp_path / "lora.safetensors") == []
    assert left.exists()


def test_another_machine_s_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "lora.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr("platform.node", lambda: "elsewhere")
        left = leave(target, dead_pid(), monkeypatch)
    assert remove_leftovers(target) == []
    assert left.exists()


def test_a_name_with_special_characters_is_taken_literally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a+b (1).[x]"
    left = leave(target, dead_pid(), monkeypatch)
    assert remove_leftovers(target) == [left]


def test_long_names_stay_within_the_limit_of_file_systems(tmp_path: Path) -> None:
    assert len(temporary_name(tmp_path / ("n" * 240 + ".safetensors"))) < 255


def test_a_live_writer_s_file_stays_where_its_process_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another container, whose process numbers mean nothing here."""
    target = tmp_path / "lora.safetensors"
    unseen = dead_pid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: unseen)
        writing = atomic_path(target)
        temporary = writing.__enter__()
    assert f"-{unseen}-" in temporary.name
    assert remove_leftovers(target) == []
    temporary.write_bytes(b"whole")
    writing.__exit__(None, None, None)
    assert target.read_bytes() == b"whole"


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is of POSIX")
def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    target = tmp_path / "lora.safetensors"
    code = (
        "import os, signal; from sigmascope.files import atomic_path\n"
        f"with atomic_path({str(target)!r}): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    assert remove_leftovers(target) == [left]


def test_without_locks_a_leftover_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "lora.safetensors"
    left = leave(target, dead_pid(), monkeypatch)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert remove_leftovers(target) == []
    yesterday = time.time() - 25 * 3600
    os.utime(left, (yesterday, yesterday))
    assert remove_leftovers(target) == [left]
