"""A YAML with the keys of LBM's own trainings, on data with the members that they read, trains as it is."""

import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import load_file
from tests.lbm.sdxl_forms import DENOISER, VAE

from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.base import create_base
from sigmascope.lbm.training.own_base import make_own_base
from sigmascope.lbm.training.settings import load_train_settings
from sigmascope.lbm.training.train import dry_run, train

SURFACE = """
backbone_signature: some/tiny-sdxl
vae_num_channels: 4
unet_input_channels: 4
source_key: image
target_key: normal
mask_key: mask
train_shards:
  - pipe:cat train.tar
validation_shards:
  - val.tar
save_ckpt_path: ./checkpoints
wandb_project: null
batch_size: 1
num_steps: [1]
learning_rate: 4e-5
learning_rate_scheduler: null
learning_rate_scheduler_kwargs: {}
optimizer: AdamW
optimizer_kwargs: {}
timestep_sampling: custom_timesteps
selected_timesteps: [250, 500, 750, 1000]
prob: [0.25, 0.25, 0.25, 0.25]
logit_mean: 0.0
logit_std: 1.0
bridge_noise_sigma: 0.005
conditioning_images_keys: []
conditioning_masks_keys: []
latent_loss_type: l2
latent_loss_weight: 1.0
pixel_loss_type: l1
pixel_loss_weight: 1.0
log_interval: 1
save_interval: 1000
max_epochs: 1
resume_from_checkpoint: true
"""
"""Written for this test from the keys that LBM's page lists."""
SMALL: dict[str, Any] = {"resolution": 64, "denoiser": DENOISER, "vae": VAE}
"""That the model is small, which LBM's YAMLs cannot say."""


def write_samples(path: Path, count: int) -> None:
    """Samples of `jpg`, `normal.png` and `mask.png`, as LBM's surface training reads them."""
    noise = np.random.default_rng(count)
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            for member, kind, mode in (
                ("jpg", "JPEG", "RGB"),
                ("normal.png", "PNG", "RGB"),
                ("mask.png", "PNG", "L"),
            ):
                shape = (64, 64, 3) if mode == "RGB" else (64, 64)
                data = io.BytesIO()
                Image.fromarray(noise.integers(0, 256, shape, np.uint8)).save(data, kind)
                entry = tarfile.TarInfo(f"{number:04d}.{member}")
                entry.size = len(data.getvalue())
                tar.addfile(entry, io.BytesIO(data.getvalue()))


@pytest.fixture
def surface(tmp_path: Path, sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The YAML in a folder with its data; the backbone lies in the hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub/models--some--tiny-sdxl"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0a1b2c")
    (model / "snapshots").mkdir()
    (model / "snapshots/0a1b2c").symlink_to(sdxl_folder)
    write_samples(tmp_path / "train.tar", 2)
    write_samples(tmp_path / "val.tar", 1)
    path = tmp_path / "surface.yaml"
    path.write_text(SURFACE + yaml.safe_dump(SMALL))
    return path


@pytest.mark.slow
def test_lbm_s_own_yaml_trains_as_it_is(surface: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = load_train_settings(surface, allow_pipe=True)
    planned = dry_run(settings)
    assert not Path("checkpoints").exists()
    report = train(settings)
    assert report.step == 2
    assert report.skipped.count == 0
    assert planned.trained_parameters > 0
    base = Path("checkpoints/base.safetensors")
    assert settings.base_model_path == base
    expected = create_base(settings.lbm, Path("alone.safetensors"), dtype=None, both=False)
    before, after = load_file(base), load_file("checkpoints/model.safetensors")
    exact = load_file(expected.paths[0])
    assert all(
        np.allclose(before[key].float(), exact[key].float(), rtol=2**-8) for key in exact
    )  # in bfloat16, as create-base writes it
    assert any(not before[key].equal(after[key]) for key in before if key.startswith("denoiser."))
    assert "made from some/tiny-sdxl; what is trained is every weight of the denoiser" in caplog.text
    assert train(load_train_settings(surface, allow_pipe=True)).step == 2  # and goes on from there


def test_the_source_is_the_jpg_and_the_target_the_normals(surface: Path) -> None:
    from sigmascope.lbm.training.session import open_data

    batch, _ = next(iter(open_data(load_train_settings(surface, allow_pipe=True)).batches(0)))
    with tarfile.open("train.tar") as tar:
        names = [name for name in tar.getnames() if name.startswith(batch.keys[0])]
        pictures = {
            name.partition(".")[2]: np.asarray(Image.open(io.BytesIO(tar.extractfile(name).read())))  # type: ignore[union-attr]
            for name in names
        }
    for tensor, member in ((batch.source, "jpg"), (batch.target, "normal.png")):
        pixels = (tensor[0].permute(1, 2, 0).numpy() + 1) * 127.5
        np.testing.assert_allclose(pixels, pictures[member], atol=0.01)


def test_a_backbone_that_is_not_here_is_to_be_downloaded(surface: Path) -> None:
    surface.write_text(surface.read_text().replace("some/tiny-sdxl", "some/other"))
    settings = load_train_settings(surface, allow_pipe=True)
    for start in (dry_run, train):
        with pytest.raises(CheckpointError, match=r"hf download some/other unet/config\.json"):
            start(settings)


def test_a_base_of_another_backbone_is_not_taken_for_this_one(surface: Path) -> None:
    Path("checkpoints").mkdir()
    Path("checkpoints/base.safetensors").touch()
    Path("checkpoints/base.yaml").write_text("backbone_signature: some/other\n")
    with pytest.raises(ConfigError, match="was made from some/other"):
        dry_run(load_train_settings(surface, allow_pipe=True))


@pytest.mark.slow
def test_a_base_is_not_kept_when_the_files_of_its_backbone_have_changed(
    surface: Path, sdxl_folder: Path
) -> None:
    """In place, at the same size, in the middle of a file."""
    backbone = shutil.copytree(sdxl_folder, Path("backbone"))
    surface.write_text(surface.read_text().replace("some/tiny-sdxl", "./backbone"))
    settings = load_train_settings(surface, allow_pipe=True)
    make_own_base(settings)
    unet = backbone / "unet/diffusion_pytorch_model.safetensors"
    os.utime(unet)
    assert dry_run(settings).backbone is None
    content = bytearray(unet.read_bytes())
    content[len(content) // 2] ^= 1
    unet.write_bytes(content)
    for start in (dry_run, train):
        with pytest.raises(
            ConfigError, match=rf"base\.safetensors was made from \./backbone, and {unet} has changed"
        ):
            start(settings)
    shutil.rmtree(backbone)
    assert dry_run(settings).backbone is None
