"""A change that is planted in a real pipeline's call or set-up is named by the comparison with a run without it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.families.changes import CHANGES, Change, DroppedPages, with_lora
from tests.families.pipelines import generate, make_pipeline

import sigmascope
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import Run


def watched(pipe: Any, **call: Any) -> Run:
    with sigmascope.watch(pipe) as watching:
        generate(pipe, "sd15", **call)
    return watching.record()


@pytest.fixture(scope="module")
def before() -> Run:
    pipe = make_pipeline("sd15")
    watched(pipe)  # the first is never like the others
    return watched(pipe)


STEPS = Change("num_inference_steps 2 → 3", call={"num_inference_steps": 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=kind, marks=[pytest.mark.slow] if kind == "first run compiles" else [])
        for kind, change in {**CHANGES, "steps": STEPS}.items()
    ],
)
def test_a_planted_change_is_named(before: Run, change: Change) -> None:
    pipe = make_pipeline("sd15")
    change.act(pipe)
    if not change.in_first_call:
        watched(pipe, **change.call)
    assert change.words in what_changed([watched(pipe, **change.call)], [before]).headline.split(". ")[0]


@pytest.mark.slow
def test_the_strength_of_a_lora_is_named() -> None:
    runs = []
    for strength in (1.0, 0.5):
        pipe = make_pipeline("sd15")
        with_lora(pipe, strength)
        runs.append(watched(pipe))
    assert "LoRA unet.style strength 1.0 → 0.5" in what_changed([runs[1]], [runs[0]]).headline


@pytest.mark.slow
def test_weights_that_are_read_from_a_disk_again_are_named(before: Run) -> None:
    pipe = make_pipeline("sd15")
    if not DroppedPages(pipe.unet).works:
        pytest.skip("this system cannot be made to forget pages of a file here")
    assert "page faults from disk 0 → " in what_changed([watched(pipe)], [before]).headline


@pytest.mark.slow
def test_what_is_compiled_again_is_named() -> None:
    pipe = make_pipeline("sd15")
    pipe.unet.compile(backend="eager")
    watched(pipe)
    warm = watched(pipe)
    torch.compiler.reset()
    assert "graphs compiled 0 → " in what_changed([watched(pipe)], [warm]).headline


def test_another_version_of_a_library_is_named(before: Run) -> None:
    assert before.host is not None
    older = replace(before.host, libraries={**before.host.libraries, "torch": "2.12.0"})
    assert "→ 2.12.0" in what_changed([replace(before, host=older)], [before]).headline


def test_texts_among_the_arguments_are_private_where_prompts_are() -> None:
    pipe = make_pipeline("sd15")
    with sigmascope.watch(pipe, prompts="hash") as watching:
        generate(pipe, "sd15")
    recipe = watching.record().stages[0].facts["recipe"]
    assert recipe["arguments"]["eta"] == 0.0
    texts = {name for name, value in recipe["arguments"].items() if isinstance(value, str)}
    assert texts == {"output_type"}  # one of the pipeline's own words


def test_the_same_call_again_has_the_same_recipe_and_outputs(before: Run) -> None:
    again = what_changed([watched(make_pipeline("sd15"))], [before])
    assert {name for name in again.recipe if name != "processor used by others"} == set()
    assert again.output is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device")
class TestOnADevice:
    """Changes that only an accelerator has."""

    @pytest.fixture(scope="class")
    def on_device(self) -> Run:
        pipe = make_pipeline("sd15").to("cuda")
        watched(pipe)
        return watched(pipe)

    def test_offloading_to_the_host_is_named(self, on_device: Run) -> None:
        pipe = make_pipeline("sd15")
        pipe.enable_model_cpu_offload()
        watched(pipe)
        assert "unet offload none → model" in what_changed([watched(pipe)], [on_device]).headline

    def test_a_text_encoder_that_was_moved_is_named(self, on_device: Run) -> None:
        pipe = make_pipeline("sd15").to("cuda")
        pipe.text_encoder.to("cpu")
        embeddings = dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"))
        for name in embeddings:
            tokens = pipe.tokenizer("a fox", return_tensors="pt", padding="max_length").input_ids
            embeddings[name] = pipe.text_encoder(tokens)[0].to("cuda")
        with sigmascope.watch(pipe) as watching:
            pipe(**embeddings, num_inference_steps=2, height=32, width=32, output_type="pt")
        compared = what_changed([watching.record()], [on_device])
        assert compared.recipe["text_encoder device"] == ("cuda:0", "cpu")
