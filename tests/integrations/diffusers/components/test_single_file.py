"""Loading from one file with CompVis' names, as most checkpoints are passed on."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.lora.layer_names import blocks_of, to_sgm
from sigmascope.records.run import Run

_VAE = (
    (r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2"),
    (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    ("group_norm", "norm"),
    (r"to_([qkv])", r"\1"),
    (r"to_out\.0", "proj_out"),
    ("conv_shortcut", "nin_shortcut"),
    ("conv_norm_out", "norm_out"),
)


def vae_name(key: str, levels: int) -> str:
    key = re.sub(r"up_blocks\.(\d)\.resnets", lambda found: f"up.{levels - 1 - int(found[1])}.block", key)
    key = re.sub(
        r"up_blocks\.(\d)\.upsamplers\.0", lambda found: f"up.{levels - 1 - int(found[1])}.upsample", key
    )
    for ours, theirs in _VAE:
        key = re.sub(ours, theirs, key)
    return f"first_stage_model.{key}"


def original(pipeline: Any) -> dict[str, Tensor]:
    """The weights of a Stable Diffusion 1 pipeline, under the names of its first authors."""
    unet = pipeline.unet.state_dict()
    blocks = blocks_of(key.rpartition(".")[0] for key in unet)
    state = {}
    for key, value in unet.items():
        layer, _, leaf = key.rpartition(".")
        state[f"model.diffusion_model.{to_sgm(layer, blocks)}.{leaf}"] = value
    levels = len(pipeline.vae.config.up_block_types)
    for key, value in pipeline.vae.state_dict().items():
        is_attention = "mid_block.attentions" in key and value.dim() == 2  # a 1×1 convolution there
        state[vae_name(key, levels)] = value[:, :, None, None] if is_attention else value
    for key, value in pipeline.text_encoder.state_dict().items():
        state[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    return {key: value.contiguous() for key, value in state.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SD1.5, with the folder `config` beside it, which has no weights."""
    folder = tmp_path_factory.mktemp("single")
    pipeline = make_pipeline("sd15")
    pipeline.save_pretrained(folder / "config")
    for weights in (folder / "config").rglob("*.safetensors"):
        weights.unlink()
    save_file(original(pipeline), folder / "portrait.safetensors")
    return folder / "portrait.safetensors"


@pytest.fixture(scope="module")
def watched(file: Path) -> tuple[Run, Tensor]:
    """The run in which the pipeline is loaded and called, and what it makes."""
    from diffusers import StableDiffusionPipeline

    with sigmascope.watch() as run:
        pipeline: Any = StableDiffusionPipeline.from_single_file(
            str(file), config=str(file.parent / "config"), dtype=torch.float32, safety_checker=None
        )
        pipeline.set_progress_bar_config(disable=True)
        image = generate(pipeline, "sd15")
    assert left_behind() == []
    return run.record(), image


def test_a_pipeline_from_a_single_file_has_its_loading_with_the_file(
    watched: tuple[Run, Tensor], file: Path
) -> None:
    loading = watched[0].stages[0]
    assert loading.name == "model_loading"
    told = {name: loading.facts[name] for name in ("loads", "source", "files", "format", "dtype")}
    assert told == {
        "loads": "StableDiffusionPipeline",
        "source": f"{file.parent.name}/{file.name}",
        "files": ["portrait.safetensors"],
        "format": "safetensors",
        "dtype": "torch.float32",
    }
    assert loading.facts["size_mb"] == file.stat().st_size / 2**20
    assert loading.seconds > 0


def test_models_that_are_made_of_the_file_lie_inside(watched: tuple[Run, Tensor]) -> None:
    loading = watched[0].stages[0]
    assert [stage.facts["loads"] for stage in loading.children] == ["UNet2DConditionModel", "AutoencoderKL"]


def test_a_pipeline_from_a_single_file_is_watched_and_makes_the_same(
    watched: tuple[Run, Tensor], unwatched: Tensor
) -> None:
    run, image = watched
    assert torch.equal(image, unwatched)
    assert len(run.stage("denoising").steps) == 2


@pytest.mark.parametrize("how", ["path", "keyword", "state"])
def test_a_model_from_a_single_file_says_what_it_was_made_of(file: Path, how: str) -> None:
    from diffusers import UNet2DConditionModel

    source = make_pipeline("sd15").unet.state_dict() if how == "state" else str(file)
    args, named = (
        ((), {"pretrained_model_link_or_path_or_dict": source}) if how == "keyword" else ((source,), {})
    )
    with sigmascope.watch() as run:
        UNet2DConditionModel.from_single_file(
            *args, **named, config=str(file.parent / "config"), subfolder="unet", torch_dtype=torch.float16
        )
    (loading,) = run.stages
    assert loading.facts.get("files") == (None if how == "state" else [file.name])
    assert loading.facts.get("source") == (None if how == "state" else f"{file.parent.name}/{file.name}")
    assert set(loading.modules["model"].dtypes) == {"float16"}


def test_a_file_that_is_not_there_fails_as_without_a_watch(tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    with sigmascope.watch() as run, pytest.raises(ValueError, match="valid URL"):
        StableDiffusionPipeline.from_single_file(str(tmp_path / "nowhere.safetensors"))
    assert (run.stages[0].success, run.stages[0].facts["source"]) == (
        False,
        f"{tmp_path.name}/nowhere.safetensors",
    )
    assert "size_mb" not in run.stages[0].facts


def test_components_that_a_modular_pipeline_loads_are_named(file: Path) -> None:
    from diffusers import StableDiffusionXLAutoBlocks

    pipeline: Any = StableDiffusionXLAutoBlocks().init_pipeline()
    with sigmascope.watch() as run:
        pipeline.load_components("scheduler", pretrained_model_name_or_path=str(file.parent / "config"))
    assert run.stages[0].facts["components"] == "scheduler"
    assert "source" not in run.stages[0].facts
