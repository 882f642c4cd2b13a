"""Public reports of pictures that differ, rebuilt on a small pipeline: the first sentence says what was the matter."""

from typing import Any

import pytest
import torch
from tests.families.changes import lora_file
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import Run


def watched(pipe: Any, family: str = "sd15", **call: Any) -> Run:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, family, **call)
    return watching.record()


def first_sentence(now: Run, before: Run) -> str:
    return what_changed([now], [before]).headline.split(". ")[0]


@pytest.fixture
def pipe() -> Any:
    return make_pipeline("sd15")


def test_pictures_that_vary_with_the_batch(pipe: Any) -> None:
    """diffusers 2659: one seed, and slightly other pictures in a batch."""
    before, now = (watched(pipe, num_images_per_prompt=count) for count in (1, 2))
    assert "batch_size 1 → 2" in first_sentence(now, before)


def test_generators_in_another_order() -> None:
    """diffusers 2560: a list of generators, of which each picture takes the one at its place."""
    pipe, sides = make_pipeline("sd15"), []
    for seeds in ((1001, 1002), (1002, 1001)):
        call = {"generator": [torch.Generator().manual_seed(seed) for seed in seeds], "output_type": "pt"}
        with sigmascope.watch(pipe) as watching, torch.no_grad():
            pipe(["a fox", "a fox"], num_inference_steps=1, height=32, width=32, **call)
        sides.append(watching.record())
    assert "seed 1001, 1002 → 1002, 1001" in first_sentence(sides[1], sides[0])


def test_a_lora_that_was_fused_and_unfused_leaves_other_weights(pipe: Any, tmp_path: Any) -> None:
    """diffusers 5170: the same seed gives another picture than before the LoRA was fused and unfused."""
    before = watched(pipe)
    pipe.load_lora_weights(str(lora_file(tmp_path, 1)))
    pipe.fuse_lora()
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    said = first_sentence(watched(pipe), before)
    assert said.startswith("The outputs differ from the latent of denoising on: unet weights ")


def test_weights_that_were_edited_uncounted_between_two_watches(pipe: Any) -> None:
    """Averaged weights copied in, as diffusers' EMAModel.copy_to does: `param.data.copy_` moves no counter."""
    before = watched(pipe)
    for parameter in pipe.unet.parameters():
        parameter.data.copy_(parameter.data * 0.9)
    assert "unet weights " in first_sentence(watched(pipe), before)


@pytest.mark.slow
def test_a_lora_that_is_fused_and_unfused_while_watched(pipe: Any, tmp_path: Any) -> None:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15")
        pipe.load_lora_weights(str(lora_file(tmp_path, 1)))
        pipe.fuse_lora()
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
        generate(pipe, "sd15")
    first, second = (
        stage.facts["recipe"]["models"]["unet"]
        for stage in watching.record().stages
        if stage.name == "generation"
    )
    assert first != second


def test_attention_of_another_kind(pipe: Any) -> None:
    """AUTOMATIC1111/stable-diffusion-webui 3476: other pictures by the same parameters, since attention is xformers'."""
    before = watched(pipe)
    pipe.enable_attention_slicing(1)
    assert "attention processors AttnProcessor2_0 → SlicedAttnProcessor" in first_sentence(
        watched(pipe), before
    )


def test_a_generator_that_goes_on_from_its_last_picture(pipe: Any) -> None:
    """diffusers 4055: the exact same call twice, with one generator that was seeded once."""
    generator, sides = torch.Generator().manual_seed(0), []
    for _ in range(2):
        with sigmascope.watch(pipe) as watching, torch.no_grad():
            pipe("hello", num_inference_steps=1, height=32, width=32, generator=generator, output_type="pt")
        sides.append(watching.record())
    assert "generator state " in first_sentence(sides[1], sides[0])


def test_embeddings_that_stay_when_they_are_unloaded() -> None:
    """diffusers 6974: `unload_textual_inversion` takes the tokens off the first tokenizer and text encoder alone."""
    pipe = make_pipeline("sdxl")
    before = watched(pipe, "sdxl")
    for number in ("", "_2"):
        encoder, tokenizer = (getattr(pipe, f"{part}{number}") for part in ("text_encoder", "tokenizer"))
        learned = torch.ones(encoder.get_input_embeddings().weight.shape[1])
        pipe.load_textual_inversion(learned, token="<s0>", text_encoder=encoder, tokenizer=tokenizer)
    pipe.unload_textual_inversion()
    assert "text_encoder_2 weights " in first_sentence(watched(pipe, "sdxl"), before)


@pytest.mark.slow
def test_a_scheduler_that_draws_beside_the_generator_that_the_call_gives() -> None:
    """diffusers 13678: stochastic sampling of flows draws from PyTorch's own generator, whatever the call was given."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe, sides = make_pipeline("sd3"), []
    for is_stochastic in (True, False):
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(
            pipe.scheduler.config, stochastic_sampling=is_stochastic
        )
        sides.append([watched(pipe, "sd3") for _ in range(2)])
    assert first_sentence(*reversed(sides[0])).startswith(
        "The outputs differ from the latent of denoising on: global generator state cpu "
    )
    assert "global generator" not in what_changed(sides[1][1:], sides[1][:1]).headline
    assert sides[1][0].stages[0].facts["recipe"]["global_states"] == {}


def test_a_seed_that_was_set_once_for_several_calls(pipe: Any) -> None:
    """Without a generator each call goes on where the last one ended."""
    sides = []
    for is_set in (True, False, True):
        if is_set:
            torch.manual_seed(7)
        with sigmascope.watch(pipe) as watching, torch.no_grad():
            pipe("hello", num_inference_steps=1, height=32, width=32, output_type="pt")
        sides.append(watching.record())
    assert "on: global generator state cpu " in first_sentence(sides[1], sides[0])
    assert "global" not in what_changed([sides[2]], [sides[0]]).headline


def test_an_element_of_a_weight_that_no_fingerprint_looks_at(pipe: Any) -> None:
    """A fingerprint takes 64 elements of each weight: of a change to another one it says that it was not looked at."""
    before, weight = watched(pipe), pipe.unet.conv_in.weight
    fingerprint = before.stages[0].facts["recipe"]["models"]["unet"]
    with torch.no_grad():
        for place in range(weight.numel()):
            weight.view(-1)[place] += 1.0
            now = watched(pipe)
            if now.stages[0].facts["recipe"]["models"]["unet"] == fingerprint:
                break
            weight.view(-1)[place] -= 1.0
    said = first_sentence(now, before)
    assert "nothing in the recipe explains it" in said
    assert "more than 64 values of each weight" in said
