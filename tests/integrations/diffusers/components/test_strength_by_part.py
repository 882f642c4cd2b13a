"""How strongly a LoRA acts in each part of a pipeline, after `set_adapters` gave its parts and blocks strengths of their own."""

import math
import re
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state
from torch import nn

import sigmascope
from sigmascope.analysis.lora_state import acting_lora

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


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_what_was_fused_in_one_part_acts_there_once_the_adapters_are_unloaded(part: str) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    with sigmascope.watch(pipeline) as watching:
        pipeline.load_lora_weights(lora_state(pipeline, ["unet", "text_encoder"], size=0.2))
        pipeline.fuse_lora(components=[part])
        pipeline.unload_lora_weights()
        picture = generate(pipeline, "sd15", num_inference_steps=1)
    assert not torch.equal(picture, bare)
    side = "denoiser" if part == "unet" else "text encoders"
    assert acting_lora(watching.record()) == f"The LoRA acts in the {side}: it is in the weights."
