from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.pipeline.bench.pipelines import TinyPipeline

from sigmascope.errors import ConfigError
from sigmascope.pipeline.bench import call_arguments, check_call, parameters_of, what_was_made
from sigmascope.records.performance import BenchCase, Made


class OfImages(TinyPipeline):
    def __call__(self, prompt: str = "", num_images_per_prompt: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        pass


class Unconditional(TinyPipeline):
    def __call__(self, num_inference_steps: int = 3) -> Any:  # type: ignore[override]
        pass


def arguments(pipeline: object, case: BenchCase, **given: Any) -> dict[str, Any]:
    return call_arguments(pipeline, case, "a fox", 7, given)


def test_what_a_case_leaves_open_is_left_to_the_pipeline() -> None:
    assert set(arguments(TinyPipeline(), BenchCase())) == {"prompt", "generator"}


def test_the_noise_is_that_of_the_seed() -> None:
    generator = arguments(TinyPipeline(), BenchCase())["generator"]
    assert torch.equal(
        torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(7))
    )


def test_a_batch_is_asked_for_as_the_pipeline_has_it() -> None:
    assert arguments(OfImages(), BenchCase(batch=3))["num_images_per_prompt"] == 3
    assert arguments(TinyPipeline(), BenchCase(batch=3))["prompt"] == ["a fox"] * 3


def test_what_the_user_gives_wins_over_what_the_case_leaves_open() -> None:
    assert arguments(TinyPipeline(), BenchCase(), num_inference_steps=9)["num_inference_steps"] == 9
    check_call(TinyPipeline(), BenchCase(), {"num_inference_steps": 9})


@pytest.mark.parametrize(
    ("case", "name", "flag"),
    [
        (BenchCase(steps=4), "num_inference_steps", "--steps"),
        (BenchCase(64, 32), "height", "--resolution"),
        (BenchCase(frames=5), "num_frames", "--frames"),
        (BenchCase(), "num_images_per_prompt", "--batch"),
    ],
)
def test_runs_are_not_named_for_a_case_that_they_are_not_of(case: BenchCase, name: str, flag: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^--call {name}: the case {case.label} already sets it to .*Give only {flag}"
    ):
        check_call(OfImages(), case, {name: 9})


def test_open_ended_arguments_are_no_parameters() -> None:
    assert parameters_of(OfImages()) == {"prompt", "num_images_per_prompt"}


@pytest.mark.parametrize(
    ("case", "given", "flag"),
    [
        (BenchCase(64, 64), {}, "--resolution"),
        (BenchCase(frames=5), {}, "--frames"),
        (BenchCase(batch=2), {}, "--batch"),
        (BenchCase(), {"guidance_scale": 1.0}, "--call guidance_scale"),
        (BenchCase(), {"image": "a picture"}, "--image"),
    ],
)
def test_what_the_pipeline_does_not_take_is_named(case: BenchCase, given: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: Unconditional"):
        check_call(Unconditional(), case, given)


PICTURE = Image.new("RGB", (48, 32))


@pytest.mark.parametrize(
    ("output", "made"),
    [
        (([PICTURE, PICTURE],), Made(2, 48, 32)),
        (([[PICTURE] * 5],), Made(1, 48, 32, 5)),
        ((np.zeros((2, 32, 48, 3)),), Made(2, 48, 32)),
        ((np.zeros((1, 5, 32, 48, 3)),), Made(1, 48, 32, 5)),
        ((torch.zeros(2, 3, 32, 48),), Made(2, 48, 32)),
        (([np.zeros((5, 32, 48, 3))],), Made(1, 48, 32, 5)),
        (([object()],), Made(1)),
        ((torch.zeros(2, 77, 64),), Made(2)),
        (([],), Made(1)),
    ],
)
def test_what_was_made_is_told_from_any_output(output: object, made: Made) -> None:
    assert what_was_made(output) == made


def test_a_pipelines_output_class_is_read_too() -> None:
    from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput

    output = StableDiffusionPipelineOutput(images=[PICTURE], nsfw_content_detected=None)
    assert what_was_made(output) == Made(1, 48, 32)
