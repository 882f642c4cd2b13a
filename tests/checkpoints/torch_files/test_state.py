from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from sigmascope.checkpoints import save_torch
from sigmascope.errors import WriteError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_pytorch_reads_what_was_saved(tmp_path: Path) -> None:
    save_torch(tmp_path / "x.ckpt", OrderedDict(a=torch.arange(3), epoch=3))
    loaded = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["epoch"] == 3


def test_what_cannot_be_pickled_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_torch(path, {"a": torch.zeros(1)})
    old = path.read_bytes()
    with pytest.raises(AttributeError, match="pickle"):
        save_torch(path, {"a": lambda: None})
    assert (path.read_bytes(), names(tmp_path)) == (old, ["x.ckpt"])


def test_a_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    path = small_disk / "x.ckpt"
    save_torch(path, {"a": torch.zeros(1)})
    old = path.read_bytes()
    with pytest.raises(WriteError, match=r"x\.ckpt.*Free some space"):
        save_torch(path, {"a": torch.zeros(1_000_000)})
    assert (path.read_bytes(), names(small_disk)) == (old, ["x.ckpt"])


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="is a folder"):
        save_torch(tmp_path, {})
