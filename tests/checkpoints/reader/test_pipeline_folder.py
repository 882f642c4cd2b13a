"""Diffusers folders, as diffusers and transformers themselves write them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import checkpoint_fingerprint, open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(1)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(2)
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )


def vae() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(3)
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {"text_encoder": text_encoder(), "unet": unet(), "vae": vae()}


@pytest.fixture
def pipeline(tmp_path: Path, models: dict[str, Any]) -> Path:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return folder


def expected(models: dict[str, Any], *names: str) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": tensor.detach()
        for name in names
        for key, tensor in models[name].state_dict().items()
    }


def test_all_components_are_one_checkpoint(pipeline: Path, models: dict[str, Any]) -> None:
    wanted = expected(models, "unet", "vae")
    with open_checkpoint(pipeline) as checkpoint:
        found = {key: checkpoint.tensor(key) for key in checkpoint if not key.startswith("text_encoder.")}
        assert checkpoint.path == pipeline
        assert any(key.endswith("self_attn.q_proj.weight") for key in checkpoint)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_tensor_is_described_under_its_whole_name_and_read_into_a_buffer(pipeline: Path) -> None:
    key = "unet.conv_in.weight"
    with open_checkpoint(pipeline) as checkpoint:
        info = checkpoint.info(key)
        buffer = torch.zeros(info.nbytes, dtype=torch.uint8)
        assert (info.name, info.shape) == (key, (8, 4, 3, 3))
        assert torch.equal(checkpoint.tensor_into(key, buffer), checkpoint.tensor(key))


def test_models_without_weights_are_listed_as_skipped(pipeline: Path) -> None:
    """A scheduler never has any."""
    for weights in (pipeline / "vae").glob("*.safetensors"):
        weights.unlink()
    shutil.rmtree(pipeline / "text_encoder")
    with open_checkpoint(pipeline) as checkpoint:
        assert checkpoint.skipped == dict.fromkeys(("vae", "text_encoder"), "has no weights in this folder")


def test_every_file_of_every_component_is_named(pipeline: Path) -> None:
    with open_checkpoint(pipeline) as checkpoint:
        names = {file.relative_to(pipeline).as_posix() for file in checkpoint.files}
    assert names == {
        "model_index.json",
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }


def test_sharded_components_give_the_same_weights(
    pipeline: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    with open_checkpoint(pipeline) as checkpoint:
        whole = checkpoint_fingerprint(checkpoint)
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    models["unet"].save_pretrained(pipeline / "unet", max_shard_size="20KB")
    assert (pipeline / "unet" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    with open_checkpoint(pipeline) as checkpoint:
        assert checkpoint_fingerprint(checkpoint) == whole


@pytest.mark.parametrize("size", ["10GB", "10KB"])
def test_a_variant_is_read_when_asked_for_and_the_plain_files_where_there_is_none(
    pipeline: Path, size: str
) -> None:
    unet().half().save_pretrained(pipeline / "unet", variant="fp16", max_shard_size=size)
    with open_checkpoint(pipeline, variant="fp16") as checkpoint:
        assert checkpoint.info("unet.conv_in.weight").dtype == torch.float16
        assert checkpoint.info("vae.encoder.conv_in.weight").dtype == torch.float32
    with open_checkpoint(pipeline) as checkpoint:
        assert checkpoint.info("unet.conv_in.weight").dtype == torch.float32


def test_without_plain_files_the_variant_that_lost_least_is_read(pipeline: Path) -> None:
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    unet().half().save_pretrained(pipeline / "unet", variant="fp16")
    unet().bfloat16().save_pretrained(pipeline / "unet", variant="bf16")
    with open_checkpoint(pipeline) as checkpoint:
        assert checkpoint.info("unet.conv_in.weight").dtype == torch.bfloat16


def test_a_variant_that_no_component_has_is_refused_with_those_that_there_are(pipeline: Path) -> None:
    unet().half().save_pretrained(pipeline / "unet", variant="fp16")
    with pytest.raises(CheckpointError, match=r"no weights in the variant bf16\. It has fp16"):
        open_checkpoint(pipeline, variant="bf16")
    with pytest.raises(CheckpointError, match="Its files have no variant"):
        open_checkpoint(pipeline / "vae", variant="bf16")


def test_a_component_folder_is_opened_alone(pipeline: Path, models: dict[str, Any]) -> None:
    with open_checkpoint(pipeline / "unet") as checkpoint:
        assert set(checkpoint) == set(models["unet"].state_dict())


def test_a_folder_of_unknown_variants_asks_which(tmp_path: Path) -> None:
    for variant in ("ema", "non_ema"):
        save_safetensors(tmp_path / f"diffusion_pytorch_model.{variant}.safetensors", {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="in the variants ema, non_ema"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, variant="ema") as checkpoint:
        assert checkpoint.path.name == "diffusion_pytorch_model.ema.safetensors"


def test_a_pickled_component_is_read_where_there_is_nothing_better(pipeline: Path) -> None:
    folder = pipeline / "vae"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"encoder.conv_in.weight": torch.ones(2)}, folder / "diffusion_pytorch_model.bin")
    with open_checkpoint(pipeline) as checkpoint:
        assert torch.equal(checkpoint.tensor("vae.encoder.conv_in.weight"), torch.ones(2))


def test_a_folder_whose_components_are_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(INDEX))
    with pytest.raises(CheckpointError, match="no weights in its folders"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "\\ud800"])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_index\.json: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other", "/etc", "a/b", ".."])
def test_an_index_may_not_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({name: ["diffusers", "X"]}))
    with pytest.raises(CheckpointError, match="not a folder beside it"):
        open_checkpoint(tmp_path)


def test_a_damaged_component_is_named_with_its_file(pipeline: Path) -> None:
    file = pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"vae/diffusion_pytorch_model\.safetensors: is truncated"):
        open_checkpoint(pipeline)
