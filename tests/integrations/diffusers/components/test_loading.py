from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file, save_file
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.records.run import Run, Stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SD1.5 as diffusers saves it, with one key of the U-Net missing and one too many."""
    folder = tmp_path_factory.mktemp("saved")
    make_pipeline("sd15").save_pretrained(folder)
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    state["conv_nowhere.weight"] = state.pop("conv_out.bias")
    save_file(state, file, {"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(
        str(folder), safety_checker=None, low_cpu_mem_usage=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cpu")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    with sigmascope.watch() as watched:
        load(folder)
    return watched.record()


def part(run: Run, class_name: str) -> Stage:
    (found,) = (stage for stage in run.walk() if stage.facts.get("loads") == class_name)
    return found


def test_models_are_loaded_inside_their_pipeline(run: Run) -> None:
    loading = part(run, "StableDiffusionPipeline")
    assert loading in run.stages
    assert {stage.facts["loads"] for stage in loading.children} == {
        "AutoencoderKL",
        "UNet2DConditionModel",
        "CLIPTextModel",
    }


def test_where_a_model_came_from_is_told(run: Run, folder: Path) -> None:
    facts = part(run, "UNet2DConditionModel").facts
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    assert facts["source"] == f"{folder.name}/unet"
    assert (facts["files"], facts["format"]) == ([file.name], "safetensors")
    assert facts["size_mb"] == pytest.approx(file.stat().st_size / 2**20)


def test_missing_and_unexpected_keys_are_told(run: Run) -> None:
    facts = part(run, "UNet2DConditionModel").facts
    assert facts["missing_keys"] == ["conv_out.bias"]
    assert facts["unexpected_keys"] == ["conv_nowhere.weight"]
    assert part(run, "CLIPTextModel").facts["num_missing_keys"] == 0


def test_what_was_loaded_has_its_weights_on_record(run: Run) -> None:
    unet = part(run, "UNet2DConditionModel").modules["model"]
    assert unet.parameters == sum(p.numel() for p in make_pipeline("sd15").unet.parameters())


def test_moving_a_pipeline_is_on_record(run: Run) -> None:
    move = run.stages[-1]
    assert (move.name, move.facts["moves"], move.facts["to"]) == (
        "model_loading",
        "StableDiffusionPipeline",
        ["cpu"],
    )


def test_a_pipeline_that_is_loaded_inside_is_watched(folder: Path) -> None:
    with sigmascope.watch() as run:
        generate(load(folder), "sd15")
    assert len(run.stage("denoising").steps) == 2


@pytest.mark.slow
def test_loading_leaves_nothing_behind(folder: Path) -> None:
    import diffusers
    import transformers

    kinds = (diffusers.DiffusionPipeline, diffusers.ModelMixin, transformers.PreTrainedModel)
    before = [dict(vars(kind)) for kind in kinds]
    with sigmascope.watch():
        pipeline = load(folder)
    assert [dict(vars(kind)) for kind in kinds] == before
    watched, unwatched = (
        {name: set(attributes) for name, attributes in marks(loaded.unet).items()}
        for loaded in (pipeline, load(folder))
    )
    assert watched == unwatched
    assert left_behind() == []


def test_a_folder_that_is_not_there_fails_as_without_a_watch(tmp_path: Path) -> None:
    with sigmascope.watch() as run, pytest.raises(ValueError, match="nowhere"):
        load(tmp_path / "nowhere")
    assert not run.stages[0].success


def test_a_single_model_is_loaded_with_the_weights_of_the_file(folder: Path) -> None:
    from diffusers import AutoencoderKL

    with sigmascope.watch() as run:
        vae: Any = AutoencoderKL.from_pretrained(folder / "vae")
    saved: dict[str, Tensor] = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in vae.state_dict().items())
    assert run.stages[0].facts["loads"] == "AutoencoderKL"


@pytest.mark.parametrize(
    "error", [RuntimeError("the disk is gone"), MemoryError("no room"), KeyError("rank")]
)
@pytest.mark.parametrize("layers", [0, 20], ids=["at once", "halfway"])
def test_what_a_loader_raised_is_why_its_lora_is_not_on_the_model(
    error: Exception, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = make_pipeline("sd15")
    update, seen = LoraLayer.update_layer, count()

    def break_off(*args: Any, **options: Any) -> None:
        if next(seen) >= layers:
            raise error
        update(*args, **options)

    monkeypatch.setattr(LoraLayer, "update_layer", break_off)
    with sigmascope.watch(pipeline) as watching, pytest.raises(type(error)):
        pipeline.load_lora_weights(lora_state(pipeline, ("unet",)))
    run = watching.record()
    (stage,) = (stage for stage in run.walk() if stage.name == "lora_application")
    found = stage.facts["lora_application"]["findings"]
    about = [one for one in found if one["id"] in ("lora_not_loaded", "lora_without_values")]
    assert about
    for finding in about:
        assert f"{type(error).__name__}: {error}" in finding["message"]
        assert "convert" not in finding["advice"]
    assert "lora convert" not in headline(run)
    assert f"{type(error).__name__}: {error}" in headline(run)
