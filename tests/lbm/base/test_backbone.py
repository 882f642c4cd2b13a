import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tests.lbm.sdxl_forms import DENOISER, VAE, Form, single_file_state

from sigmascope.checkpoints import Checkpoint, TensorInfo
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.base import PREFIXES, name_single_file, open_backbone
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import build_lbm


class Announced(Checkpoint):
    """A file of which only names and shapes are known: full size without a byte."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        infos = {
            key: TensorInfo(key, tuple(each.shape), each.dtype, each.nbytes) for key, each in tensors.items()
        }
        super().__init__(Path("sd_xl.safetensors"), infos, {}, {})

    def _read_into(self, info: TensorInfo, buffer: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing may be read")

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_every_name_of_a_full_size_single_file_is_put_into_diffusers_own() -> None:
    config = LbmConfig()
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            down_block_types=config.denoiser.down_block_types,
            up_block_types=config.denoiser.up_block_types,
            block_out_channels=config.denoiser.block_out_channels,
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ).state_dict()
    vae = build_lbm(config, device="meta").vae.vae_model.state_dict()
    assert (len(unet), len(vae)) == (1680, 248)  # as SDXL's own files have
    weights = name_single_file(Announced(single_file_state(unet, vae)), config).weights
    assert {name: weight.shape for name, weight in weights.items()} == {
        PREFIXES[part] + name: tuple(tensor.shape)
        for part, state in (("unet", unet), ("vae", vae))
        for name, tensor in state.items()
    }
    assert weights["denoiser.mid_block.attentions.0.transformer_blocks.9.attn2.to_k.weight"].key == (
        "model.diffusion_model.middle_block.1.transformer_blocks.9.attn2.to_k.weight"
    )
    assert weights["vae.vae_model.decoder.up_blocks.0.resnets.2.conv1.weight"].key == (
        "first_stage_model.decoder.up.3.block.2.conv1.weight"
    )
    attention = weights["vae.vae_model.encoder.mid_block.attentions.0.to_q.weight"]
    assert attention.key == "first_stage_model.encoder.mid.attn_1.q.weight"
    assert attention.shape == (512, 512)


def test_earlier_names_of_a_vae_s_attention_are_known(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(sdxl_folder, tmp_path / "earlier")
    file = tmp_path / "earlier" / "vae" / "diffusion_pytorch_model.safetensors"
    renamed = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(file)
    for new, old in renamed.items():
        state = {
            key.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): each for key, each in state.items()
        }
    assert any("proj_attn" in key for key in state)
    save_file(state, file)
    with (
        open_backbone(tmp_path / "earlier", sdxl_config) as earlier,
        open_backbone(sdxl_folder, sdxl_config) as present,
    ):
        assert set(earlier.weights) == set(present.weights)
        key = "vae.vae_model.decoder.mid_block.attentions.0.to_out.0.weight"
        assert torch.equal(earlier.weights[key].read(), present.weights[key].read())


def test_a_variant_is_read_when_asked_for(sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path) -> None:
    for part in ("unet", "vae"):
        shutil.copytree(sdxl_folder / part, tmp_path / part)
        state = load_file(tmp_path / part / "diffusion_pytorch_model.safetensors")
        half = {key: tensor.half() for key, tensor in state.items()}
        save_file(half, tmp_path / part / "diffusion_pytorch_model.fp16.safetensors")
    for variant, dtype in ((None, torch.float32), ("fp16", torch.float16)):
        with open_backbone(tmp_path, sdxl_config, variant) as backbone:
            assert {weight.dtype for weight in backbone.weights.values()} == {dtype}


def test_a_single_file_has_no_variants(sdxl_config: LbmConfig, make_form: Callable[[Form], Path]) -> None:
    with (
        pytest.raises(ConfigError, match="--variant fp16"),
        open_backbone(make_form("safetensors"), sdxl_config, "fp16"),
    ):
        pass


@pytest.mark.parametrize(("gone", "part"), [("model.diffusion_model", "unet"), ("first_stage_model", "vae")])
def test_a_single_file_without_a_part_says_which(
    sdxl_config: LbmConfig, make_form: Callable[[Form], Path], gone: str, part: str
) -> None:
    file = make_form("safetensors")
    save_file({key: each for key, each in load_file(file).items() if not key.startswith(gone)}, file)
    with (
        pytest.raises(CheckpointError, match=rf"no tensors named {gone}\.\*, so it has no {part}"),
        open_backbone(file, sdxl_config),
    ):
        pass


def test_a_single_file_cannot_have_blocks_of_different_depths(make_form: Callable[[Form], Path]) -> None:
    config = parse_config({"denoiser": DENOISER | {"layers_per_block": [1, 2]}, "vae": VAE})
    with (
        pytest.raises(ConfigError, match=r"layers_per_block.*single-file"),
        open_backbone(make_form("safetensors"), config),
    ):
        pass


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_a_folder_without_a_part_says_which(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path, part: str
) -> None:
    other = "vae" if part == "unet" else "unet"
    shutil.copytree(sdxl_folder / other, tmp_path / other)
    with pytest.raises(CheckpointError, match=f"has no folder {part}"), open_backbone(tmp_path, sdxl_config):
        pass


@pytest.mark.parametrize("signature", ["./sdxl", "/nowhere/sdxl", "sd_xl_base_1.0.safetensors"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    sdxl_config: LbmConfig, signature: str
) -> None:
    with pytest.raises(ConfigError, match="does not exist"), open_backbone(signature, sdxl_config):
        pass


def test_a_name_is_looked_for_in_the_hub_s_cache(
    sdxl_config: LbmConfig, sdxl_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--sdxl"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("0a1b2c")
    (model / "snapshots").mkdir()
    (model / "snapshots/0a1b2c").symlink_to(sdxl_folder)
    with open_backbone("some/sdxl", sdxl_config) as backbone:
        assert len(backbone.weights) > 100


def test_a_name_that_is_not_there_is_to_be_downloaded_without_what_a_base_has_no_use_for(
    sdxl_config: LbmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as refused, open_backbone("some/sdxl", sdxl_config, "fp16"):
        pass
    assert refused.value.hint is not None
    assert refused.value.hint.endswith(
        "hf download some/sdxl unet/config.json unet/diffusion_pytorch_model.fp16.safetensors "
        "vae/config.json vae/diffusion_pytorch_model.fp16.safetensors"
    )


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_what_may_be_downloaded_is_so_in_one_variant(
    variant: str | None, sdxl_config: LbmConfig, sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fnmatch import fnmatch

    asked: dict[str, list[str]] = {}

    def fetch(repository: str, allow_patterns: list[str], revision: str | None) -> str:
        asked[repository] = allow_patterns
        return str(sdxl_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with suppress(CheckpointError), open_backbone("some/sdxl", sdxl_config, variant, download=True):
        pass
    plain = {"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-00001-of-00002.safetensors"}
    half = {
        "diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
    }
    names = {*plain, *half, "diffusion_pytorch_model.bin"}
    fetched = {
        name for name in names if any(fnmatch(f"unet/{name}", pattern) for pattern in asked["some/sdxl"])
    }
    assert fetched == (plain if variant is None else half)


def test_a_download_that_fails_is_named(sdxl_config: LbmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with (
        pytest.raises(CheckpointError, match=r"nobody/nothing.*no network"),
        open_backbone("nobody/nothing", sdxl_config, download=True),
    ):
        pass
