import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sigmascope.checkpoints.checkpoint import is_existing, is_folder, is_regular_file, names_in, reading
from sigmascope.errors import CheckpointError

Look = Callable[[Path], object]


def test_what_is_there_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").symlink_to(tmp_path / "b")
    paths = [tmp_path, tmp_path / "a", tmp_path / "none", tmp_path / "b" / "below a file"]
    assert [is_existing(path) for path in paths] == [True, True, False, False]
    assert [is_folder(path) for path in paths] == [True, False, False, False]
    assert [is_regular_file(path) for path in paths] == [False, True, False, False]
    assert names_in(tmp_path) == ["a", "b"]


def test_a_device_is_there_and_no_regular_file() -> None:
    assert is_existing(os.devnull)
    assert not is_regular_file(os.devnull)


@pytest.mark.parametrize("look", [is_existing, is_folder, is_regular_file, names_in])
def test_a_name_too_long_is_a_checkpoint_error(tmp_path: Path, look: Look) -> None:
    with pytest.raises(CheckpointError, match=r"name.*cannot be read \(.*no file can have a name that long"):
        look(tmp_path / ("name" * 75))


@pytest.mark.parametrize("look", [is_existing, is_folder, is_regular_file])
def test_links_that_form_a_ring_are_a_checkpoint_error(tmp_path: Path, look: Look) -> None:
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    with pytest.raises(CheckpointError, match=r"ring: cannot be read .*Check the path"):
        look(tmp_path / "ring")


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "permissions"),
        (errno.EPERM, "permissions"),
        (errno.EIO, "disk"),
        (errno.ENOENT, "path"),
    ],
)
def test_the_hint_fits_the_refusal(number: int, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught, reading(Path("x.ckpt")):
        raise OSError(number, os.strerror(number))
    assert caught.value.path == Path("x.ckpt")
    assert hint in (caught.value.hint or "")
