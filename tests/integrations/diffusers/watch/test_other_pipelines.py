"""Pipelines beyond the seven families: their stages and steps are right, and what they make is the same bit for bit."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integrations.diffusers import image_pipelines as images
from tests.integrations.diffusers import other_pipelines as others
from tests.integrations.diffusers.marks import left_behind, marks

import sigmascope
from sigmascope.integrations.diffusers.embeddings import embeddings
from sigmascope.records.run import Run, Stage

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed:FutureWarning"
)  # diffusers' own

TEXT, SCHEDULE, ENCODE, DECODE = "text_encoding", "model_sampling", "latent_encoding", "latent_decoding"
EXPECTED: dict[Callable[[], others.Made], list[str]] = {
    others.image_to_image: [TEXT, SCHEDULE, ENCODE, "denoising 2", DECODE],
    others.controlnet: [TEXT, SCHEDULE, "denoising 4", DECODE],
    others.pixart: [TEXT, SCHEDULE, "denoising 4", DECODE],
    others.ltx_video: [TEXT, SCHEDULE, "denoising 4", DECODE],
    images.stable_video: ["image_encoding", ENCODE, SCHEDULE, "denoising 4", DECODE, DECODE],
    others.pixels: [SCHEDULE, "denoising 4"],
}
"""What each does one after the other, with the steps of its denoising."""


def outline(stage: Stage) -> list[str]:
    return [f"{one.name} {len(one.steps)}" if one.name == "denoising" else one.name for one in stage.children]


def watched_as_unwatched(make: Callable[[], others.Made]) -> Run:
    pipeline, call = make()
    pipeline.set_progress_bar_config(disable=True)
    expected = others.made_by(pipeline, call)
    before = marks(pipeline)
    with sigmascope.watch(pipeline) as run:
        made = others.made_by(pipeline, call)
    assert torch.equal(made, expected)
    assert marks(pipeline) == before
    assert left_behind() == []
    assert dict(run.unavailable) == {}
    return run.record()


@pytest.mark.slow
@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_the_stages_and_steps_are_right_and_the_output_is_the_same(make: Callable[[], others.Made]) -> None:
    run = watched_as_unwatched(make)
    (generation,) = run.stages
    assert outline(generation) == EXPECTED[make]
    denoising = run.stage("denoising")
    assert denoising.facts["denoiser_calls"] == {denoising.facts["component"]: len(denoising.steps)}


def test_a_pipeline_of_two_has_a_generation_for_each() -> None:
    run = watched_as_unwatched(images.kandinsky)
    (whole,) = run.stages
    assert [stage.name for stage in whole.children] == ["generation", "generation"]
    prior, decoder = whole.children
    assert outline(prior) == [TEXT, TEXT, SCHEDULE, "denoising 3", "image_encoding"]
    assert outline(decoder) == [SCHEDULE, "denoising 4", DECODE]
    assert decoder.children[-1].facts["component"] == "movq"


def test_the_time_of_a_controlnet_is_in_the_steps_and_the_component_stays_the_denoiser() -> None:
    pipeline, call = others.controlnet()
    pipeline.set_progress_bar_config(disable=True)
    forward = pipeline.controlnet.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return forward(*args, **kwargs)

    pipeline.controlnet.forward = slow
    with sigmascope.watch(pipeline) as run:
        others.made_by(pipeline, call)
    denoising = run.stage("denoising")
    assert len(denoising.steps) == 4
    assert min(denoising.steps.seconds) > 0.05
    assert denoising.facts["component"] == "unet"
    assert denoising.facts["denoiser_calls"] == {"unet": 4}


def test_a_controlnet_that_raises_has_begun_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, call = others.controlnet()
    pipeline.set_progress_bar_config(disable=True)

    def forward(*_args: Any, **_kwargs: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(pipeline.controlnet, "forward", forward)
    with sigmascope.watch(pipeline) as run, pytest.raises(MemoryError):
        others.made_by(pipeline, call)
    denoising = run.stage("denoising")
    assert (len(denoising.steps), denoising.facts["component"]) == (1, None)


PROMPT, NEGATIVE = torch.ones(2, 7, 16), torch.zeros(2, 7, 16)
MASK, POOLED, IDS = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 24), torch.zeros(7, 3)


@pytest.mark.parametrize(
    ("result", "accepts_negative", "names"),
    [
        ((PROMPT, NEGATIVE), True, ["prompt_embeds", "negative_prompt_embeds"]),
        ((PROMPT, None), True, ["prompt_embeds"]),
        (
            (PROMPT, MASK, NEGATIVE, MASK),
            True,
            ["prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"],
        ),
        (
            (PROMPT, NEGATIVE, MASK, MASK),
            True,
            ["prompt_embeds", "negative_prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds_mask"],
        ),
        (
            (PROMPT, MASK.float(), NEGATIVE, MASK.float()),
            True,
            ["prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"],
        ),
        (
            (PROMPT, NEGATIVE, POOLED, POOLED),
            True,
            [
                "prompt_embeds",
                "negative_prompt_embeds",
                "pooled_prompt_embeds",
                "negative_pooled_prompt_embeds",
            ],
        ),
        ((PROMPT, None, POOLED, None), True, ["prompt_embeds", "pooled_prompt_embeds"]),
        ((PROMPT, POOLED, IDS), False, ["prompt_embeds", "pooled_prompt_embeds", "text_ids"]),
        (PROMPT, False, ["prompt_embeds"]),
        (None, True, []),
    ],
)
def test_embeddings_are_told_apart_by_their_shapes(
    result: Any, accepts_negative: bool, names: list[str]
) -> None:
    assert list(embeddings(result, accepts_negative)) == names


def test_the_negative_prompt_of_a_pipeline_with_masks_is_no_mask() -> None:
    text = watched_as_unwatched(others.pixart).stage("text_encoding")
    assert text.tensors["negative_prompt_embeds"].shape == text.tensors["prompt_embeds"].shape
    assert text.tensors["negative_prompt_embeds_mask"].shape == text.tensors["prompt_embeds"].shape[:2]
