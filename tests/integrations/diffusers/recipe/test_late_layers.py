"""Of a LoRA on late layers of a text encoder alone it is open whether it acts: pipelines leave some of them out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.families import generate, make_pipeline
from tests.families.encoders import clip
from tests.families.loras import lora_state, write
from tests.integrations.diffusers.recipe.test_idle_loras import encode, told

import sigmascope
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.lora_idle import idle_lora
from sigmascope.analysis.lora_state import standing

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Already found a `peft_config`")]
OPEN = {"lora_on_late_layers"}


def put_on(encoder: Any, *layers: int, name: str = "late") -> None:
    """An adapter with random factors on attention in some layers."""
    modules = rf".*layers\.({'|'.join(map(str, layers))})\.self_attn\.\w+_proj"
    torch.manual_seed(0)
    encoder.add_adapter(LoraConfig(r=2, target_modules=modules, init_lora_weights=False), name)


CASES: dict[str, tuple[str, str, tuple[int, ...], bool, bool]] = {
    "the last layer of SDXL's first encoder": ("sdxl", "text_encoder", (1,), False, True),
    "the last two of its four": ("sdxl", "text_encoder", (2, 3), True, True),
    "the last three of its four": ("sdxl", "text_encoder", (1, 2, 3), True, False),
    "a layer before it": ("sdxl", "text_encoder", (0,), True, False),
    "both": ("sdxl", "text_encoder", (0, 1), True, False),
    "the last layer of SD 1.5": ("sd15", "text_encoder", (1,), True, True),
    "FLUX uses the pooled output": ("flux", "text_encoder", (1,), True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lora_on_late_layers_alone_is_open(case: str) -> None:
    family, part, layers, acts, is_open = CASES[case]
    pipeline = make_pipeline(family)
    if max(layers) > 1:
        pipeline.register_modules(text_encoder=clip(16, layers=4))
    bare = generate(pipeline, family, num_inference_steps=1)
    put_on(getattr(pipeline, part), *layers)
    with sigmascope.watch(pipeline) as watching:
        picture = generate(pipeline, family, num_inference_steps=1)
    run = watching.record()
    assert torch.equal(picture, bare) is not acts
    assert told(run) == (OPEN if is_open else set())
    found = standing(run)
    assert found is not None
    assert found.words == ("unknown" if is_open else "acts")
    says = f"it is on late layers of {part} alone ({4 * len(layers)} weights)"
    assert (says in headline(run)) is is_open
    assert run.unavailable == {}


def test_beside_a_lora_that_acts_nothing_is_said() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    put_on(pipeline.text_encoder_2, 0)
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert told(watching.record()) == set()


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_layers_of_strength_0_are_none_that_it_acts_on(strength: float) -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 0, 1)
    for name, layer in pipeline.text_encoder.named_modules():
        if "layers.0." in name and hasattr(layer, "scaling"):
            layer.scaling["late"] = strength
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert (told(watching.record()) >= OPEN) is (strength == 0.0)
    assert (acting_lora(watching.record()) is None) is (strength == 0.0)


def test_zeros_on_late_layers_do_nothing_whatever_is_used() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    for name, factor in pipeline.text_encoder.named_parameters():
        factor.data *= "lora_B" not in name
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1)
    assert told(watching.record()) == {"lora_is_zero"}
    assert idle_lora(watching.record()) is not None


def test_of_embeddings_that_were_made_with_it_in_a_watch_it_is_open_too() -> None:
    pipeline = make_pipeline("sdxl")
    put_on(pipeline.text_encoder, 1)
    with sigmascope.watch(pipeline):
        made = encode(pipeline)
    with sigmascope.watch(pipeline) as watching:
        generate(pipeline, "sdxl", num_inference_steps=1, **made)
    assert told(watching.record()) == {"lora_encoder_not_run"}


def test_an_attached_lora_is_judged_likewise(tmp_path: Path) -> None:
    pipeline = make_pipeline("sdxl")
    for only, found in (("layers.1.", OPEN), ("layers.0.", set())):
        state = lora_state(pipeline, ["text_encoder"], size=0.2, only=only)
        path = write(state, tmp_path / "style.safetensors")
        with sigmascope.attach_lora(pipeline, path), sigmascope.watch(pipeline) as watching:
            generate(pipeline, "sdxl", num_inference_steps=1)
        assert told(watching.record()) == found
