"""A record knows the weights and the LoRAs that it was made with, by their content, and LoRAs by their files."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from PIL import Image
from tests.families import generate, make_pipeline
from tests.families.changes import lora_file
from tests.families.loras import lora_state
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.what_changed import what_changed
from sigmascope.integrations.diffusers import pipeline_call
from sigmascope.integrations.diffusers.arguments import other_arguments
from sigmascope.integrations.diffusers.recipe import loras_of
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.reader import load_lora
from sigmascope.probes.copies import Pending
from sigmascope.probes.model_fingerprints import told
from sigmascope.records.run import Run
from sigmascope.stages import lora_findings

pytestmark = pytest.mark.filterwarnings("ignore:No LoRA keys", "ignore:Already found a `peft_config`")


def watched(pipeline: Any, **call: Any) -> Run:
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sd15", **call)
    return watching.record()


def loras(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.stage("generation").facts["recipe"]["loras"]
    return found


def loaded(file: Path, name: str = "style", **options: Any) -> Any:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline):
        pipeline.load_lora_weights(str(file), adapter_name=name, **options)
    return pipeline


def test_a_lora_is_known_by_its_files_hash_also_in_a_later_watch(tmp_path: Path) -> None:
    file = lora_file(tmp_path, seed=1)
    lora = loras(watched(loaded(file)))["unet.style"]
    assert lora["file"] == "style.safetensors"
    assert lora["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(lora["content"]) == 16


@pytest.mark.slow
def test_another_file_of_the_same_name_is_named(tmp_path: Path) -> None:
    before, now = (watched(loaded(lora_file(tmp_path / str(seed), seed))) for seed in (1, 2))
    changed = what_changed([now], [before])
    assert "LoRA unet.style file sha256 " in changed.headline
    assert "LoRA unet.style content" not in changed.recipe
    assert changed.output == "denoising: latent"


@pytest.mark.slow
def test_loras_of_no_known_file_are_told_apart_by_content(tmp_path: Path) -> None:
    runs = []
    for seed in (1, 2):
        pipeline = make_pipeline("sd15")
        pipeline.load_lora_weights(str(lora_file(tmp_path / str(seed), seed)), adapter_name="style")
        runs.append(watched(pipeline))
    assert "sha256" not in loras(runs[0])["unet.style"]
    assert "LoRA unet.style content " in what_changed([runs[1]], [runs[0]]).headline


@pytest.mark.slow
def test_a_copy_of_the_file_under_another_name_is_no_other_content(tmp_path: Path) -> None:
    first = lora_file(tmp_path, seed=1)
    second = Path(shutil.copy(first, tmp_path / "renamed.safetensors"))
    recipe = what_changed([watched(loaded(second))], [watched(loaded(first))]).recipe
    assert set(recipe) - {"processor used by others"} == {"LoRA unet.style file"}


@pytest.mark.slow
def test_another_file_under_the_same_adapters_name_takes_its_place(tmp_path: Path) -> None:
    first, second = (lora_file(tmp_path / str(seed), seed) for seed in (1, 2))
    pipeline = loaded(first)
    with sigmascope.watch(pipeline):
        pipeline.load_lora_weights(str(second), adapter_name="style", hotswap=True)
    lora = loras(watched(pipeline))["unet.style"]
    assert lora["sha256"] == hashlib.sha256(second.read_bytes()).hexdigest()


@pytest.mark.parametrize("flags", [((), {"hotswap": True}), ((True,), {})], ids=["by name", "by place"])
def test_factors_that_a_hot_swap_wrote_are_read_again(
    flags: tuple[tuple[bool, ...], dict[str, bool]],
) -> None:
    pipeline = make_pipeline("sd15")
    first, second = (lora_state(pipeline, ["unet"], only="attn1.to_q", seed=seed) for seed in (1, 2))
    contents = []
    with sigmascope.watch(pipeline):
        for state, (places, names) in ((first, ((), {})), (second, flags)):
            pipeline.load_lora_weights(state, "style", *places, **names)
            contents.append(told(loras_of(pipeline)["unet.style"]["content"]).value)
    assert len({*contents, None}) == 3


@pytest.mark.slow
def test_what_is_loaded_from_memory_has_no_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pipeline = loaded(lora_file(tmp_path, seed=1))
    with sigmascope.watch(pipeline):
        pipeline.delete_adapters("style")
        pipeline.load_lora_weights(load_file(lora_file(tmp_path, seed=2)), adapter_name="style")
    assert "file" not in loras(watched(pipeline))["unet.style"]


@pytest.mark.slow
def test_an_attached_lora_is_in_the_recipe(tmp_path: Path) -> None:
    first, second = (load_lora(lora_file(tmp_path / str(seed), seed)) for seed in (1, 2))
    pipeline = make_pipeline("sd15")
    before = watched(pipeline)
    runs = {}
    for name, lora in (("first", first), ("second", second)):
        with attach_lora(pipeline, lora, 0.5):
            runs[name] = watched(pipeline)
    assert loras(runs["first"])["unet.style"]["strength"] == [0.5, 0.5]
    assert loras(runs["first"])["unet.style"]["layers"] == len(first.modules)
    assert "LoRAs none → unet.style" in what_changed([runs["first"]], [before]).headline
    assert "LoRA unet.style content" in what_changed([runs["second"]], [runs["first"]]).headline
    assert loras(watched(pipeline)) == {}


def test_a_generator_that_has_drawn_before_is_named() -> None:
    pipeline, generator = make_pipeline("sd15"), torch.Generator().manual_seed(0)
    runs = []
    for _ in range(2):
        with sigmascope.watch(pipeline) as watching:
            pipeline("a fox", num_inference_steps=1, height=32, width=32, generator=generator)
        runs.append(watching.record())
    changed = what_changed([runs[1]], [runs[0]])
    assert "seed" not in changed.recipe
    assert "The outputs differ from the latent of denoising on: generator state " in changed.headline


def test_where_the_generator_draws_is_kept(pipeline: Any) -> None:
    [generation] = watched(pipeline).stages
    assert generation.facts["recipe"]["generator_devices"] == ["cpu"]


def test_another_seed_is_no_difference_of_state_too(pipeline: Any) -> None:
    recipe = what_changed([watched(pipeline, seed=4)], [watched(pipeline)]).recipe
    assert recipe["seed"] == ("0", "4")
    assert "generator state" not in recipe


def test_each_model_has_a_fingerprint_or_a_reason(pipeline: Any) -> None:
    pipeline.vae.to("cpu")
    run = watched(pipeline)
    models = run.stage("generation").facts["recipe"]["models"]
    assert set(models) == {"unet", "vae", "text_encoder"}
    assert all(len(fingerprint) == 16 for fingerprint in models.values())


def test_an_older_record_has_no_fingerprints_and_no_difference_of_them(pipeline: Any) -> None:
    from dataclasses import replace

    run = watched(pipeline)
    (generation,) = run.stages
    facts = {**generation.facts, "recipe": {**generation.facts["recipe"]}}
    del facts["recipe"]["models"]
    older = replace(run, stages=(replace(generation, facts=facts),))
    assert not any("weights" in name for name in what_changed([run], [older]).recipe)


def test_a_probe_that_fails_leaves_the_picture_and_the_rest(
    pipeline: Any, unwatched: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Any:
        raise ValueError("no such weights")

    monkeypatch.setattr(pipeline_call, "models_of", broken)
    monkeypatch.setattr(pipeline_call, "loras_of", broken)
    with sigmascope.watch(pipeline) as run:
        assert torch.equal(generate(pipeline, "sd15"), unwatched)
    assert run.stage("generation").facts["recipe"]["threads"] > 0
    assert left_behind() == []


def test_a_picture_that_a_call_is_given_is_told_by_its_pixels() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    first, same = Image.fromarray(pixels), Image.fromarray(pixels.copy())
    pixels[0, 0] = 255
    other = Image.fromarray(pixels)
    told = [other_arguments({"image": image})["image"] for image in (first, same, other)]
    assert told[0] == told[1] != told[2]
    assert told[0].startswith("6×4 RGB ")


def set_to_zero(unet: Any) -> None:
    with torch.no_grad():
        for name, factor in unet.named_parameters():
            if "lora_B" in name:
                factor.zero_()


def put_against_itself(pipeline: Any) -> None:
    state = {
        f"unet.{name}": tensor
        for name, tensor in get_peft_model_state_dict(pipeline.unet, adapter_name="style").items()
    }
    pipeline.load_lora_weights(state, adapter_name="again")
    pipeline.set_adapters(["style", "again"], [0.8, -0.8])


@pytest.mark.parametrize(
    ("switch_off", "finding", "words"),
    [
        (lambda pipeline: pipeline.set_adapters(["style"], [0.0]), "lora_strength_zero", "strength 0"),
        (lambda pipeline: pipeline.disable_lora(), "lora_disabled", "switched off"),
        (lambda pipeline: pipeline.set_adapters(["style"], [1.0]), None, ""),
        (lambda pipeline: set_to_zero(pipeline.unet), "lora_is_zero", "all its changes are zero"),
        pytest.param(put_against_itself, "lora_cancelled", "cancel each other", marks=pytest.mark.slow),
    ],
)
def test_a_lora_that_was_off_before_the_watch_began_is_a_finding(
    switch_off: Any, finding: str | None, words: str, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(str(lora_file(tmp_path, seed=1)), adapter_name="style")
    switch_off(pipeline)
    found = {one.id: one.message for one in watched(pipeline).findings if one.id.startswith("lora_")}
    assert list(found) == ([] if finding is None else [finding])
    assert all(words in message for message in found.values())


@pytest.mark.parametrize(
    ("kind", "options"), [("HRAConfig", {"r": 2}), ("IA3Config", {"feedforward_modules": []})]
)
def test_an_adapter_without_a_scale_that_is_off_is_a_finding(kind: str, options: dict[str, Any]) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.unet.add_adapter(getattr(peft, kind)(target_modules=["to_q"], **options), "style")
    facts = loras_of(pipeline)["unet.style"]
    assert (facts["strength"], facts["active"]) == (None, facts["layers"])
    pipeline.unet.disable_adapters()
    assert loras_of(pipeline)["unet.style"]["active"] == 0
    found = [one.id for one in watched(pipeline).findings if one.id.startswith("lora_")]
    assert found == ["lora_disabled"]


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_strength_is_told_without_the_scale_that_rank_and_alpha_give(use_rslora: bool) -> None:
    pipeline = make_pipeline("sd15")
    config = peft.LoraConfig(r=16, lora_alpha=8, use_rslora=use_rslora, target_modules=["to_q"])
    pipeline.unet.add_adapter(config, "style")
    assert loras_of(pipeline)["unet.style"]["strength"] == (1.0, 1.0)


def test_a_call_that_scales_its_lora_to_zero_is_a_finding(tmp_path: Path, unwatched: Tensor) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.load_lora_weights(str(lora_file(tmp_path, seed=1)), adapter_name="style")
    found, runs = {}, []
    for scale in (0.5, 0.0):
        with sigmascope.watch(pipeline) as watching:
            picture = generate(pipeline, "sd15", cross_attention_kwargs={"scale": scale})
        runs.append(watching.record())
        acts = not torch.equal(picture, unwatched)
        found[acts] = {one.id for one in runs[-1].findings if one.id.startswith("lora_")}
    assert found == {True: set(), False: {"lora_scaled_to_zero"}}
    assert what_changed(runs[1:], runs[:1]).recipe["cross_attention_kwargs.scale"] == ("0.5", "0.0")


@pytest.mark.slow
def test_a_fused_lora_is_not_scaled_by_the_call(tmp_path: Path, unwatched: Tensor) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(str(lora_file(tmp_path, seed=1)), adapter_name="style")
        pipeline.fuse_lora()
        picture = generate(pipeline, "sd15", cross_attention_kwargs={"scale": 0.0})
    assert not torch.equal(picture, unwatched)
    run = watching.record()
    assert not {one.id for one in run.findings if one.id in ("lora_scaled_to_zero", "lora_is_zero")}
    acts = acting_lora(run)
    assert acts is not None
    assert "scaled" not in acts


@pytest.mark.slow
def test_a_lora_that_the_call_scales_is_told_with_the_scale(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(str(lora_file(tmp_path, seed=1)), adapter_name="style")
        generate(pipeline, "sd15", num_inference_steps=1, cross_attention_kwargs={"scale": 0.5})
    assert "The last call scaled this by 0.5 in the unet." in str(acting_lora(watching.record()))


@pytest.mark.slow
def test_an_adapter_on_a_part_of_a_model_is_among_its_loras() -> None:
    """PEFT keeps the configuration of one that is injected into a block on the block alone."""
    pipeline = make_pipeline("sd15")
    config = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    inject_adapter_in_model(config, pipeline.unet.mid_block, "block")
    pipeline.unet.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), "whole")
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sd15", num_inference_steps=1)
    loras = watching.record().stage("generation").facts["recipe"]["loras"]
    assert {name for name, lora in loras.items() if lora["content"]} == {"unet.block", "unet.whole"}


@pytest.mark.slow
def test_a_lora_that_acts_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []

    def look(applied: object) -> Pending[list[object]]:
        looks.append(applied)
        return Pending(list)

    monkeypatch.setattr(lora_findings, "begin_all_idle", look)
    pipeline = loaded(lora_file(tmp_path, seed=9))
    for strengths in ([1.0], [1.0], [0.5]):
        pipeline.set_adapters(["style"], strengths)
        watched(pipeline, num_inference_steps=1)
    assert len(looks) == 2
