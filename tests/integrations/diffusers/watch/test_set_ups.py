"""Pipelines that are compiled, offloaded, modular, guided in other ways, or not diffusers' own."""

import gc
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.group_offload import needs_group_offload
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor, nn

import sigmascope
from sigmascope.integrations.diffusers import watch_session

CPU = torch.device("cpu")
CALLS: list[str] = []


def fake_backend(module: Any, _inputs: Any) -> Any:
    """A backend that compiles nothing and notes each graph."""
    CALLS.append("graph")
    return module.forward


def compiled(module: nn.Module, how: str) -> nn.Module:
    if how == "wrapped":
        return torch.compile(module, backend=fake_backend, fullgraph=True)  # type: ignore[return-value]
    module.compile(backend=fake_backend, fullgraph=True)
    return module


class TinyDenoiser(nn.Module):
    """What compiles in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        found: Tensor = self.linear(sample) + timestep
        return found


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    CALLS.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_compiled_denoiser_has_its_steps_in_one_graph(how: str, when: str) -> None:
    denoiser: nn.Module = TinyDenoiser()
    if when == "before":
        denoiser = compiled(denoiser, how)
    pipe = sigmascope_pipeline(denoiser)
    with sigmascope.watch(pipe) as run:
        if when == "inside":
            pipe.unet = compiled(denoiser, how)
        pipe(3)
    assert len(run.stage("denoising").steps) == 3
    assert run.stage("denoising").facts["denoiser_calls"] == {"unet": 3}
    assert CALLS == ["graph"]
    assert left_behind() == []


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_what_is_compiled_in_place_is_as_before() -> None:
    denoiser = compiled(TinyDenoiser(), "in place")
    pipe = sigmascope_pipeline(denoiser)
    before = vars(denoiser)["_compiled_call_impl"]
    with sigmascope.watch(pipe):
        pipe(2)
    assert vars(denoiser)["_compiled_call_impl"] is before
    assert CALLS == ["graph"]
    pipe(2)
    assert CALLS == ["graph"]


class OwnPipeline:
    """A pipeline of nobody's: parts by name, and a loop without callbacks, schedulers' steps or encode_prompt."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}

    def __call__(self, steps: int, *, calls_a_step: int = 1) -> Tensor:
        sample = torch.zeros(1, 4)
        for step in range(steps):
            timestep = torch.tensor(float(steps - step))
            for _ in range(calls_a_step):
                sample = self.unet(sample, timestep).detach()
        return sample


def sigmascope_pipeline(unet: nn.Module) -> OwnPipeline:
    return OwnPipeline(unet)


@pytest.mark.parametrize("calls_a_step", [1, 2, 3])
def test_without_a_scheduler_calls_at_one_timestep_are_one_step(calls_a_step: int) -> None:
    pipe = OwnPipeline(TinyDenoiser())
    with sigmascope.watch(pipe) as run:
        pipe(4, calls_a_step=calls_a_step)
    assert len(run.stage("denoising").steps) == 4
    assert run.stage("denoising").facts["denoiser_calls"] == {"unet": 4 * calls_a_step}


@pytest.mark.slow
def test_pipelines_that_come_and_go_are_all_heard() -> None:
    with sigmascope.watch() as run:
        session = watch_session.OPEN_SESSIONS[-1]
        for _ in range(30):  # a new denoiser is often where one lay that is gone
            pipe = OwnPipeline(TinyDenoiser())
            session.watch(pipe)
            pipe(2)
            del pipe
            gc.collect()
    denoised = [len(stage.steps) for stage in run.walk() if stage.name == "denoising"]
    assert sum(denoised) == 60
    assert left_behind() == []


def test_a_denoiser_alone_is_watched_in_anybodys_loop() -> None:
    denoiser = TinyDenoiser()
    before = marks(denoiser)
    with sigmascope.watch(denoiser) as run:
        for step in range(3):
            denoiser(torch.zeros(1, 4), torch.tensor(step))
    assert len(run.stage("denoising").steps) == 3
    assert marks(denoiser) == before


@pytest.mark.parametrize("kind", ["model", "group"])
def test_an_offloaded_pipeline_is_watched_and_gives_the_same(kind: str, unwatched: Tensor) -> None:
    if kind == "group":
        needs_group_offload()
    pipeline = make_pipeline("sd15")
    switch_on: dict[str, Any] = {
        "model": lambda: pipeline.enable_model_cpu_offload(device="cpu"),
        "group": lambda: pipeline.unet.enable_group_offload(onload_device=CPU, offload_type="leaf_level"),
    }
    switch_on[kind]()
    generate(pipeline, "sd15")
    before = marks(pipeline)
    with sigmascope.watch(pipeline) as run:
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    assert len(run.stage("denoising").steps) == 2
    assert run.stage("generation").facts["pipeline"]["components"]["unet"]["offload"] == kind
    assert marks(pipeline).keys() == before.keys()  # offloading makes hooks of its own anew after each call
    assert left_behind() == []


@pytest.mark.parametrize(("scale", "batches"), [(1.0, 1), (7.5, 2)])
def test_guidance_on_and_off_have_the_same_steps(pipeline: Any, scale: float, batches: int) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", guidance_scale=scale, num_inference_steps=3)
    assert len(run.stage("denoising").steps) == 3
    call = run.stage("generation").facts["call"]
    assert (call["guidance_scale"], call["guidance_batches"]) == (scale, batches)


def test_two_transformers_share_the_steps_of_one_denoising() -> None:
    import diffusers
    from tests.families import components

    parts = components.wan()
    second = make_pipeline("wan").transformer
    pipeline: Any = diffusers.WanPipeline(**parts, transformer_2=second, boundary_ratio=0.6)
    pipeline.set_progress_bar_config(disable=True)
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "wan", num_inference_steps=4)
    denoising = run.stage("denoising")
    calls = denoising.facts["denoiser_calls"]
    assert len(denoising.steps) == 4
    assert set(calls) == {"transformer", "transformer_2"}
    assert sum(calls.values()) == 8


def test_a_scheduler_that_calls_the_denoiser_twice_a_step_has_as_many_steps(pipeline: Any) -> None:
    from diffusers import HeunDiscreteScheduler

    pipeline.scheduler = HeunDiscreteScheduler.from_config(pipeline.scheduler.config)
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=3)
    denoising = run.stage("denoising")
    assert (
        len(denoising.steps) == denoising.facts["denoiser_calls"]["unet"] == len(pipeline.scheduler.timesteps)
    )


def test_a_preview_in_a_callback_lies_inside_the_denoising(pipeline: Any) -> None:
    def preview(pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipeline.vae.decode(tensors["latents"])
        return tensors

    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=3, callback_on_step_end=preview)
    generation, denoising = run.stage("generation"), run.stage("denoising")
    assert len(denoising.steps) == 3
    assert [stage.name for stage in denoising.children] == ["latent_decoding"] * 2
    assert [stage.name for stage in generation.children].count("denoising") == 1


def test_a_batch_and_a_latent_output_are_told(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_images_per_prompt=3, output_type="latent")
    assert run.stage("generation").facts["call"]["batch_size"] == 3
    assert "latent_decoding" not in [stage.name for stage in run.walk()]


def test_a_modular_pipeline_has_its_stages() -> None:
    from diffusers import StableDiffusionXLAutoBlocks

    whole = make_pipeline("sdxl")
    modular: Any = StableDiffusionXLAutoBlocks().init_pipeline()
    modular.update_components(**{n: p for n, p in whole.components.items() if p is not None})
    call = {"prompt": "a red fox", "num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    expected = modular(**call, generator=torch.Generator().manual_seed(0), output="images")
    before = marks(modular)
    with sigmascope.watch(modular) as run:
        images = modular(**call, generator=torch.Generator().manual_seed(0), output="images")
    assert torch.equal(images[0], expected[0])
    assert len(run.stage("denoising").steps) == 2
    names = [stage.name for stage in run.stage("generation").children]
    assert names[0] == "text_encoding"
    assert names[-1] == "latent_decoding"
    assert run.stage("generation").facts["prompts"]["prompt"]["text"] == "a red fox"
    assert marks(modular) == before
