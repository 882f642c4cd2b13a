"""The base against the rule written out by hand on diffusers' own models, bit for bit, from every form."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.lbm.sdxl_forms import DENOISER, REFINER, VAE, Form
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lbm.base import BaseReport, adapt_weight, create_base
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import build_lbm, load_lbm


def rule_by_hand(folder: Path, config: LbmConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the whole models with diffusers, take their state dicts, and do to each weight what the rule says."""
    unet = UNet2DConditionModel.from_pretrained(folder / "unet").state_dict()
    vae = AutoencoderKL.from_pretrained(folder / "vae").state_dict()
    for name in ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias"):
        del unet[f"add_embedding.{name}"]
    started = build_lbm(config).denoiser.state_dict()
    for key, weight in unet.items():
        to = started[key]
        if key.endswith((".to_k.weight", ".to_v.weight")) and weight.shape[1] > to.shape[1]:
            unet[key] = weight[:, : to.shape[1]]
        elif key == "conv_in.weight" or key.endswith((".to_k.weight", ".to_v.weight")):
            missing = to.shape[1] - weight.shape[1]
            unet[key] = torch.cat(
                [weight, weight.new_zeros(weight.shape[0], missing, *weight.shape[2:])], dim=1
            )
    build_lbm(config).denoiser.load_state_dict(unet, strict=True)
    base = {f"denoiser.{key}": weight for key, weight in unet.items()}
    base |= {f"vae.vae_model.{key}": weight for key, weight in vae.items()}
    return {key: weight.to(dtype) for key, weight in base.items()} | {"num_iterations": torch.tensor(0.0)}


@pytest.fixture(scope="module")
def expected(sdxl_folder: Path, sdxl_config: LbmConfig) -> dict[str, Tensor]:
    """In float32. Never to be changed."""
    return rule_by_hand(sdxl_folder, sdxl_config, torch.float32)


def assert_same_bits(made: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(made) == set(expected)
    for key, tensor in expected.items():
        assert made[key].dtype == tensor.dtype, key
        assert made[key].shape == tensor.shape, key
        assert torch.equal(bits(made[key]), bits(tensor)), key


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def plain(sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseReport:
    """A base in the backbone's own types, in both formats with the config beside them. Never to be changed."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    return create_base(sdxl_config, path, backbone=sdxl_folder)


def assert_base(folder: Path, expected: dict[str, Tensor]) -> None:
    assert_same_bits(load_file(folder / "base.safetensors"), expected)
    # As LBM's own get_model reads a .ckpt: Lightning's dictionary, whose names begin with "model."
    lightning = torch.load(folder / "base.ckpt", weights_only=True)["state_dict"]
    assert all(key.startswith("model.") for key in lightning)
    assert_same_bits({key[6:]: tensor for key, tensor in lightning.items()}, expected)
    with open_checkpoint(folder / "base.ckpt") as checkpoint:
        assert set(checkpoint) == set(expected)


def test_the_base_is_what_the_rule_gives_bit_for_bit(plain: BaseReport, expected: dict[str, Tensor]) -> None:
    assert_base(plain.paths[0].parent, expected)


def test_it_is_rounded_to_the_dtype_that_is_asked_for(
    sdxl_config: LbmConfig, sdxl_folder: Path, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder, dtype=torch.bfloat16)
    rounded = {
        key: each if key == "num_iterations" else each.to(torch.bfloat16) for key, each in expected.items()
    }
    assert_base(tmp_path, rounded)


@pytest.mark.parametrize("form", ["sharded", "variant", "safetensors", "ckpt"])
def test_every_form_of_a_backbone_gives_the_same_base(
    sdxl_config: LbmConfig,
    make_form: Callable[[Form], Path],
    expected: dict[str, Tensor],
    tmp_path: Path,
    form: Form,
) -> None:
    report = create_base(sdxl_config, tmp_path / "base.safetensors", backbone=make_form(form), both=False)
    assert_same_bits(load_file(tmp_path / "base.safetensors"), expected)
    # What a single file holds besides is counted.
    assert report.outside == ({"conditioner": 1} if form in ("safetensors", "ckpt") else {})


@pytest.mark.slow
def test_an_sdxl_refiner_gives_the_same_base_as_a_file_and_as_a_folder(refiner: Path, tmp_path: Path) -> None:
    """Four levels of which the outer ones have no attention, and one text encoder, OpenCLIP's, under its own names."""
    config = parse_config({"denoiser": REFINER, "vae": VAE, "resolution": 64})
    unet = load_file(refiner / "unets" / "unet" / "diffusion_pytorch_model.safetensors")
    text = {f"denoiser.{key}" for key in unet if key.endswith(("attn2.to_k.weight", "attn2.to_v.weight"))}
    made = {}
    for name in ("unets", "refiner.safetensors"):
        report = create_base(
            config, tmp_path / f"{name}-base.safetensors", backbone=refiner / name, both=False
        )
        made[name] = load_file(report.paths[0])
        assert set(report.adapted) == text
    assert report.outside == {"conditioner": 2}
    assert_same_bits(made["refiner.safetensors"], made["unets"])
    assert all(torch.isfinite(weight).all() for weight in made["unets"].values())


def test_a_refiner_in_place_of_the_base_model_is_told_by_its_levels(
    refiner: Path, sdxl_config: LbmConfig, tmp_path: Path
) -> None:
    with pytest.raises(ModelMismatchError) as caught:
        create_base(sdxl_config, tmp_path / "base.ckpt", backbone=refiner / "refiner.safetensors")
    second = caught.value.message.splitlines()[1]
    assert second == (
        "Its levels have 8, 16, 24, 24 channels, the config's have 16, 32 (denoiser.block_out_channels)."
    )
    assert not list(tmp_path.glob("base*"))


def test_a_narrow_text_is_filled_with_zeros(
    backbone_config: dict[str, object], backbone: Path, tmp_path: Path
) -> None:
    config = parse_config(backbone_config)
    report = create_base(config, tmp_path / "base.safetensors", backbone=backbone, both=False)
    assert {each.change for each in report.adapted.values()} == {"zero-filled"}
    assert_same_bits(load_file(tmp_path / "base.safetensors"), rule_by_hand(backbone, config, torch.float32))


def test_adapting_cuts_and_fills_with_zeros() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    assert adapt_weight(weight, (3, 2)).tolist() == [[0, 1], [3, 4], [0, 0]]


def test_every_change_is_reported_with_both_shapes(plain: BaseReport) -> None:
    report = plain
    first = report.adapted["denoiser.conv_in.weight"]
    assert (first.change, first.had, first.shape) == ("zero-filled", (16, 4, 3, 3), (16, 5, 3, 3))
    others = {key: each for key, each in report.adapted.items() if key != "denoiser.conv_in.weight"}
    transformers = 1 * 2 + 2 * 2 + 2  # down, up, middle
    assert len(others) == 2 * transformers
    assert {(each.change, each.had[1], each.shape[1]) for each in others.values()} == {("cut", 40, 32)}
    assert all(key.endswith(("attn2.to_k.weight", "attn2.to_v.weight")) for key in others)
    assert report.dropped == {
        "denoiser.add_embedding.linear_1.weight": (64, 64),
        "denoiser.add_embedding.linear_1.bias": (64,),
        "denoiser.add_embedding.linear_2.weight": (64, 64),
        "denoiser.add_embedding.linear_2.bias": (64,),
    }
    assert report.nbytes == sum(each.nbytes for each in load_file(report.paths[0]).values())
    with safe_open(report.paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it diffusers refuses a file


def test_the_base_loads_as_a_model_with_the_config_beside_it(
    plain: BaseReport, sdxl_config: LbmConfig
) -> None:
    for path in plain.paths:
        model = load_lbm(path)
        assert model.config == sdxl_config
    prediction = model(torch.randn(1, 4, 8, 8), torch.ones(1), torch.ones(1, 1, 8, 8))
    assert torch.isfinite(prediction).all()


def test_all_shapes_that_cannot_be_adapted_are_named_and_nothing_is_written(
    sdxl_folder: Path, tmp_path: Path
) -> None:
    other = parse_config({"denoiser": DENOISER, "vae": VAE | {"block_out_channels": [16, 24]}})
    with pytest.raises(ModelMismatchError) as caught:
        create_base(other, tmp_path / "base.safetensors", backbone=sdxl_folder)
    vae = AutoencoderKL.from_pretrained(sdxl_folder / "vae").state_dict()
    wanted = build_lbm(other, device="meta").vae.vae_model.state_dict()
    misfits = {key for key in wanted if key in vae and vae[key].shape != wanted[key].shape}
    assert len(misfits) > 20
    for key in misfits:
        pair = f"{list(vae[key].shape)} in the backbone, {list(wanted[key].shape)} in the LBM"
        assert f"vae.vae_model.{key}: {pair}" in caught.value.message
    assert not list(tmp_path.iterdir())


def test_what_is_lacking_and_what_has_no_place_are_named_together(
    sdxl_config: LbmConfig, make_form: Callable[[Form], Path], tmp_path: Path
) -> None:
    file = make_form("safetensors")
    state = load_file(file)
    del state["model.diffusion_model.out.0.bias"]
    del state["first_stage_model.quant_conv.weight"]
    save_file(state | {"model.diffusion_model.control.weight": torch.zeros(4)}, file)
    with pytest.raises(ModelMismatchError) as caught:
        create_base(sdxl_config, tmp_path / "base.safetensors", backbone=file)
    assert "the backbone lacks (2):" in caught.value.message
    assert "denoiser.conv_norm_out.bias [16]" in caught.value.message
    assert "vae.vae_model.quant_conv.weight [8, 8, 1, 1]" in caught.value.message
    assert "no place for (1):\n  model.diffusion_model.control.weight" in caught.value.message


def test_a_backbone_with_nan_is_refused(
    sdxl_config: LbmConfig, make_form: Callable[[Form], Path], tmp_path: Path
) -> None:
    file = make_form("safetensors")
    key = "model.diffusion_model.middle_block.0.in_layers.2.weight"
    state = load_file(file)
    state[key][0, 0] = torch.nan
    save_file(state, file)
    with pytest.raises(
        NonFiniteError, match=r"backbone\.safetensors: model\..*in_layers\.2\.weight holds NaN"
    ):
        create_base(sdxl_config, tmp_path / "base.safetensors", backbone=file)
    assert [each.name for each in tmp_path.iterdir()] == ["backbone.safetensors"]


def test_a_weight_too_large_for_fp16_is_named(
    sdxl_config: LbmConfig, make_form: Callable[[Form], Path], tmp_path: Path
) -> None:
    file = make_form("safetensors")
    state = load_file(file)
    state["model.diffusion_model.out.2.bias"][0] = 70_000.0
    save_file(state, file)
    with pytest.raises(NonFiniteError, match=r"out\.2\.bias is too large for float16.*bf16"):
        create_base(sdxl_config, tmp_path / "base.ckpt", backbone=file, dtype=torch.float16)


def test_one_format_alone_writes_one_file(sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path) -> None:
    report = create_base(sdxl_config, tmp_path / "base.ckpt", backbone=sdxl_folder, both=False)
    assert report.paths == (tmp_path / "base.ckpt",)
    assert [file.name for file in tmp_path.iterdir()] == ["base.ckpt"]


def test_a_target_without_a_known_ending_is_refused(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"base\.bin"):
        create_base(sdxl_config, tmp_path / "base.bin", backbone=sdxl_folder)
