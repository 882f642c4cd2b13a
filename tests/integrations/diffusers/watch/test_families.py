"""A watch on every family: a new one joins with its entry in `tests.families`."""

from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.family import NEGATIVE
from tests.families.pipelines import PROMPT
from tests.integrations.diffusers.marks import left_behind, marks

import sigmascope
from sigmascope.records.run import Run

STAGES = {
    "sd15": ["text_encoding", "model_sampling", "denoising", "latent_decoding"],
    "qwen_image": ["text_encoding", "text_encoding", "model_sampling", "denoising", "latent_decoding"],
    "wan_vace": [
        "text_encoding",
        "model_sampling",
        "latent_encoding",
        "latent_encoding",
        "denoising",
        "latent_decoding",
    ],
}
CALLS_PER_STEP = {"qwen_image": 2, "wan": 2, "wan_vace": 2}
"""Where guidance calls the denoiser for the prompt and the negative prompt apart."""
LATENTS = {
    "sd15": (1, 4, 16, 16),
    "sdxl": (1, 4, 16, 16),
    "flux": (1, 16, 16, 16),
    "sd3": (1, 16, 16, 16),
    "qwen_image": (1, 16, 1, 4, 4),
    "wan": (1, 16, 2, 4, 4),
    "wan_vace": (1, 16, 2, 4, 4),
}


@pytest.fixture(scope="module")
def watched() -> dict[str, Any]:
    """What each family gave unwatched and watched, its marks before and after, and the record."""
    return {}


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest, watched: dict[str, Any]) -> Any:
    family = request.param
    if family not in watched:
        expected = generate(make_pipeline(family), family, num_inference_steps=3)
        pipeline = make_pipeline(family)
        generate(pipeline, family, num_inference_steps=3)
        before = marks(pipeline)
        with sigmascope.watch(pipeline) as run:
            given = generate(pipeline, family, num_inference_steps=3)
        watched[family] = (family, run.record(), given, expected, before, marks(pipeline))
    return watched[family]


def test_the_output_is_the_same_bit_for_bit(case: Any) -> None:
    _, _, given, expected, _, _ = case
    assert torch.equal(given, expected)


def test_nothing_is_left_on_the_pipeline_its_parts_and_their_classes(case: Any) -> None:
    *_, before, after = case
    assert {key for key in before | after if before.get(key) != after.get(key)} == set()
    assert left_behind() == []


def test_the_stages_of_a_generation_are_found_in_order(case: Any) -> None:
    family, run, *_ = case
    (generation,) = run.stages
    assert generation.name == "generation"
    assert [stage.name for stage in generation.children] == STAGES.get(family, STAGES["sd15"])


def test_every_iteration_is_one_step_however_guidance_calls_the_denoiser(case: Any) -> None:
    family, run, *_ = case
    denoising = run.stage("denoising")
    assert len(denoising.steps) == 3
    calls = 3 * CALLS_PER_STEP.get(family, 1)
    assert denoising.facts["denoiser_calls"] == {FAMILIES[family].denoiser: calls}


def test_steps_lie_in_their_stage_one_after_another(case: Any) -> None:
    _, run, *_ = case
    denoising = run.stage("denoising")
    ends = [
        start + took for start, took in zip(denoising.steps.started, denoising.steps.seconds, strict=True)
    ]
    assert denoising.steps.started[0] >= 0
    assert all(end <= start for end, start in zip(ends, denoising.steps.started[1:], strict=False))
    assert ends[-1] <= denoising.seconds


def test_the_call_is_on_record(case: Any) -> None:
    family, run, *_ = case
    call = run.stage("generation").facts["call"]
    assert (call["num_inference_steps"], call["height"], call["width"], call["seed"]) == (3, 32, 32, 0)
    assert (call["batch_size"], call["has_image"]) == (1, False)
    assert call["num_frames"] == FAMILIES[family].call.get("num_frames")
    assert call["guidance_batches"] == (1 if family == "flux" else 2)


def test_prompts_are_on_record(case: Any) -> None:
    family, run, *_ = case
    prompts = {name: one["text"] for name, one in run.stage("generation").facts["prompts"].items()}
    guided = "negative_prompt" in FAMILIES[family].call
    assert prompts == {"prompt": PROMPT} | ({"negative_prompt": NEGATIVE} if guided else {})


def test_the_latent_that_is_decoded_has_its_true_shape(case: Any) -> None:
    family, run, *_ = case
    decoding = run.stage("latent_decoding")
    assert decoding.tensors["latent"].shape == LATENTS[family]
    assert decoding.tensors["picture"].shape[-2:] == (32, 32)


def test_embeddings_of_the_prompt_are_on_record(case: Any) -> None:
    family, run, *_ = case
    encoder = run.stage("text_encoding")
    assert encoder.tensors["prompt_embeds"].shape[0] == 1
    assert ("negative_prompt_embeds" in encoder.tensors) == (family not in ("flux", "qwen_image"))


def test_the_schedule_is_on_record(case: Any) -> None:
    _, run, *_ = case
    schedule = run.stage("model_sampling").facts
    assert len(schedule["timesteps"]) == schedule["num_timesteps"] == 3
    assert schedule["timesteps"] == sorted(schedule["timesteps"], reverse=True)


def test_the_pipeline_is_on_record_with_its_architecture(case: Any) -> None:
    family, run, *_ = case
    facts = run.stage("generation").facts["pipeline"]
    assert facts["class_name"] == FAMILIES[family].pipeline_class
    assert facts["architecture"] in ("UNet", "MMDiT", "DiT")


def test_the_record_is_complete_and_lacks_nothing(case: Any) -> None:
    _, run, *_ = case
    assert run.complete
    assert not [name for name in run.unavailable if name.startswith("watch")]


def test_the_record_survives_a_file(case: Any, tmp_path: Any) -> None:
    _, run, *_ = case
    run.save(tmp_path / "run.json")
    read: Run = sigmascope.load_run(tmp_path / "run.json")
    assert read.stage("generation").facts == run.stage("generation").facts
