import os
import subprocess
import sys
from pathlib import Path

import pytest

from sigmascope.files import remove_leftovers, temporary_name


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
