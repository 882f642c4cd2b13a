import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sigmascope.checkpoints.torch_writer import StreamingTorchWriter
from sigmascope.errors import ConfigError, WriteError
from sigmascope.lbm.base import all_or_none, choose_base_files, config_target, create_base
from sigmascope.lbm.config import LbmConfig, load_config


@pytest.fixture
def before(tmp_path: Path) -> dict[str, bytes]:
    """A folder with a base from an earlier run."""
    content = {"base.ckpt": b"earlier", "base.safetensors": b"earlier too"}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    return content


def found(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ctrl_c_in_the_middle_leaves_everything_as_it_was(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path, before: dict[str, bytes]
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder, progress=stop)
    assert found(tmp_path) == before


def test_a_failure_after_the_first_file_was_replaced_puts_it_back(
    sdxl_config: LbmConfig,
    sdxl_folder: Path,
    tmp_path: Path,
    before: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bytes] = []

    def fail(self: StreamingTorchWriter, name: str, content: bytes) -> None:
        if name == "version":  # the last of the second file to be finished
            seen.append((tmp_path / "base.safetensors").read_bytes())
            raise OSError(28, "No space left on device")
        put(self, name, content)

    put = StreamingTorchWriter._put
    monkeypatch.setattr(StreamingTorchWriter, "_put", fail)
    with pytest.raises(WriteError, match=r"base\.ckpt.*No space left"):
        create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder)
    assert seen
    assert seen[0] != before["base.safetensors"]
    assert found(tmp_path) == before


def test_files_that_were_not_there_are_gone_after_a_failure(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")

    def fail() -> None:
        with all_or_none([old, new]):
            new.write_text("half")
            replacement = tmp_path / "replacement"
            replacement.write_text("changed")
            replacement.replace(old)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert found(tmp_path) == {"old": b"old"}


def test_success_leaves_the_new_files_and_nothing_else(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("old")
    with all_or_none([old]):
        (tmp_path / "replacement").write_text("changed")
        (tmp_path / "replacement").replace(old)
    assert found(tmp_path) == {"old": b"changed"}


def test_a_disk_without_room_for_both_files_is_refused_before_writing(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(WriteError, match=r"too full: \d+\.\d+ GB are needed, 0\.01 GB are free"):
        create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder, dtype=torch.bfloat16)
    assert not list(tmp_path.iterdir())


def test_a_config_file_is_copied_as_it_is(sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path) -> None:
    text = "# ours\n" + sdxl_config.to_yaml()
    (tmp_path / "training.yaml").write_text(text)
    (tmp_path / "out").mkdir()
    report = create_base(tmp_path / "training.yaml", tmp_path / "out" / "base.ckpt", backbone=sdxl_folder)
    assert report.config_path == tmp_path / "out" / "config.yaml"
    assert report.config_path.read_text() == text


def test_an_equal_config_is_left_alone(sdxl_config: LbmConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# another wording\n" + sdxl_config.to_yaml())
    assert config_target(tmp_path / "base.ckpt", sdxl_config) is None


def test_another_model_s_config_is_kept_and_ours_goes_beside_it(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("bridge_noise_sigma: 0.5")
    report = create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder)
    assert report.config_path == tmp_path / "base.yaml"
    assert load_config(report.config_path) == sdxl_config
    assert (tmp_path / "config.yaml").read_text() == "bridge_noise_sigma: 0.5"


def test_a_yaml_of_something_else_is_kept_too(sdxl_config: LbmConfig, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("not: an LBM")
    assert config_target(tmp_path / "base.ckpt", sdxl_config) == tmp_path / "base.yaml"


def test_a_config_that_later_commands_would_take_for_ours_is_an_error(
    sdxl_config: LbmConfig, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("bridge_noise_sigma: 0.5")
    with pytest.raises(ConfigError, match=r"base\.yaml: describes a different model"):
        choose_base_files(tmp_path / "base.ckpt", sdxl_config, both=True)


def test_two_links_to_one_file_are_refused(sdxl_config: LbmConfig, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"mine")
    for name in ("base.ckpt", "base.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"base\.safetensors and .*base\.ckpt are links to the same file"):
        choose_base_files(tmp_path / "base.ckpt", sdxl_config, both=True)


def test_a_link_stays_one_and_its_file_is_replaced(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base.ckpt").symlink_to(tmp_path / "elsewhere" / "real.ckpt")
    create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder)
    assert (tmp_path / "base.ckpt").is_symlink()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["real.ckpt"]


def test_a_backbone_is_never_replaced_by_its_base(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(sdxl_folder / "unet", tmp_path / "unet")
    shutil.copytree(sdxl_folder / "vae", tmp_path / "vae")
    before = (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="belongs to the backbone"):
        create_base(sdxl_config, tmp_path / "unet" / "diffusion_pytorch_model.ckpt", backbone=tmp_path)
    assert (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").read_bytes() == before


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)


@pytest.mark.usefixtures("no_links")
def test_a_file_system_without_hard_links_works_too(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path, before: dict[str, bytes]
) -> None:
    create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder)
    assert set(found(tmp_path)) == {*before, "config.yaml"}
    assert (tmp_path / "base.ckpt").read_bytes() != before["base.ckpt"]
