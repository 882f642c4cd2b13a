"""A change that is planted in a real pipeline's call or set-up is named by the comparison with a run without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families.pipelines import PROMPT, generate, make_pipeline

import sigmascope
from sigmascope.analysis.recipe import what_changed
from sigmascope.records.run import Run

Change = Callable[[Any], dict[str, Any] | None]
"""Does something to the pipeline, or gives arguments for the call."""


def watched(pipe: Any, **call: Any) -> Run:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", **call)
    return watching.record()


@pytest.fixture(scope="module")
def before() -> Run:
    return watched(make_pipeline("sd15"))


def to_bfloat16(pipe: Any) -> None:
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.to(torch.bfloat16)


def with_euler(pipe: Any) -> None:
    from diffusers import EulerDiscreteScheduler

    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)


def with_lora(pipe: Any, strength: float = 1.0) -> None:
    from peft import LoraConfig

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    pipe.unet.add_adapter(config, "style")
    pipe.unet.set_adapters("style", strength)


CHANGES: dict[str, tuple[Change, str]] = {
    "prompt": (lambda pipe: {"prompt": "a dog"}, f"prompt {PROMPT} → a dog"),
    "negative prompt": (
        lambda pipe: {"negative_prompt": "blurred"},
        "negative_prompt blurry, low quality → blurred",
    ),
    "seed": (lambda pipe: {"seed": 4}, "seed 0 → 4"),
    "steps": (lambda pipe: {"num_inference_steps": 3}, "num_inference_steps 2 → 3"),
    "guidance": (lambda pipe: {"guidance_scale": 3.0}, "guidance_scale 7.5 → 3.0"),
    "batch": (lambda pipe: {"num_images_per_prompt": 2}, "batch_size 1 → 2"),
    "eta": (lambda pipe: {"eta": 0.5}, "eta 0.0 → 0.5"),
    "dtype": (to_bfloat16, "text_encoder dtype float32 → bfloat16"),
    "attention slicing": (
        lambda pipe: pipe.enable_attention_slicing(),
        "attention processors AttnProcessor2_0 → SlicedAttnProcessor",
    ),
    "VAE tiles": (lambda pipe: pipe.vae.enable_tiling(), "vae tiling False → True"),
    "scheduler": (with_euler, "scheduler DDIMScheduler → EulerDiscreteScheduler"),
    "LoRA": (with_lora, "LoRAs none → unet.style"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_change_is_named(before: Run, name: str) -> None:
    change, cause = CHANGES[name]
    pipe = make_pipeline("sd15")
    call = change(pipe)
    changed = what_changed([watched(pipe, **(call if isinstance(call, dict) else {}))], [before])
    assert cause in changed.headline


def test_the_strength_of_a_lora_is_named() -> None:
    runs = []
    for strength in (1.0, 0.5):
        pipe = make_pipeline("sd15")
        with_lora(pipe, strength)
        runs.append(watched(pipe))
    assert "LoRA unet.style strength 1.0 → 0.5" in what_changed([runs[1]], [runs[0]]).headline


def test_texts_among_the_arguments_are_private_where_prompts_are() -> None:
    pipe = make_pipeline("sd15")
    with sigmascope.watch(pipe, prompts="hash") as watching:
        generate(pipe, "sd15")
    recipe = watching.record().stages[0].facts["recipe"]
    assert recipe["arguments"]["eta"] == 0.0
    assert not any(isinstance(value, str) for value in recipe["arguments"].values())


def test_the_same_call_again_has_the_same_recipe_and_outputs(before: Run) -> None:
    again = what_changed([watched(make_pipeline("sd15"))], [before])
    assert {name for name in again.recipe if name != "processor used by others"} == set()
    assert again.output is None
