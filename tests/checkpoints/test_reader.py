import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, save_safetensors, save_torch
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
    with pytest.raises(CheckpointError, match=r"Its folders unet, vae have some"):
        open_checkpoint(tmp_path)


def test_a_missing_file_is_told_with_the_nearest_names(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "exact_base.safetensors", ONE)
    with pytest.raises(CheckpointError, match=r"exact-base.ckpt: does not exist.*exact_base\.safetensors"):
        open_checkpoint(tmp_path / "exact-base.ckpt")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*/none"):
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
