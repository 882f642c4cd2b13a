"""How strongly a LoRA acts in each part of a pipeline, after `set_adapters` gave its parts and blocks strengths of their own."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state
from torch import nn

import sigmascope
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_state import standing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:Already found a `peft_config`", "ignore:No LoRA keys", "ignore:Adapter cannot be set when"
    ),
]


@torch.no_grad()
def share(*models: nn.Module) -> float:
    """‖ΔW‖ / ‖W‖ over the layers of LoRAs, in float64, in percent."""
    change, whole = 0.0, 0.0
    for model in models:
        for layer in model.modules():
            for name in getattr(layer, "lora_A", ()):
                held: Any = layer
                up, down = held.lora_B[name].weight, held.lora_A[name].weight
                product = up.double().flatten(1) @ down.double().flatten(1) * held.scaling[name]
                change += float((product**2).sum())
                whole += float((held.base_layer.weight.double() ** 2).sum())
    return 100 * math.sqrt(change / whole)


BY_PART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the encoder alone": ({"unet": 1.0, "text_encoder": 0.0}, {"unet": 0.0, "text_encoder": 0.5}),
    "the denoiser alone": ({"unet": 0.0, "text_encoder": 1.0}, {"unet": 0.5, "text_encoder": 0.0}),
    "some blocks": (
        {"unet": {"down": 1.0, "mid": 0.0, "up": 0.0}, "text_encoder": 0.0},
        {"unet": {"down": 0.5, "mid": 0.0, "up": 0.0}, "text_encoder": 0.0},
    ),
}


@pytest.mark.parametrize("case", BY_PART)
def test_the_strength_that_is_told_is_that_of_the_parts_that_act(case: str) -> None:
    pipeline = make_pipeline("sdxl")
    state = lora_state(pipeline, ["unet"], size=0.2, only="attentions")
    state |= lora_state(pipeline, ["text_encoder", "text_encoder_2"], size=0.2, only="attn")
    pipeline.load_lora_weights(state, adapter_name="a")
    before, after = ({**strengths, "text_encoder_2": 0.0} for strengths in BY_PART[case])
    pipeline.set_adapters("a", before)
    with sigmascope.watch(pipeline) as watching:
        pipeline.set_adapters("a", after)
    says = acting_lora(watching.record()) or ""
    sides = {
        "denoiser": share(pipeline.unet),
        "text encoders": share(pipeline.text_encoder, pipeline.text_encoder_2),
    }
    found = {side: float(figure) for figure, side in re.findall(r"([\d.]+) % in the ([a-z ]+)", says)}
    assert found == {side: pytest.approx(figure, abs=0.5) for side, figure in sides.items() if figure}


def test_the_strength_of_a_lora_that_was_loaded_over_a_fused_one_is_that_beside_the_bare_weights() -> None:
    pipeline = make_pipeline("flux")
    first, second = (lora_state(pipeline, ["transformer"], size=0.2, seed=seed) for seed in (0, 1))
    pipeline.load_lora_weights(first, adapter_name="a")
    pipeline.fuse_lora()
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(second, adapter_name="b")  # PEFT takes the first out of the weights
    pipeline.delete_adapters("a")
    says = re.search(r"([\d.]+) % in the denoiser", acting_lora(watching.record()) or "")
    assert says is not None
    assert float(says[1]) == pytest.approx(share(pipeline.transformer), abs=0.5)


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_what_was_fused_in_one_part_acts_there_once_the_adapters_are_unloaded(part: str, off: bool) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ["unet", "text_encoder"], size=0.2))
        pipeline.fuse_lora(components=[part])
        if off:
            pipeline.set_adapters("default_0", 0.0)
        pipeline.unload_lora_weights()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    side = "denoiser" if part == "unet" else "text encoders"
    assert acting_lora(watching.record()) == f"The LoRA acts in the {side}: it is merged into the weights."


OFF_IN_UNET: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "deleted": lambda unet, _: unet.delete_adapters("a"),
    "unloaded": lambda unet, _: unet.unload_lora(),
    "switched off": lambda unet, _: unet.disable_lora(),
    "strength 0": lambda unet, _: unet.set_adapters(["a"], [0.0]),
    "fused and switched off": lambda unet, _: (unet.fuse_lora(), unet.disable_lora()),
    "zeros": lambda unet, zeros: unet.load_lora_adapter(zeros, prefix="unet", adapter_name="a"),
}


@pytest.mark.parametrize("way", OFF_IN_UNET)
def test_what_a_method_of_the_denoiser_takes_off_still_acts_in_the_text_encoder(way: str) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    words = lora_state(pipeline, ["text_encoder"], size=0.3)
    of_unet = lora_state(pipeline, ["unet"], size=0.3, only="attentions")
    zeros = {name: factor * ("lora_A" in name) for name, factor in of_unet.items()}
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(words if way == "zeros" else words | of_unet, adapter_name="a")
        OFF_IN_UNET[way](pipeline.unet, zeros)
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    told = standing(watching.record())
    assert told is not None
    assert (told.words, told.is_well) == ("acts", True)
    assert not {"unet", "denoiser"} & {*re.findall(r"\w+", told.says)}
    strength = re.search(r"([\d.]+) % in the text encoders", told.says)
    assert strength is not None or way in ("fused and switched off", "zeros")
    assert strength is None or float(strength[1]) == pytest.approx(share(pipeline.text_encoder), abs=0.5)


@pytest.mark.parametrize(("scale", "acts"), [(0.5, False), (1.0, True)])
def test_what_a_call_takes_out_of_the_weights_is_scaled_by_the_call(scale: float, acts: bool) -> None:
    """After a call with scale 0 diffusers sets the strength to 1, and PEFT takes out with what is set in the call."""
    pipeline = make_pipeline("flux")
    state = lora_state(pipeline, ["transformer"], size=0.3)
    bare = generate(pipeline, "flux", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(state, adapter_name="a")
        pipeline.fuse_lora(lora_scale=0.5)
        generate(pipeline, "flux", num_inference_steps=1, joint_attention_kwargs={"scale": 0.0})
        pipeline.disable_lora()
        picture = generate(pipeline, "flux", num_inference_steps=1, joint_attention_kwargs={"scale": scale})
    assert torch.allclose(picture, bare, atol=1e-5) is not acts
    assert (acting_lora(watching.record()) is not None) is acts


def test_what_another_pipeline_of_the_same_models_took_off_is_not_said_to_act() -> None:
    """It is heard of the denoiser alone that it was taken off."""
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ["unet", "text_encoder"], size=0.2)
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        other = type(pipeline)(**pipeline.components)
        other.load_lora_weights(state, adapter_name="a")
        other.unload_lora_weights()
        assert torch.equal(generate(other, "sd15", num_inference_steps=1), bare)
    assert acting_lora(watching.record()) is None


def test_of_a_lora_that_was_loaded_into_one_model_after_the_other_both_strengths_are_told() -> None:
    pipeline = make_pipeline("sd15")
    state, alphas = pipeline.lora_state_dict(lora_state(pipeline, ["unet", "text_encoder"], size=0.2))
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_into_unet(state, alphas, pipeline.unet)
        pipeline.load_lora_into_text_encoder(state, alphas, pipeline.text_encoder)
    found = re.findall(r"([\d.]+) % in the (denoiser|text encoders)", acting_lora(watching.record()) or "")
    assert {side: float(figure) for figure, side in found} == {
        "denoiser": pytest.approx(share(pipeline.unet), abs=0.5),
        "text encoders": pytest.approx(share(pipeline.text_encoder), abs=0.5),
    }


@pytest.mark.parametrize("called", [False, True])
def test_what_was_fused_and_switched_off_stays_in_the_weights_until_a_call_takes_it_out(called: bool) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.2))
    pipeline.fuse_lora(components=["unet"])
    with sigmascope.watch(pipeline) as watching:
        pipeline.disable_lora()
        if called:
            generate(pipeline, "sd15", num_inference_steps=1)
        pipeline.unload_lora_weights()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    acts = not torch.allclose(picture, bare, atol=1e-5)
    assert acts is not called
    told = standing(watching.record())
    assert told is not None
    assert told.words == ("acts" if acts else "unknown")  # with which strength it was fused is not known


@pytest.mark.parametrize("off", ["unfuse_lora", "disable_lora"])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_what_is_taken_out_of_the_weights_with_another_strength_than_it_was_put_in_leaves_a_part(
    strength: float, off: str
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ["unet"], size=0.2))
        pipeline.fuse_lora(components=["unet"])
        pipeline.set_adapters("default_0", strength)
        getattr(pipeline, off)()
        if off == "unfuse_lora":
            pipeline.unload_lora_weights()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    acts = not torch.allclose(picture, bare, atol=1e-5)
    assert acts is (strength != 1.0)
    told = standing(watching.record())
    assert told is not None
    assert told.words == ("acts" if acts else "taken off" if off == "unfuse_lora" else "does nothing")
    assert not acts or told.says == "The LoRA acts in the denoiser: it is merged into the weights."
