from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.ui.conftest import LAYER, lora_for

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora
from sigmascope.ui.lbm_model import ModelOptions, load_served


@pytest.fixture
def checkpoint(tiny_model: LbmModel, tiny_config: LbmConfig, tmp_path: Path) -> Path:
    save_file(tiny_model.state_dict(), tmp_path / "tiny.safetensors")
    (tmp_path / "tiny.yaml").write_text(tiny_config.to_yaml(), encoding="utf-8")
    return tmp_path / "tiny.safetensors"


def test_model_and_lora_are_loaded_and_described(
    checkpoint: Path, tiny_model: LbmModel, tmp_path: Path
) -> None:
    save_lora(tmp_path / "light.safetensors", lora_for(tiny_model))
    options = ModelOptions(checkpoint, tmp_path / "light.safetensors", torch_dtype="bf16", device="cpu")
    served = load_served(options)
    facts = served.facts()
    assert (facts["model"], facts["lora"]) == ("tiny.safetensors", "light.safetensors")
    assert (facts["dtype"], facts["device"], facts["resolution"]) == ("bfloat16", "cpu", 64)
    assert (facts["lora_modules"], facts["lora_ranks"]) == (1, [2])
    assert facts["parameters"] == sum(parameter.numel() for parameter in tiny_model.parameters())
    assert served.lora is not None
    assert served.lora.applied == (LAYER,)


def test_the_base_alone_has_no_lora(checkpoint: Path) -> None:
    served = load_served(ModelOptions(checkpoint, device="cpu", resolution=128))
    assert (served.lora, served.facts()["lora"], served.resolution) == (None, None, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ModelOptions(), "no model to serve"),
        (
            ModelOptions(pocket=True, lora_path=Path("a"), config_path=Path("b")),
            "--lora_path and --config_path",
        ),
        (ModelOptions(pocket=True, base_model_path=Path("a")), "--base_model_path"),
        (ModelOptions(pocket=True, resolution=0), "--resolution"),
        (ModelOptions(pocket=True, torch_dtype="int8"), "--torch_dtype"),
        (ModelOptions(pocket=True, device="toaster"), "--device"),
    ],
)
def test_options_that_make_no_sense_are_named(options: ModelOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.check()


def test_tiles_of_nothing_but_overlap_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="tile_size: expected at least"):
        load_served(ModelOptions(checkpoint, device="cpu", tile_size=4))


def test_a_model_that_needs_more_than_a_picture_is_refused(tiny_config: LbmConfig, tmp_path: Path) -> None:
    config = parse_config(
        {
            **tiny_config.model_dump(),
            "conditioning_masks_keys": ["mask"],
            "unet_input_channels": tiny_config.unet_input_channels + 1,
        }
    )
    save_file(build_lbm(config).state_dict(), tmp_path / "masked.safetensors")
    (tmp_path / "masked.yaml").write_text(config.to_yaml(), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"needs more than a source picture \(mask\)"):
        load_served(ModelOptions(tmp_path / "masked.safetensors", device="cpu"))


def test_a_lora_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = LoraFactors(torch.ones(8, 2), torch.ones(2, 8), alpha=2.0, weight_shape=(8, 8))
    save_lora(tmp_path / "other.safetensors", LoraFile({"denoiser.absent.to_q": other}))
    with pytest.raises(ModelMismatchError, match="absent"):
        load_served(ModelOptions(checkpoint, tmp_path / "other.safetensors", device="cpu"))
