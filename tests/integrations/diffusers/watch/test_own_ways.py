"""What users do to pipelines that no pipeline of diffusers does by itself."""

import copy
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from tests.integrations.diffusers.watch.test_set_ups import TinyDenoiser
from torch import Tensor, nn

import sigmascope
from sigmascope.records.run import Stage


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert left_behind() == []


class Loop:
    """A pipeline of nobody's, with a scheduler."""

    def __init__(self, unet: Any = None, scheduler: Any = None) -> None:
        self.unet = unet or TinyDenoiser()
        self.scheduler = scheduler or diffusers.DDIMScheduler()

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet, "scheduler": self.scheduler}

    def __call__(self, steps: int) -> Tensor:
        return by_hand(self, steps)


def by_hand(pipe: Loop, steps: int) -> Tensor:
    sample = torch.ones(1, 4)
    pipe.scheduler.set_timesteps(steps)
    for timestep in pipe.scheduler.timesteps:
        sample = pipe.scheduler.step(pipe.unet(sample, timestep).detach(), timestep, sample).prev_sample
    return sample


def outline(stage: Stage) -> list[str]:
    return [f"{one.name} {len(one.steps)}" if one.name == "denoising" else one.name for one in stage.children]


def test_guidance_that_a_callback_switches_off_was_guidance(pipeline: Any) -> None:
    def unguided(pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            pipeline._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        return tensors

    call: dict[str, Any] = {"num_inference_steps": 4, "callback_on_step_end": unguided}
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", **call, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    assert run.stage("generation").facts["call"]["guidance_batches"] == 2
    assert outline(run.stage("generation"))[2] == "denoising 4"


class TwoPasses(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
    """Refines its own latents."""

    def __call__(self, *args: Any, output_type: str = "pt", **kwargs: Any) -> Any:
        latents = super().__call__(*args, output_type="latent", **kwargs).images
        return super().__call__(*args, **kwargs, latents=latents, output_type=output_type)


@pytest.mark.slow
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_each_pass_of_a_pipeline_that_calls_its_base_twice_has_its_denoising(is_everywhere: bool) -> None:
    pipeline = TwoPasses(**make_pipeline("sd15").components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    expected = generate(pipeline, "sd15", num_inference_steps=3)
    with sigmascope.watch(*(() if is_everywhere else (pipeline,))) as run:
        image = generate(pipeline, "sd15", num_inference_steps=3)
    assert torch.equal(image, expected)
    one_pass = ["text_encoding", "model_sampling", "denoising 3"]
    assert outline(run.stage("generation")) == [*one_pass, *one_pass, "latent_decoding"]


def test_a_callback_that_generates_with_its_own_pipeline_has_a_generation_inside(pipeline: Any) -> None:
    def preview(pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            before, pipeline.scheduler = pipeline.scheduler, diffusers.EulerDiscreteScheduler()
            kept = pipeline._guidance_scale, pipeline._num_timesteps
            generate(pipeline, "sd15", num_inference_steps=2)
            pipeline.scheduler = before
            pipeline._guidance_scale, pipeline._num_timesteps = kept
        return tensors

    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=3, callback_on_step_end=preview)
    (generation,) = run.stages
    stages = ["text_encoding", "model_sampling", "denoising 3", "latent_decoding"]
    assert outline(generation) == stages
    (inner,) = generation.children[2].children
    assert outline(inner) == [*stages[:2], "denoising 2", stages[3]]


@pytest.mark.parametrize("calls_the_class_s", [True, False])
def test_a_step_that_lies_on_the_scheduler_itself_is_heard(calls_the_class_s: bool) -> None:
    pipe = Loop()
    kind = type(pipe.scheduler)

    def step(noise: Tensor, timestep: Any, sample: Tensor) -> Any:
        if calls_the_class_s:
            return kind.step(pipe.scheduler, noise, timestep, sample)
        return type("Output", (), {"prev_sample": sample - 0.1 * noise})

    with sigmascope.watch(pipe) as run:
        pipe(2)
        pipe.scheduler.step = step
        before = marks(pipe.scheduler)
        pipe(3)
    assert vars(pipe.scheduler)["step"] is step
    assert {name: mark for name, mark in marks(pipe.scheduler).items() if "DDIM" not in name} == {
        name: mark for name, mark in before.items() if "DDIM" not in name
    }
    found = [(len(one.steps), one.facts["scheduler_steps"]) for one in run.walk() if one.name == "denoising"]
    assert found == [(2, 2), (3, 3)]


def test_a_denoiser_that_is_no_module_and_a_scheduler_that_is_wrapped_are_heard() -> None:
    class Engine:
        """Another runtime's."""

        def __call__(self, sample: Tensor, timestep: Tensor) -> Tensor:
            return sample * 0.5

    class Wrapped:
        """Hands on all that it has not itself."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    pipe = Loop(Engine(), Wrapped(diffusers.DDIMScheduler()))
    expected = pipe(3)
    with sigmascope.watch(pipe) as run:
        assert torch.equal(pipe(3), expected)
    assert outline(run.stage("generation")) == ["model_sampling", "denoising 3"]
    assert run.stage("denoising").facts["denoiser_calls"] == {"unet": 3}
    assert run.stage("denoising").facts["scheduler_steps"] == 3
    assert dict(run.unavailable) == {}


def test_a_vae_behind_a_wrapper_is_heard(pipeline: Any) -> None:
    class Replicated(nn.Module):
        """Hands on all that it has not itself."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    pipeline.vae = Replicated(pipeline.vae)
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
    assert run.stage("latent_decoding").facts["component"] == "vae"


def test_a_loop_that_sets_another_schedule_begins_another_denoising() -> None:
    pipe = Loop()
    with sigmascope.watch(pipe) as run:
        for steps in (2, 3):
            by_hand(pipe, steps)
    assert [len(one.steps) for one in run.walk() if one.name == "denoising"] == [2, 3]


def test_a_prior_and_a_denoiser_in_one_pipeline_have_a_denoising_each() -> None:
    class PriorAndDenoiser(Loop):
        """A prior with a scheduler of its own, then the denoiser."""

        prior, prior_scheduler = TinyDenoiser(), diffusers.DDPMScheduler()

        @property
        def components(self) -> dict[str, Any]:
            return {"prior": self.prior, "prior_scheduler": self.prior_scheduler, **super().components}

        def __call__(self, steps: int) -> Tensor:
            by_hand(Loop(self.prior, self.prior_scheduler), 2)
            return super().__call__(steps)

    pipe = PriorAndDenoiser()
    with sigmascope.watch(pipe) as run:
        pipe(3)
    (generation,) = run.stages
    assert outline(generation) == ["model_sampling", "denoising 2", "model_sampling", "denoising 3"]
    denoised = [one.facts["denoiser_calls"] for one in generation.children if one.name == "denoising"]
    assert denoised == [{"prior": 2}, {"unet": 3}]


def test_what_is_exported_or_traced_is_no_step() -> None:
    pipe = Loop()
    sample, timestep = torch.ones(1, 4), torch.tensor(1.0)
    with sigmascope.watch(pipe) as run:
        by_hand(pipe, 2)
        torch.export.export(pipe.unet, (sample, timestep), strict=False)
    assert len(run.stage("denoising").steps) == 2
    assert run.stage("denoising").facts["denoiser_calls"] == {"unet": 2}


def test_steps_of_a_second_scheduler_do_not_end_a_denoising_at_its_preview(pipeline: Any) -> None:
    audio = copy.deepcopy(pipeline.scheduler)

    def preview(pipeline: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        audio.set_timesteps(4)
        audio.step(tensors["latents"], timestep, tensors["latents"])
        if step == 1:
            pipeline.vae.decode(tensors["latents"])
        return {}

    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=4, callback_on_step_end=preview)
    assert outline(run.stage("generation")) == [
        "text_encoding",
        "model_sampling",
        "denoising 4",
        "latent_decoding",
    ]
    assert run.stage("denoising").facts["scheduler_steps"] == 4


class WholeStep(nn.Module):
    """A step of a loop, scheduler and all."""

    def __init__(self, pipe: Loop) -> None:
        super().__init__()
        self.pipe, self.unet = pipe, pipe.unet

    def forward(self, sample: Tensor, timestep: Tensor) -> Any:
        return self.pipe.scheduler.step(self.unet(sample, timestep), 500, sample).prev_sample


def test_a_scheduler_s_step_that_is_exported_is_none() -> None:
    pipe = Loop()
    with sigmascope.watch(pipe) as run:
        by_hand(pipe, 2)
        torch.export.export(WholeStep(pipe), (torch.ones(1, 4), torch.tensor(1.0)), strict=False)
    assert run.stage("denoising").facts["scheduler_steps"] == len(run.stage("denoising").steps) == 2


def test_a_timestep_without_a_number_switches_nothing_off() -> None:
    pipe = Loop()
    with sigmascope.watch(pipe) as run:
        torch.vmap(pipe.unet)(torch.ones(3, 4), torch.ones(3))
        pipe(2)
    assert "watch.denoiser" not in run.unavailable
    assert len(run.stage("generation").children[-1].steps) == 2
