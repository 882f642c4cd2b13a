import copy
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.pipeline.bench.pipelines import TinyPipeline, WithoutCallback
from torch import nn

from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.pipeline.bench import PipelineStages
from sigmascope.records.run import Run, Stage


def nothing() -> None:
    pass


def watched(pipeline: Any, *, calls_are_steps: bool = False, wait: Any = nothing, **call: Any) -> Run:
    monitor = PerformanceMonitor(sample_hz=None)
    with torch.no_grad(), monitor.monitor_generation():
        stages = PipelineStages(pipeline, monitor, wait, calls_are_steps=calls_are_steps)
        if not calls_are_steps:
            call["callback_on_step_end"] = stages.on_step_end
        with stages:
            pipeline(**call)
    return monitor.runs[-1]


def inner(run: Run) -> tuple[Stage, ...]:
    return run.stage("generation").children


def test_parts_are_stages_in_their_order() -> None:
    stages = inner(watched(TinyPipeline()))
    assert [stage.name for stage in stages] == ["text_encoding", "denoising", "latent_decoding"]


def test_a_method_that_calls_itself_is_one_stage() -> None:
    text = inner(watched(TinyPipeline()))[0]
    assert text.children == ()


def test_calls_for_guidance_belong_to_one_step() -> None:
    assert len(watched(TinyPipeline(), num_inference_steps=5).stage("denoising").steps) == 5


def test_the_monitor_knows_the_steps_too() -> None:
    metrics = watched(TinyPipeline()).stage("generation").facts["performance"]
    assert metrics["generation_time_per_step"] > 0


def test_without_a_callback_each_call_of_the_denoiser_is_a_step() -> None:
    run = watched(WithoutCallback(), calls_are_steps=True, num_inference_steps=4)
    assert len(run.stage("denoising").steps) == 4


def test_a_controlnet_runs_inside_the_step() -> None:
    class Guided(TinyPipeline):
        def encode_prompt(self, prompt: str, again: bool = True) -> torch.Tensor:
            return torch.zeros(1, 4)

    controlnet = nn.Linear(4, 4)
    pipeline = Guided(nn.Sequential(controlnet, nn.Linear(4, 4)), controlnet=controlnet)
    assert len(watched(pipeline).stage("denoising").steps) == 3


def test_the_device_is_waited_for_at_the_edges_of_stages_and_not_within_steps() -> None:
    waits: list[None] = []
    watched(TinyPipeline(), wait=lambda: waits.append(None), num_inference_steps=50)
    assert len(waits) == 6  # two for each of three stages


def test_nothing_is_left_on_the_pipeline() -> None:
    pipeline = TinyPipeline()
    before = (dict(vars(pipeline)), dict(vars(pipeline.vae)))
    watched(pipeline)
    assert (dict(vars(pipeline)), dict(vars(pipeline.vae))) == before
    assert not pipeline.transformer._forward_pre_hooks
    assert not pipeline.transformer._forward_hooks


def test_what_the_host_put_over_a_method_is_there_again() -> None:
    pipeline = TinyPipeline()
    own = pipeline.vae.decode
    pipeline.vae.decode = own  # type: ignore[method-assign]
    watched(pipeline)
    assert vars(pipeline.vae)["decode"] is own


class Failing(nn.Module):
    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no")


def test_a_failure_passes_unchanged_and_leaves_nothing() -> None:
    pipeline = TinyPipeline(Failing())
    with pytest.raises(ArithmeticError, match=r"^no$"):
        watched(pipeline)
    assert "encode_prompt" not in vars(pipeline)
    assert not pipeline.transformer._forward_pre_hooks


class Denoiser(nn.Linear):
    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(latent)) + 1


def test_the_stage_that_failed_says_so() -> None:
    monitor = PerformanceMonitor(sample_hz=None)
    pipeline = TinyPipeline(Failing())
    with (
        pytest.raises(ArithmeticError),
        monitor.monitor_generation(),
        PipelineStages(pipeline, monitor, nothing),
    ):
        pipeline()
    denoising = monitor.runs[-1].stage("denoising")
    assert (denoising.success, denoising.error) == (False, "ArithmeticError: no")


@pytest.mark.parametrize("pipeline_class", [TinyPipeline, WithoutCallback])
def test_a_denoiser_compiled_in_place_has_its_steps_and_is_not_compiled_again(
    pipeline_class: type[TinyPipeline],
) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    denoiser = Denoiser(4, 4)
    denoiser.compile(backend=counter)
    compiled = denoiser._compiled_call_impl
    pipeline = pipeline_class(denoiser)
    with torch.no_grad():
        pipeline()
    run = watched(pipeline, calls_are_steps=pipeline_class is WithoutCallback)
    assert len(run.stage("denoising").steps) == 3
    assert counter.frame_count == 1
    assert denoiser._compiled_call_impl is compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_real_pipelines_give_their_stages_and_steps(family: str) -> None:
    call = {**FAMILIES[family].call, "num_inference_steps": 3, "prompt": "a fox"}
    run = watched(make_pipeline(family), **call)
    names = {stage.name for stage in inner(run)}
    assert {"text_encoding", "denoising", "latent_decoding"} <= names
    assert len(run.stage("denoising").steps) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_watched_picture_is_bit_for_bit_the_unwatched_one(family: str) -> None:
    pipeline = make_pipeline(family)
    plain = copy.deepcopy(generate(pipeline, family))
    monitor = PerformanceMonitor(sample_hz=None)
    stages = PipelineStages(pipeline, monitor, nothing)
    with monitor.monitor_generation(), stages:
        picture = generate(pipeline, family, callback_on_step_end=stages.on_step_end)
    assert torch.equal(picture, plain)
