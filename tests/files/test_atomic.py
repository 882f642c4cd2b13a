import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from sigmascope.errors import WriteError
from sigmascope.files import atomic_path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_half_and_raise(target: Path, error: BaseException) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        raise error


def test_the_target_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with atomic_path(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert names(tmp_path) == ["run.json"]


def test_the_temporary_file_lies_beside_the_target_hidden_and_with_its_suffix(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "picture.png") as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".")
        assert temporary.suffix == ".png"


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "run.json"
    target.write_text("old")
    with pytest.raises(type(error)):
        write_half_and_raise(target, error)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists what is open")
def test_ctrl_c_while_the_temporary_file_is_removed_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "run.json"):
        pass
    opened = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [name for name in opened if str(tmp_path) in name]


def test_a_full_disk_is_a_write_error_that_names_the_target(tmp_path: Path) -> None:
    target = tmp_path / "lora.safetensors"
    with (
        pytest.raises(WriteError, match=r"lora\.safetensors.*No space left.*Free some space"),
        atomic_path(target),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_an_os_error_about_another_file_passes_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "out.bin"):
        (tmp_path / "input.bin").read_bytes()
    assert names(tmp_path) == []


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "lora" / "checkpoints" / "run.json") as temporary:
        temporary.write_text("{}")
    assert (tmp_path / "lora" / "checkpoints" / "run.json").read_text() == "{}"


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match="taken"), atomic_path(tmp_path / "taken" / "run.json"):
        pass
    with pytest.raises(WriteError, match="taken"), atomic_path(tmp_path / "taken" / "deeper" / "run.json"):
        pass
    assert names(tmp_path) == ["taken"]


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="is a folder"), atomic_path(tmp_path):
        pass


@pytest.mark.skipif(os.name == "nt", reason="POSIX devices")
def test_a_device_is_never_replaced() -> None:
    with pytest.raises(WriteError, match="not a regular file"), atomic_path("/dev/null"):
        pass


def test_a_write_protected_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.json"
    target.touch(mode=0o444)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root would be let in
    with pytest.raises(WriteError, match="write-protected"), atomic_path(target):
        pass


def test_a_write_protected_folder_is_a_write_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WriteError, match="Permission denied"), atomic_path(tmp_path / "run.json"):
        pass


@pytest.mark.skipif(os.name == "nt", reason="POSIX permission bits")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_bits_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with atomic_path(tmp_path / "new") as temporary:
            temporary.write_bytes(b"x")
    finally:
        os.umask(before)
    assert permissions(tmp_path / "new") == 0o666 & ~mask


@pytest.mark.skipif(os.name == "nt", reason="POSIX permission bits")
def test_a_replaced_file_keeps_its_bits_even_when_the_writer_makes_a_new_file(tmp_path: Path) -> None:
    target = tmp_path / "old"
    target.touch()
    target.chmod(0o640)
    with atomic_path(target) as temporary:
        temporary.unlink()
        temporary.touch(mode=0o600)
    assert permissions(target) == 0o640


@pytest.mark.skipif(os.name == "nt", reason="POSIX permission bits")
@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_a_private_file_is_its_owner_s_alone_also_while_it_is_written(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with atomic_path(tmp_path / "new", private=True) as temporary:
            written = permissions(temporary)
    finally:
        os.umask(before)
    assert (written, permissions(tmp_path / "new")) == (0o600, 0o600)


@pytest.mark.skipif(os.name == "nt", reason="POSIX permission bits")
@pytest.mark.parametrize(("old", "new"), [(0o644, 0o600), (0o666, 0o600), (0o200, 0o200)])
def test_a_private_file_is_no_wider_than_the_one_that_it_replaces(tmp_path: Path, old: int, new: int) -> None:
    target = tmp_path / "old"
    target.touch()
    target.chmod(old)
    with atomic_path(target, private=True) as temporary:
        assert permissions(temporary) == new
    assert permissions(target) == new


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_path(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_name_as_long_as_the_file_system_allows_works(tmp_path: Path) -> None:
    target = tmp_path / ("é" * 125 + ".json")
    with atomic_path(target) as temporary:
        temporary.write_text("{}")
    assert target.read_text() == "{}"


def test_the_data_is_flushed_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run.json"
    target_was_there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _descriptor: target_was_there.append(target.exists()))
    with atomic_path(target):
        pass
    assert target_was_there == [False, True]


@pytest.mark.parametrize("name", ["x" * 300, "x\0", "file/below it"])
def test_a_path_that_no_file_can_have_is_a_write_error_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot be reached") as caught, atomic_path(tmp_path / name):
        pass
    assert caught.value.hint


@pytest.mark.parametrize("refused", ["run.json", ""])
def test_a_path_that_may_not_be_looked_at_is_a_write_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real = os.stat

    def guarded(path: object, **options: bool) -> os.stat_result:
        if path == tmp_path / refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", guarded)
    with (
        pytest.raises(WriteError, match=r"run\.json: cannot be reached \(Permission denied\)"),
        atomic_path(tmp_path / "run.json"),
    ):
        pass
