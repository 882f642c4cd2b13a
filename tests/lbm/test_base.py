from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.base import adapt_weight, create_base
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import load_lbm


@pytest.fixture
def config(backbone_config: dict[str, Any]) -> LbmConfig:
    return parse_config(backbone_config)


def weights(backbone: Path, part: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = load_file(backbone / part / "diffusion_pytorch_model.safetensors")
    return state


def test_adapting_cuts_and_fills_with_zeros() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    assert adapt_weight(weight, (3, 2)).tolist() == [[0, 1], [3, 4], [0, 0]]


def test_what_fits_is_the_backbone_s_bit_for_bit(config: LbmConfig, backbone: Path, tmp_path: Path) -> None:
    report = create_base(config, tmp_path / "base.safetensors", backbone=backbone)
    made, unet, vae = load_file(report.path), weights(backbone, "unet"), weights(backbone, "vae")
    same = {key for key in made if key not in report.adapted and key != "num_iterations"}
    for key in same:
        origin = vae[key[14:]] if key.startswith("vae.vae_model.") else unet[key[9:]]
        assert torch.equal(made[key], origin), key
    assert len(same) > 100
    assert made["num_iterations"].item() == 0


def test_only_the_first_convolution_and_cross_keys_and_values_change(
    config: LbmConfig, backbone: Path, tmp_path: Path
) -> None:
    report = create_base(config, tmp_path / "base.safetensors", backbone=backbone)
    assert report.adapted["denoiser.conv_in.weight"] == "zero-filled"
    others = set(report.adapted) - {"denoiser.conv_in.weight"}
    assert others
    assert all(".attn2.to_k.weight" in key or ".attn2.to_v.weight" in key for key in others)
    made, unet = load_file(report.path), weights(backbone, "unet")
    conv = made["denoiser.conv_in.weight"]
    assert torch.equal(conv[:, :4], unet["conv_in.weight"])
    assert not conv[:, 4:].any()
    assert report.dropped
    assert all(key.startswith("add_embedding.") for key in report.dropped)
    assert not any("add_embedding" in key for key in made)


@pytest.mark.parametrize("name", ["base.safetensors", "base.ckpt"])
def test_the_base_loads_as_a_model(config: LbmConfig, backbone: Path, tmp_path: Path, name: str) -> None:
    create_base(config, tmp_path / name, backbone=backbone)
    model = load_lbm(tmp_path / name, config)
    prediction = model(torch.randn(1, 4, 8, 8), torch.ones(1), torch.ones(1, 1, 8, 8))
    assert torch.isfinite(prediction).all()


def test_both_formats_hold_the_same(config: LbmConfig, backbone: Path, tmp_path: Path) -> None:
    for name in ("base.safetensors", "base.ckpt"):
        create_base(config, tmp_path / name, backbone=backbone)
    with (
        open_checkpoint(tmp_path / "base.safetensors") as first,
        open_checkpoint(tmp_path / "base.ckpt") as second,
    ):
        assert set(first) == set(second)
        assert all(torch.equal(first.tensor(key), second.tensor(key)) for key in first)


def test_a_shape_that_cannot_be_adapted_is_named_and_nothing_is_written(
    backbone_config: dict[str, Any], backbone: Path, tmp_path: Path
) -> None:
    other = parse_config(
        backbone_config | {"denoiser": backbone_config["denoiser"] | {"block_out_channels": [16, 64]}}
    )
    with pytest.raises(ModelMismatchError, match=r"is \[.*\], and the LBM's denoiser\..* is \["):
        create_base(other, tmp_path / "base.safetensors", backbone=backbone)
    assert not list(tmp_path.glob("*base*.safetensors"))


def test_a_backbone_with_more_layers_than_the_lbm_is_refused(
    config: LbmConfig, backbone: Path, tmp_path: Path
) -> None:
    file = backbone / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"down_blocks.0.resnets.9.conv1.bias": torch.zeros(4)}, file)
    with pytest.raises(ModelMismatchError, match=r"no place for 1 weights.*resnets\.9\.conv1\.bias"):
        create_base(config, tmp_path / "base.safetensors", backbone=backbone)
    assert not (tmp_path / "base.safetensors").exists()


def test_a_backbone_comes_from_the_hub_when_it_is_no_folder(
    config: LbmConfig, backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(repository: str, **_: object) -> str:
        asked.append(repository)
        return str(backbone)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    create_base(config, tmp_path / "base.safetensors")
    assert asked == ["stabilityai/stable-diffusion-xl-base-1.0"]


def test_a_backbone_that_cannot_be_fetched_is_named(
    config: LbmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*no network"):
        create_base(config, tmp_path / "base.safetensors", backbone="nobody/nothing")


def test_a_target_without_a_known_ending_is_refused(
    config: LbmConfig, backbone: Path, tmp_path: Path
) -> None:
    make: Callable[[], object] = lambda: create_base(config, tmp_path / "base.bin", backbone=backbone)  # noqa: E731
    with pytest.raises(ConfigError, match=r"base\.bin"):
        make()
