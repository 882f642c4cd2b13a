from typing import Any

import pytest
import torch
from PIL import Image
from tests.families import FAMILIES, make_pipeline
from tests.pipeline.bench.pipelines import TinyPipeline, WithoutCallback

from sigmascope.errors import ConfigError
from sigmascope.pipeline.bench import BenchOptions, DiffusersSubject, run_benchmark
from sigmascope.records.performance import BenchCase, Made

CPU = torch.device("cpu")


def test_an_image_to_image_pipeline_takes_its_picture() -> None:
    from diffusers import StableDiffusionImg2ImgPipeline

    pipeline = StableDiffusionImg2ImgPipeline(
        **make_pipeline("sd15").components, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    picture = Image.new("RGB", (32, 32), "red")
    subject = DiffusersSubject("edit", pipeline, CPU, arguments={"image": picture, "strength": 1.0})
    (result,) = run_benchmark(subject, [BenchCase(steps=3)], BenchOptions(1, 0))
    assert result.failure is None
    assert result.made == Made(1, 32, 32)
    assert [stage.name for stage in result.runs[0].stage("generation").children] == [
        "text_encoding",
        "latent_encoding",
        "denoising",
        "latent_decoding",
    ]


def test_a_pipeline_that_takes_no_picture_says_so() -> None:
    subject = DiffusersSubject("tiny", TinyPipeline(), CPU, arguments={"image": "a picture"})
    with pytest.raises(ConfigError, match="--image: TinyPipeline does not take image"):
        subject.check(BenchCase())


class TwoDenoisers(TinyPipeline):
    """The first denoises the noisy half of the steps, the second the rest, as WAN 2.2 has them."""

    def __call__(self, num_inference_steps: int = 4, callback_on_step_end: Any = None) -> Any:  # type: ignore[override]
        latent = self.encode_prompt("")
        for step in range(num_inference_steps):
            denoiser: Any = self.transformer if step < 2 else self.others["transformer_2"]
            latent = denoiser(latent)
            callback_on_step_end(self, step, step, {})
        return [self.vae.decode(latent).reshape(1, 1, 2, 2)]


def test_the_steps_of_two_denoisers_are_one_row() -> None:
    pipeline = TwoDenoisers(transformer_2=torch.nn.Linear(4, 4))
    (result,) = run_benchmark(DiffusersSubject("wan", pipeline, CPU), [BenchCase()], BenchOptions(1, 0))
    assert result.failure is None
    assert len(result.runs[0].stage("denoising").steps) == 4


@pytest.mark.parametrize("pipeline", [TinyPipeline(), WithoutCallback()])
def test_steps_are_told_with_and_without_a_callback(pipeline: TinyPipeline) -> None:
    subject = DiffusersSubject("tiny", pipeline, CPU)
    (result,) = run_benchmark(subject, [BenchCase(steps=5)], BenchOptions(1, 0))
    assert len(result.runs[0].stage("denoising").steps) == 5


def test_the_users_own_callback_stays_the_users() -> None:
    seen: list[int] = []

    def mine(pipeline: object, index: int, timestep: object, values: dict[str, Any]) -> dict[str, Any]:
        seen.append(index)
        return values

    subject = DiffusersSubject("tiny", TinyPipeline(), CPU, arguments={"callback_on_step_end": mine})
    (result,) = run_benchmark(subject, [BenchCase(steps=2)], BenchOptions(1, 0))
    assert seen == [0, 1]
    assert len(result.runs[0].stage("denoising").steps) == 4  # each call of the denoiser


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("sd15", "wan"))) for name in FAMILIES],
)
def test_real_pipelines_are_measured(family: str) -> None:
    call = dict(FAMILIES[family].call)
    case = BenchCase(call.pop("width"), call.pop("height"), 1, call.pop("num_inference_steps"))
    case = BenchCase(case.width, case.height, 1, case.steps, call.pop("num_frames", None))
    subject = DiffusersSubject(family, make_pipeline(family), CPU, arguments=call)
    (result,) = run_benchmark(subject, [case], BenchOptions(2, 0))
    assert result.failure is None
    assert result.made == Made(1, case.width, case.height, case.frames)
    assert result.summary is not None
    assert result.summary.step is not None
