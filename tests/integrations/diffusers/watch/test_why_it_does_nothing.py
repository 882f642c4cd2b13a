"""The first sentence of a watch names why a LoRA does nothing, where the picture shows that it does nothing."""

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import peft
import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.family import FAMILIES
from tests.families.loras import State, as_kohya, lora_state, write

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_state import standing
from sigmascope.records.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def state_of(family: str, *parts: str) -> State:
    return lora_state(make_pipeline(family), parts or (FAMILIES[family].denoiser,), size=0.3)


def renamed(old: str, new: str, state: State) -> State:
    return {key.replace(old, new): value for key, value in state.items()}


def zero(end: str, state: State) -> State:
    return {key: value * (end not in key) for key, value in state.items()}


def with_alpha_0(state: State) -> State:
    names = {key.partition(".lora_")[0] for key in state}
    return state | {f"{name}.alpha": torch.tensor(0.0) for name in names}


def only_biases(pipeline: Any) -> State:
    layers = {name: module for name, module in pipeline.unet.named_modules() if name.endswith("proj_in")}
    return {
        f"lora_unet_{name.replace('.', '_')}.diff_b": torch.ones_like(layer.bias)
        for name, layer in layers.items()
    }


def tensors(state: State) -> Callable[[Any, Path], None]:
    return lambda pipeline, _: pipeline.load_lora_weights(state, adapter_name="style")


def folder(state: State, **options: str) -> Callable[[Any, Path], None]:
    def act(pipeline: Any, place: Path) -> None:
        write(state, place / "my_style.safetensors")
        pipeline.load_lora_weights(str(place), **options)

    return act


def of_pipeline(make: Callable[[Any], State]) -> Callable[[Any, Path], None]:
    return lambda pipeline, place: tensors(make(pipeline))(pipeline, place)


def then(act: Callable[[Any], object]) -> Callable[[Any, Path], None]:
    """A LoRA that fits, and what is done after it was loaded."""

    def both(pipeline: Any, _: Path) -> None:
        known = FAMILIES["flux" if hasattr(pipeline, "transformer") else "sd15"]
        pipeline.load_lora_weights(state_of(known.name, known.denoiser), adapter_name="style")
        act(pipeline)

    return both


def with_another_unet(pipeline: Any) -> None:
    pipeline.unet = make_pipeline("sd15").unet


def with_the_forward_pass_of_another(pipeline: Any) -> None:
    pipeline.unet.forward = make_pipeline("sd15").unet.forward


def fused_into_the_unet_that_was_exchanged(pipeline: Any) -> None:
    bare = copy.deepcopy(make_pipeline("sd15").unet)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.unet = bare


def fused_before_the_weights_were_loaded_again(pipeline: Any) -> None:
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    pipeline.unet.load_state_dict(make_pipeline("sd15").unet.state_dict())


def fused_into_the_encoder_that_was_exchanged(pipeline: Any, _: Path) -> None:
    pipeline.load_lora_weights(state_of("sd15", "text_encoder"))
    pipeline.fuse_lora(components=["text_encoder"])
    pipeline.unload_lora_weights()
    pipeline.text_encoder = make_pipeline("sd15").text_encoder


def fused_into_another(pipeline: Any, place: Path) -> None:
    into_another(pipeline, place)
    pipeline.other.fuse_lora()
    pipeline.other.unload_lora_weights()


def with_encoders_too(pipeline: Any, _: Path) -> None:
    pipeline.load_lora_weights(state_of("sd15", "unet", "text_encoder"), adapter_name="style")
    pipeline.set_adapters("style", {"unet": 0.0, "text_encoder": 0.0})


def into_another(pipeline: Any, _: Path) -> None:
    other = make_pipeline("sd15")
    other.load_lora_weights(state_of("sd15"))
    pipeline.other = other


class Plant(NamedTuple):
    """What is done to a pipeline, what the first sentence must say, and with what it is called."""

    act: Callable[[Any, Path], object]
    says: str
    family: str = "sd15"
    call: Mapping[str, Any] = MappingProxyType({})


SD15, FLUX = state_of("sd15"), state_of("flux")
PLANTS = {
    "a DiT's tensors": Plant(tensors(FLUX), "for FLUX by its names, the model is Stable Diffusion 1.5"),
    "a DiT's folder": Plant(folder(FLUX), "for FLUX by its names"),
    "a U-Net's tensors for a DiT": Plant(
        tensors(SD15), "for another architecture.* the model is FLUX", "flux"
    ),
    "PEFT's wrapper before the names": Plant(
        tensors(renamed("unet.", "base_model.model.", SD15)), r"part that it is for \(unet\.\)"
    ),
    "nothing before the names": Plant(
        tensors(renamed("transformer.", "", FLUX)), r"part that it is for \(transformer\.\)", "flux"
    ),
    "ComfyUI's names": Plant(
        folder(renamed("unet.", "diffusion_model.", SD15)), r"names begin with diffusion_model\."
    ),
    "LyCORIS' names": Plant(
        tensors(renamed("lora_unet_", "lycoris_", as_kohya(SD15))),
        "does not read names that begin with lycoris_",
    ),
    "a ControlNet's": Plant(folder(renamed("unet.", "controlnet.", SD15)), "for a ControlNet"),
    "a file in a folder": Plant(
        folder(renamed("unet.", "controlnet.", SD15), weight_name="my_style.safetensors"), "for a ControlNet"
    ),
    "SDXL's second encoder": Plant(tensors(state_of("sdxl", "text_encoder_2")), "second text encoder"),
    "no tensors": Plant(tensors({}), "holds no tensors"),
    "biases alone": Plant(of_pipeline(only_biases), "whole differences.*diffusers refuses the file"),
    "all of A zero": Plant(tensors(zero("lora_A", SD15)), "all its changes are zero"),
    "all of A zero in a DiT": Plant(tensors(zero("lora_A", FLUX)), "all its changes are zero", "flux"),
    "alpha 0": Plant(tensors(with_alpha_0(as_kohya(SD15))), "alpha 0"),
    "a new adapter": Plant(
        lambda pipeline, _: pipeline.unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"])),
        "lora_B is zero in 20 weights, as before training",
    ),
    "strength 0 by part": Plant(with_encoders_too, "strength 0 on 193 weights"),
    "fused at 0": Plant(then(lambda pipeline: pipeline.fuse_lora(lora_scale=0.0)), "strength 0"),
    "switched off on the model": Plant(
        then(lambda pipeline: pipeline.unet.disable_adapters()), "switched off on 181 weights"
    ),
    "a whole 0 in the call": Plant(
        then(lambda _: None),
        r"joint_attention_kwargs\.scale is 0",
        "flux",
        {"joint_attention_kwargs": {"scale": 0}},
    ),
    "on a U-Net that was exchanged": Plant(then(with_another_unet), "not on the models that ran"),
    "on another pipeline": Plant(into_another, "not on the models that ran"),
    "fused into a U-Net that was exchanged": Plant(
        then(fused_into_the_unet_that_was_exchanged), "as before it was merged"
    ),
    "fused before weights were loaded again": Plant(
        then(fused_before_the_weights_were_loaded_again), "as before it was merged"
    ),
    "fused into an encoder that was exchanged": Plant(
        fused_into_the_encoder_that_was_exchanged, "as before it was merged"
    ),
    "fused into another pipeline": Plant(fused_into_another, "as before it was merged"),
    "beside the forward pass that runs": Plant(
        then(with_the_forward_pass_of_another), "forward pass of unet.* does not lead to its layers"
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_first_sentence_names_the_reason(name: str, tmp_path: Path) -> None:
    plant = PLANTS[name]
    once: dict[str, Any] = {"num_inference_steps": 1}
    bare = generate(make_pipeline(plant.family), plant.family, **once)
    pipeline = make_pipeline(plant.family)
    with sigmascope.watch() as watching:
        with suppress(ValueError):  # diffusers refuses it
            plant.act(pipeline, tmp_path)
        picture = generate(pipeline, plant.family, **once, **plant.call)
    run: Run = watching.record()
    assert torch.equal(picture, bare)
    first = re.split(r"(?<!unet)(?<!transformer)(?<!model)\.\s", headline(run))[0]
    assert re.search(plant.says, first), headline(run)
    assert acting_lora(run) is None


@pytest.mark.parametrize(
    "how", ["loaded", "by get_peft_model", "called first", "a copy of the U-Net", "fused"]
)
def test_a_lora_that_moves_the_picture_is_not_called_elsewhere(how: str) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch() as watching:
        if how == "by get_peft_model":
            config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
            pipeline.unet = peft.get_peft_model(pipeline.unet, config)
        else:
            pipeline.load_lora_weights(SD15)
        if how == "called first":
            generate(make_pipeline("sd15"), "sd15", num_inference_steps=1)
        if how == "fused":
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
        if how == "a copy of the U-Net":
            pipeline.unet = copy.deepcopy(pipeline.unet)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    assert "model.lora_elsewhere" not in {finding.id for finding in watching.record().findings}


def unloaded_from_another_copy(pipeline: Any) -> None:
    pipeline.load_lora_weights(SD15)
    kept = copy.deepcopy(pipeline.unet)
    pipeline.unload_lora_weights()
    pipeline.unet = kept


def refused_by_another(pipeline: Any) -> None:
    other = make_pipeline("sd15")
    with suppress(RuntimeError):
        other.load_lora_weights({key: value[:1] if "lora_B" in key else value for key, value in SD15.items()})


def set_to_0_on_another(pipeline: Any) -> None:
    other = make_pipeline("sd15")
    other.load_lora_weights(SD15, adapter_name="a")
    other.set_adapters("a", 0.0)


def fused_in_a_call(pipeline: Any) -> None:
    def fuse(pipeline: Any, *_: object) -> dict[str, Any]:
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        return {}

    pipeline.load_lora_weights(SD15)
    pipeline("a fox", num_inference_steps=2, height=32, width=32, callback_on_step_end=fuse)


def fused_and_unloaded_by_the_model(pipeline: Any) -> None:
    pipeline.load_lora_weights(SD15)
    pipeline.fuse_lora()
    pipeline.unet.unload_lora()
    pipeline.load_lora_weights(zero("lora_A", SD15))


@pytest.mark.parametrize(
    ("act", "is_there_before"),
    [
        (unloaded_from_another_copy, False),
        (refused_by_another, True),
        (set_to_0_on_another, True),
        (fused_in_a_call, False),
        (fused_and_unloaded_by_the_model, False),
    ],
)
def test_a_lora_acts_whatever_becomes_of_other_models(
    act: Callable[[Any], None], is_there_before: bool
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    if is_there_before:
        pipeline.load_lora_weights(SD15)
    with sigmascope.watch() as watching:
        act(pipeline)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "acts"


@pytest.mark.parametrize(
    ("replaced", "kept", "says", "gone"),
    [
        ("text_encoder", "unet", r"‖W‖ is [\d.]+ % in the denoiser\.", "text encoders"),
        ("unet", "text_encoder", r"‖W‖ is [\d.]+ % in the text encoders\.", "denoiser"),
    ],
)
def test_a_lora_has_no_share_in_a_model_that_another_took_the_place_of(
    replaced: str, kept: str, says: str, gone: str
) -> None:
    both = state_of("sd15", "unet", "text_encoder")
    alone = make_pipeline("sd15")
    alone.load_lora_weights({key: value for key, value in both.items() if key.startswith(f"{kept}.")})
    expected = generate(alone, "sd15", num_inference_steps=1)
    pipeline = make_pipeline("sd15")
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(both)
        setattr(pipeline, replaced, getattr(make_pipeline("sd15"), replaced))
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    said = acting_lora(watching.record()) or ""
    assert torch.equal(picture, expected)
    assert re.search(says, said), said
    assert f"It is not on the {gone} that ran." in said


@torch.no_grad()
def test_a_lora_keeps_its_share_in_an_encoder_that_is_taken_away_once_it_has_encoded() -> None:
    pipeline = make_pipeline("sd15")
    once = {"num_inference_steps": 1, "prompt": None, "negative_prompt": None}
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state_of("sd15", "unet", "text_encoder"))
        made = pipeline.encode_prompt("a fox", "cpu", 1, True)
        pipeline.text_encoder = None
        pipeline(
            **once,
            prompt_embeds=made[0],
            negative_prompt_embeds=made[1],
            height=32,
            width=32,
            output_type="pt",
        )
    assert " % in the text encoders." in (acting_lora(watching.record()) or "")


def test_what_was_merged_and_set_to_0_before_the_watch_may_stay_in_the_weights(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(SD15, adapter_name="a")
    pipeline.fuse_lora()
    pipeline.set_adapters("a", 0.0)
    (broken := tmp_path / "broken.safetensors").write_bytes(b"no weights")
    with sigmascope.watch(pipeline) as watching:
        pipeline.unload_lora_weights()
        with suppress(OSError):
            pipeline.load_lora_weights(str(broken))
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    found = standing(watching.record())
    assert found is not None
    assert found.words == "unknown"
