import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sigmascope.checkpoints import file_sha256, open_checkpoint, read_header, save_safetensors, save_torch
from sigmascope.errors import CheckpointError

ONE = {"a": torch.ones(1)}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "other.safetensors"], "model.safetensors"),
        (["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"], None),
        (["lbm.safetensors", "lbm.ckpt"], "lbm.safetensors"),
        (["only.pth"], "only.pth"),
        (["only.safetensors", ".half.tmp.safetensors", "config.yaml"], "only.safetensors"),
    ],
)
def test_a_folder_stands_for_its_weights(tmp_path: Path, names: list[str], chosen: str | None) -> None:
    for name in names:
        save = save_safetensors if name.endswith(".safetensors") else save_torch
        save(tmp_path / name, ONE)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path / (chosen or "diffusion_pytorch_model.safetensors")
        assert checkpoint.keys() == ["a"]


def test_a_folder_with_several_weights_asks_which(tmp_path: Path) -> None:
    for name in ("base.safetensors", "tuned.safetensors"):
        save_safetensors(tmp_path / name, ONE)
    with pytest.raises(
        CheckpointError, match=r"has 2 files of weights.*base\.safetensors, tuned\.safetensors"
    ):
        open_checkpoint(tmp_path)


def test_an_empty_folder_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"folder without weights\. Name a \.safetensors file"):
        open_checkpoint(tmp_path)


def test_a_pipeline_folder_points_to_its_models(tmp_path: Path) -> None:
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        save_safetensors(tmp_path / part / "diffusion_pytorch_model.safetensors", ONE)
    with pytest.raises(CheckpointError, match=r"Give its folders with weights instead: unet or vae\."):
        open_checkpoint(tmp_path)


def test_a_missing_file_is_told_with_the_nearest_names(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "exact_base.safetensors", ONE)
    with pytest.raises(CheckpointError, match=r"exact-base.ckpt: does not exist.*exact_base\.safetensors"):
        open_checkpoint(tmp_path / "exact-base.ckpt")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is not a folder .*/none"):
        open_checkpoint(tmp_path / "none" / "x.safetensors")


def test_a_device_is_no_file() -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint("/dev/null")


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt", "x.bin"])
def test_an_empty_file_is_told_so(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"is empty\. Download it again"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<html><body>403</body></html>", "web page"),
        (b"Access denied", "text file"),
    ],
)
def test_what_is_no_checkpoint_is_recognised_under_a_checkpoint_s_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"not a PyTorch checkpoint: .*{message}"):
        open_checkpoint(tmp_path / "x.ckpt")


def test_safetensors_under_a_checkpoint_s_name_are_read(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.safetensors", ONE)
    shutil.move(tmp_path / "x.safetensors", tmp_path / "x.ckpt")
    with open_checkpoint(tmp_path / "x.ckpt") as checkpoint:
        assert checkpoint.format == "safetensors"


def test_a_pickle_under_the_name_of_safetensors_is_not_unpickled(tmp_path: Path) -> None:
    save_torch(tmp_path / "x.ckpt", ONE)
    shutil.move(tmp_path / "x.ckpt", tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"zip archive.*name it \.ckpt"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_a_link_is_followed(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_safetensors(tmp_path / "blob", weights)
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "blob")
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert set(checkpoint) == set(weights)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 640 + 65536])
def test_a_header_length_that_begins_like_a_pickle_is_no_pickle(
    tmp_path: Path, suffix: str, length: int
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3).half()}, path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + content[8:end].ljust(length) + content[end:])
    assert path.read_bytes()[:2] in {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}
    theirs = load_file(path)
    with open_checkpoint(path.rename(path.with_suffix(suffix))) as checkpoint:
        assert set(checkpoint) == set(theirs)
        assert all(torch.equal(checkpoint.tensor(key), theirs[key]) for key in theirs)


def refuse_to(monkeypatch: pytest.MonkeyPatch, function: str, refused: Path) -> None:
    """Let a function of `os` behave as for a user without permission: root would be let in."""
    real: Callable[..., object] = getattr(os, function)

    def guarded(path: object, *arguments: object, **options: object) -> object:
        if isinstance(path, (str, os.PathLike)) and Path(path) == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, function, guarded)


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt", "x.safetensors.index.json"])
def test_a_file_in_a_folder_that_may_not_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refuse_to(monkeypatch, "stat", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"x\..*cannot be read \(Permission denied\)\. Check the perm"):
        open_checkpoint(tmp_path / name)


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to(monkeypatch, "listdir", tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_a_folder_inside_that_may_not_be_listed_is_left_out_of_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        save_safetensors(tmp_path / part / "x.safetensors", ONE)
    refuse_to(monkeypatch, "listdir", tmp_path / "unet")
    with pytest.raises(CheckpointError, match="Give its folder with weights instead: vae"):
        open_checkpoint(tmp_path)


def test_a_missing_file_in_a_folder_that_may_not_be_listed_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to(monkeypatch, "listdir", tmp_path)
    with pytest.raises(CheckpointError, match=r"does not exist\. Check the path"):
        open_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt", "x.safetensors.index.json"])
def test_a_file_that_may_not_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"x\..*Permission denied\)\. Check the permissions"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("look", [open_checkpoint, read_header, file_sha256])
def test_a_name_that_no_file_can_have_is_told_so(tmp_path: Path, look: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*\)\. Check the path"):
        look(tmp_path / ("x" * 300 + ".safetensors"))


def test_a_path_with_a_nul_is_told_so() -> None:
    with pytest.raises(CheckpointError, match=r"embedded null.*Check the path"):
        open_checkpoint("x\0.safetensors")
