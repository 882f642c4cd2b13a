"""Loops that no pipeline runs, under a watch that names none: what is seen of them, and what is none."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverSinglestepScheduler,
    HeunDiscreteScheduler,
)
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor, nn

import sigmascope
from sigmascope.integrations.diffusers import own_loops
from sigmascope.records.run import Stage

optimizers: Any = sys.modules["torch.optim.optimizer"]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    kept = dict(optimizers._global_optimizer_post_hooks)
    yield
    assert optimizers._global_optimizer_post_hooks == kept
    assert left_behind() == []


class Block(nn.Module):
    """Takes the timestep's embedding under the timestep's name, as the blocks of many denoisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mixed: Tensor = self.conv(x) + t[:, :, None, None]
        return mixed


class Plain(nn.Module):
    """A denoiser of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 3)
        self.block = Block()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        mixed: Tensor = self.block(x, self.embed(t.float()[:, None]))
        return mixed


class Classifier(nn.Module):
    """Takes a timestep as well, as those that guide do, and gives classes."""

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) + timesteps[:, None]


class Wrapped(nn.Module):
    """What k-diffusion's samplers call: guidance around another model, by noise level."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner_model = inner

    def forward(self, input: Tensor, sigma: Tensor, scale: float = 2.0) -> Tensor:
        plain, asked = self.inner_model(torch.cat([input] * 2), torch.cat([sigma] * 2)).chunk(2)
        guided: Tensor = plain + scale * (asked - plain)
        return guided


@torch.no_grad()
def ddpm(model: nn.Module, steps: int = 4, batch: int = 2) -> Tensor:
    """Ho et al. 2020, algorithm 2, with the noise left out."""
    x = torch.ones(batch, 3, 8, 8)
    for step in reversed(range(steps)):
        x = x - 0.1 * model(x, torch.full((batch,), step))
    return x


@torch.no_grad()
def euler(model: nn.Module) -> Tensor:
    """Karras et al. 2022, algorithm 1 without its second order."""
    sigmas = [8.0, 4.0, 2.0, 1.0, 0.0]
    x = torch.ones(1, 3, 8, 8) * sigmas[0]
    for sigma, following in pairwise(sigmas):
        slope = (x - model(x, torch.tensor([sigma]))) / sigma
        x = x + slope * (following - sigma)
    return x


def outline(stage: Stage) -> list[str]:
    return [f"{one.name} {len(one.steps)}" if one.name == "denoising" else one.name for one in stage.children]


@pytest.fixture(scope="module")
def parts() -> Any:
    return make_pipeline("sd15")


@torch.no_grad()
def by_hand(
    parts: Any, steps: int = 3, *, calls: int = 1, image: Tensor | None = None, preview: bool = False
) -> Tensor:
    """What diffusers' docs call to deconstruct a pipeline."""
    tokens = parts.tokenizer(["a fox"], padding="max_length", return_tensors="pt").input_ids
    text = parts.text_encoder(tokens)[0]
    latents = torch.ones(1, 4, 8, 8)
    if image is not None:
        latents = parts.vae.encode(image).latent_dist.mode()
    parts.scheduler.set_timesteps(steps)
    timesteps = parts.scheduler.timesteps if image is None else parts.scheduler.timesteps[1:]
    for step, timestep in enumerate(timesteps):
        for _ in range(calls):
            noise = parts.unet(latents, timestep, encoder_hidden_states=text).sample
        latents = parts.scheduler.step(noise, timestep, latents).prev_sample
        if preview and step == 0:
            parts.vae.decode(latents)
    picture: Tensor = parts.vae.decode(latents).sample
    return picture


def test_a_deconstructed_pipeline_is_a_generation_like_its_own(parts: Any) -> None:
    expected, before = by_hand(parts), marks(parts)
    with sigmascope.watch() as run:
        found = by_hand(parts)
    assert torch.equal(found, expected)
    assert marks(parts) == before
    (generation,) = run.stages
    assert outline(generation) == ["text_encoding", "model_sampling", "denoising 3", "latent_decoding"]
    call, pipeline = generation.facts["call"], generation.facts["pipeline"]
    assert [call[name] for name in ("num_inference_steps", "height", "batch_size")] == [3, found.shape[2], 1]
    assert {part["role"] for part in pipeline["components"].values()} == {
        "denoiser",
        "scheduler",
        "text_encoder",
        "vae",
    }
    assert generation.facts["recipe"]["models"].keys() == {"unet", "vae", "text_encoder"}
    assert run.stage("denoising").facts["scheduler_steps"] == 3


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "guidance by two calls": ({"calls": 2}, ["model_sampling", "denoising 3", "latent_decoding"]),
    "from an image": (
        {"image": torch.zeros(1, 3, 16, 16)},
        ["latent_encoding", "model_sampling", "denoising 2", "latent_decoding"],
    ),
    "a preview": (
        {"preview": True},
        ["model_sampling", "denoising 3", "latent_decoding"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_generations_in_a_row_are_two(parts: Any, case: str) -> None:
    how, stages = CASES[case]
    with sigmascope.watch() as run:
        by_hand(parts, **how)
        by_hand(parts, **how)
    assert [outline(stage) for stage in run.stages] == [["text_encoding", *stages]] * 2
    assert run.stages[0].facts["call"]["guidance_batches"] == (2 if how.get("calls") else 1)


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_plain_denoiser_is_told_by_how_it_is_called(is_made_inside: bool) -> None:
    model = Plain()
    expected = ddpm(model)
    with sigmascope.watch() as run:
        if is_made_inside:
            weights, model = model.state_dict(), Plain()
            model.load_state_dict(weights)
        assert torch.equal(ddpm(model), expected)
        ddpm(model, batch=1)
    assert [outline(stage) for stage in run.stages] == [["denoising 4"]] * 2
    assert [stage.facts["call"]["batch_size"] for stage in run.stages] == [2, 1]
    assert "__call__" not in vars(Plain)
    assert "__call__" not in vars(Block)


def test_a_wrapped_denoiser_is_one_and_its_parts_are_none() -> None:
    model = Wrapped(Plain())
    with sigmascope.watch() as run:
        euler(model)
        assert "__call__" not in vars(Block)  # one look was enough: later steps cost nothing more
        euler(model)
    assert [outline(stage) for stage in run.stages] == [["denoising 4"]] * 2
    assert list(run.stages[0].facts["pipeline"]["components"]) == ["denoiser"]


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 3, 8, 8), torch.full((2,), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def classify(model: nn.Module) -> None:
    guide = Classifier().eval()
    for step in range(3):
        guide(torch.ones(2, 3, 8, 8), torch.full((2,), step))


@torch.no_grad()
def evaluate(model: nn.Module, batch: int, batches: int = 12) -> None:
    """The loss on data that was not trained on, at timesteps drawn at random, as in Ho et al. 2020, equation 14."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        model(torch.ones(batch, 3, 8, 8), torch.randint(0, 1000, (batch,), generator=generator))


def evaluate_latents(parts: Any) -> None:
    """The same of a latent diffusion model, whose VAE and text encoder work for each batch."""
    generator, scheduler = torch.Generator().manual_seed(0), DDIMScheduler()
    for _ in range(3):
        with torch.no_grad():
            text = parts.text_encoder(torch.ones(1, 8, dtype=torch.long))[0]
            latents = parts.vae.encode(torch.zeros(1, 3, 16, 16)).latent_dist.mode()
            timestep = torch.randint(0, 1000, (1,), generator=generator)
            noisy = scheduler.add_noise(latents, torch.ones_like(latents), timestep)
            parts.unet(noisy, timestep, encoder_hidden_states=text)


NONE: dict[str, Callable[[], object]] = {
    "evaluation": lambda: evaluate(Plain().eval(), 4),
    "evaluation of few batches": lambda: evaluate(Plain().eval(), 4, batches=4),
    "evaluation of single pictures": lambda: evaluate(Plain().eval(), 1),
    "training": lambda: train(Plain()),
    "training in eval mode": lambda: train(Plain().eval()),
    "a classifier": lambda: classify(Plain()),
    "one call": lambda: Plain().eval()(torch.ones(2, 3, 8, 8), torch.zeros(2)),
}


@pytest.mark.parametrize("what", NONE)
def test_what_is_no_generation(what: str) -> None:
    with sigmascope.watch() as run:
        NONE[what]()
    assert run.stages == ()
    assert "watch.own_loops" not in run.unavailable


def test_evaluating_a_latent_diffusion_model_is_no_generation(parts: Any) -> None:
    with sigmascope.watch() as run:
        evaluate_latents(parts)
    assert {stage.name for stage in run.stages} == {"text_encoding", "latent_encoding"}


def test_calls_of_a_named_denoiser_at_random_timesteps_are_kept_without_a_generation() -> None:
    model = Plain().eval()
    with sigmascope.watch(model) as run:
        evaluate(model, 4)
    assert [stage.name for stage in run.stages] == ["denoising"]


@torch.no_grad()
def churned(model: nn.Module) -> Tensor:
    """Karras et al. 2022, algorithm 2: before each step the noise level is raised a little, and no level comes twice."""
    x, sigmas = torch.ones(1, 3, 8, 8), [8.0, 6.0, 4.0, 3.0, 2.0, 1.0]
    for sigma, following in pairwise(sigmas):
        raised = sigma * 1.4
        slope = (x - model(x, torch.tensor([raised]))) / raised
        x = x + slope * (following - raised)
        slope = (x - model(x, torch.tensor([following * 0.99]))) / following
    return x


@torch.no_grad()
def there_and_back(model: nn.Module) -> None:
    """Inversion to noise and generation from it, without a scheduler."""
    for step in (10, 200, 400, 600, 800, 990, 790, 590, 390, 190):
        model(torch.ones(1, 3, 8, 8), torch.tensor([step]))


@pytest.mark.parametrize("way", [churned, there_and_back])
def test_loops_whose_timesteps_go_back_in_some_order_are_generations(
    way: Callable[[nn.Module], object],
) -> None:
    with sigmascope.watch() as run:
        way(Plain())
    assert [stage.name for stage in run.stages] == ["generation"]


def test_guidance_shows_without_a_decoding_where_a_scheduler_makes_steps_of_fewer_samples() -> None:
    model, scheduler, latents = Plain(), DDIMScheduler(), torch.ones(3, 3, 8, 8)
    with sigmascope.watch() as run, torch.no_grad():
        scheduler.set_timesteps(4)
        for timestep in scheduler.timesteps:
            plain, asked = model(torch.cat([latents] * 2), timestep.expand(6)).chunk(2)
            latents = scheduler.step(plain + 2 * (asked - plain), timestep, latents).prev_sample
    call = run.stages[0].facts["call"]
    assert (call["batch_size"], call["guidance_batches"]) == (3, 2)


def test_what_is_sampled_between_epochs_is_a_generation() -> None:
    model = Plain().eval()
    with sigmascope.watch() as run:
        train(model)
        ddpm(model)
    assert [outline(stage) for stage in run.stages] == [["denoising 4"]]


class Breaks(Plain):
    """Fails at a timestep."""

    def __init__(self, error: type[BaseException], at: int = 1) -> None:
        super().__init__()
        self.error, self.at = error, at

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if int(t[0]) == self.at:
            raise self.error("broke")
        return super().forward(x, t)


@pytest.mark.parametrize(("error", "at"), [(ValueError, 1), (KeyboardInterrupt, 1), (ValueError, 0)])
def test_a_loop_that_breaks_keeps_what_was_seen(error: type[BaseException], at: int) -> None:
    with pytest.raises(error, match="broke"), sigmascope.watch() as run:
        ddpm(Breaks(error, at))
    (generation,) = run.stages
    assert not generation.success
    assert outline(generation) == [f"denoising {4 - at}"]


def test_an_error_after_the_loop_is_not_its_own() -> None:
    def generate_and_fail() -> None:
        ddpm(Plain())
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"), sigmascope.watch() as run:
        generate_and_fail()
    assert run.stages[0].success


def test_the_next_loop_after_one_that_broke_is_another_generation() -> None:
    with sigmascope.watch() as run:
        with pytest.raises(ValueError, match="broke"):
            ddpm(Breaks(ValueError))
        ddpm(Plain())
    assert [stage.success for stage in run.stages] == [False, True]


def test_a_loop_in_another_thread_is_a_generation() -> None:
    with sigmascope.watch() as run:
        for _ in range(2):
            thread = threading.Thread(target=ddpm, args=(Plain(),))
            thread.start()
            thread.join()
    assert [outline(stage) for stage in run.stages] == [["denoising 4"]] * 2


def test_a_generation_that_the_host_names_is_the_host_s(parts: Any) -> None:
    with sigmascope.watch() as run:
        for _ in range(2):
            with sigmascope.stage("generation"):
                by_hand(parts)
    assert [outline(stage)[2:] for stage in run.stages] == [["denoising 3", "latent_decoding"]] * 2


@pytest.mark.slow
def test_a_compiled_denoiser_has_its_steps() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Plain(), backend="eager")
    with sigmascope.watch() as run:
        ddpm(compiled)  # type: ignore[arg-type]
    torch._dynamo.reset()
    assert [outline(stage) for stage in run.stages] == [["denoising 4"]]


def test_what_a_loop_is_followed_by_is_not_in_its_time() -> None:
    with sigmascope.watch() as run:
        ddpm(Plain())
        time.sleep(0.05)
    generation = run.stages[0]
    denoising = run.stage("denoising")
    last = denoising.started_seconds + denoising.steps.started[-1] + denoising.steps.seconds[-1]
    assert generation.started_seconds + generation.seconds == pytest.approx(last, abs=1e-3)


@pytest.mark.parametrize("watched", ["vae", "scheduler"])
def test_a_vae_and_a_scheduler_can_be_named_beside_the_denoiser(parts: Any, watched: str) -> None:
    with sigmascope.watch(parts.unet, getattr(parts, watched)) as run:
        by_hand(parts, 3)
        by_hand(parts, 2, calls=2)
    stages = {"vae": ["denoising {}", "latent_decoding"], "scheduler": ["model_sampling", "denoising {}"]}
    for generation, steps in zip(run.stages, (3, 2), strict=True):
        assert generation.name == "generation"
        assert outline(generation) == [name.format(steps) for name in stages[watched]]
        assert generation.facts["call"]["num_inference_steps"] == steps
        assert sum(
            generation.children[-1 if watched == "scheduler" else 0].facts["denoiser_calls"].values()
        ) == (3 if steps == 3 else 4)


def test_a_denoiser_beside_the_named_one_is_not_heard() -> None:
    named = Plain()
    with sigmascope.watch(named) as run:
        ddpm(Plain())
        ddpm(named, 3)
    assert [(stage.name, outline(stage)) for stage in run.stages] == [("generation", ["denoising 3"])]


def test_one_call_of_a_named_denoiser_is_kept_without_a_generation() -> None:
    named = Plain().eval()
    with sigmascope.watch(named) as run, torch.no_grad():
        named(torch.ones(2, 3, 8, 8), torch.zeros(2))
    assert [(stage.name, len(stage.steps)) for stage in run.stages] == [("denoising", 1)]


@torch.no_grad()
def warm_up(parts: Any) -> None:
    text = parts.encode_prompt("a fox", "cpu", 1, False)[0]
    for _ in range(2):
        parts.unet(torch.ones(1, 4, 8, 8), 500, encoder_hidden_states=text)


def test_a_thread_that_warms_the_denoiser_of_a_pipeline_makes_no_generation(parts: Any) -> None:
    with sigmascope.watch() as run:
        generate(parts, "sd15")
        thread = threading.Thread(target=warm_up, args=(parts,))
        thread.start()
        thread.join()
    assert [stage.name for stage in run.stages if stage.name == "generation"] == ["generation"]


@torch.no_grad()
def heun(model: nn.Module) -> Tensor:
    """Karras et al. 2022, algorithm 1: two calls a step, but for the last."""
    sigmas = [8.0, 4.0, 2.0, 1.0, 0.0]
    x = torch.ones(1, 3, 8, 8) * sigmas[0]
    for sigma, following in pairwise(sigmas):
        slope = (x - model(x, torch.tensor([sigma]))) / sigma
        if following:
            ahead = x + slope * (following - sigma)
            slope = (slope + (ahead - model(ahead, torch.tensor([following]))) / following) / 2
        x = x + slope * (following - sigma)
    return x


def test_a_solver_of_second_order_has_its_steps_and_is_not_guidance() -> None:
    with sigmascope.watch() as run:
        heun(Plain())
    (generation,) = run.stages
    denoising = run.stage("denoising")
    assert (len(denoising.steps), denoising.facts["denoiser_calls"]) == (4, {"denoiser": 7})
    assert generation.facts["call"]["guidance_batches"] is None


def test_a_loop_with_the_parts_of_a_pipeline_that_was_called_is_a_generation_too(parts: Any) -> None:
    with sigmascope.watch() as run:
        generate(parts, "sd15", num_inference_steps=2)
        by_hand(parts, 4)
        by_hand(parts, 3, calls=2)
    assert [stage.name for stage in run.stages] == ["generation"] * 3
    for generation, steps in zip(run.stages[1:], (4, 3), strict=True):
        expected = ["text_encoding", "model_sampling", f"denoising {steps}", "latent_decoding"]
        assert outline(generation) == expected
        assert generation.facts["pipeline"]["class_name"] == "own loop"
    calls = [s.facts["denoiser_calls"] for g in run.stages for s in g.children if s.name == "denoising"]
    assert [sum(each.values()) for each in calls] == [2, 4, 6]


class Unheard(nn.Module):
    """Says nowhere that it takes a timestep."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x


@pytest.mark.parametrize("is_training", [False, True])
def test_what_is_not_recognised_is_said_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_training: bool
) -> None:
    monkeypatch.setattr(own_loops, "_LOOK_SECONDS", 0.01)
    module = Unheard().train(is_training)
    with sigmascope.watch():
        for _ in range(10):
            module(torch.ones(1, 4))
        said = caplog.text
    assert ("Unheard works" in said and "sigmascope.watch(unet, vae)" in said) is not is_training


def test_a_loop_that_the_host_records_itself_stays_the_hosts() -> None:
    """Its own denoising, or steps in a stage of another name: nothing of ours stands beside them."""
    model = Plain()
    for name in ("denoising", "sampling"):
        with torch.no_grad(), sigmascope.watch() as watching, sigmascope.stage(name):
            x = torch.randn(1, 3, 8, 8)
            for t in reversed(range(4)):
                with sigmascope.step():
                    x = x - 0.1 * model(x, torch.full((1,), t))
        assert [(s.name, len(s.steps)) for s in watching.record().walk()] == [(name, 4)]


def test_a_watch_within_a_watch_sees_the_loop_as_the_outer_one_does(parts: Any) -> None:
    with sigmascope.watch() as outer:
        with sigmascope.watch() as inner:
            by_hand(parts)
        by_hand(parts, 2)
    stages = ["text_encoding", "model_sampling", "denoising {}", "latent_decoding"]
    seen = [[outline(stage) for stage in run.stages] for run in (inner, outer)]
    three, two = ([name.format(steps) for name in stages] for steps in (3, 2))
    assert seen == [[three], [three, two]]


def test_the_recipe_has_the_switches_that_held_in_the_loop() -> None:
    """A loop without a VAE is known to be over when `no_grad` and autocast are."""
    model = Plain().eval()
    with sigmascope.watch() as run:
        with torch.autocast("cpu", torch.bfloat16):
            ddpm(model)
        for step in range(3):
            model(torch.ones(2, 3, 8, 8), torch.full((2,), step))
    switches = [stage.facts["recipe"]["surroundings"] for stage in run.stages]
    assert [(held["autocast"], held["gradients"]) for held in switches] == [
        ("cpu bfloat16", "False"),
        ("off", "True"),
    ]


@torch.no_grad()
def flow(model: nn.Module, steps: int) -> Tensor:
    """Lipman et al. 2023: time runs from the noise at 0 to the picture at 1."""
    x = torch.ones(1, 3, 8, 8)
    for step in range(steps):
        x = x + model(x, torch.tensor([step / steps])) / steps
    return x


@pytest.mark.parametrize("way", [ddpm, flow])
def test_a_loop_after_one_of_another_length_is_another_generation(way: Callable[..., Tensor]) -> None:
    model = Plain()
    with sigmascope.watch() as run:
        for steps in (4, 3, 5):
            way(model, steps)
    assert [outline(stage) for stage in run.stages] == [[f"denoising {steps}"] for steps in (4, 3, 5)]


@torch.no_grad()
def repaint(parts: Any) -> None:
    """Lugmayr et al. 2022: the schedule jumps back to noisier steps, and past its end once more."""
    from diffusers import RePaintScheduler

    scheduler, x = RePaintScheduler(), torch.ones(1, 4, 8, 8)
    text, generator = parts.encode_prompt("a fox", "cpu", 1, False)[0], torch.Generator().manual_seed(0)
    scheduler.set_timesteps(4, jump_length=2, jump_n_sample=2)
    last = scheduler.timesteps[0] + 1
    for timestep in scheduler.timesteps:
        if timestep < last:
            noise = parts.unet(x, timestep, encoder_hidden_states=text).sample
            x = scheduler.step(noise, timestep, x, x, torch.ones_like(x), generator).prev_sample
        else:
            x = scheduler.undo_step(x, last, generator)
        last = timestep


def test_a_schedule_that_jumps_back_is_one_generation(parts: Any) -> None:
    with sigmascope.watch() as run:
        repaint(parts)
    generations = [outline(stage) for stage in run.stages if stage.name == "generation"]
    assert [[name.split()[0] for name in stages] for stages in generations] == [
        ["model_sampling", "denoising"]
    ]


class Spending(Plain):
    """Needs ten milliseconds of the processor a call, on a clock of the test's."""

    spent_ns = 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.spent_ns += 10_000_000
        return super().forward(x, t)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("is_named", [False, True])
def test_what_the_host_computes_between_steps_is_in_no_steps_processor_time(
    monkeypatch: pytest.MonkeyPatch, calls: int, is_named: bool
) -> None:
    model = Spending()
    for module in ("sigmascope.monitor.scope", "sigmascope.integrations.diffusers.denoising"):
        monkeypatch.setattr(f"{module}.process_time_ns", lambda: model.spent_ns)
    with sigmascope.watch(*([model] if is_named else [])) as run, torch.no_grad():
        for step in (4, 3, 2, 1):
            for _ in range(calls):
                model(torch.ones(1, 3, 8, 8), torch.tensor([step]))
            model.spent_ns += 1_000_000_000  # a preview
            time.sleep(0.001)  # however many processors there are, it takes a while
    assert run.stage("denoising").steps.cpu_seconds == pytest.approx([0.01 * calls] * 4)


@torch.no_grad()
def guided(parts: Any, scheduler: Any, breaks_off_at: int | None = None) -> None:
    """Two calls a step, each with a timestep of its own; the schedule is set elsewhere."""
    x, text = torch.ones(1, 4, 8, 8), torch.zeros(1, 4, parts.unet.config.cross_attention_dim)
    for step, timestep in enumerate(scheduler.timesteps):
        for call in range(2):
            if (step, call) == (breaks_off_at, 1):
                return
            x = parts.unet(x, timestep.clone(), text).sample
        x = scheduler.step(x, timestep, x).prev_sample


def denoisings_in(run: Any) -> list[Stage]:
    inside = (stage for generation in run.stages for stage in generation.children)
    return [stage for stage in inside if stage.name == "denoising"]


def test_two_calls_a_step_are_two_calls_of_one_step(parts: Any) -> None:
    scheduler = DDIMScheduler()
    with sigmascope.watch() as run:
        for steps in (5, 3):
            scheduler.set_timesteps(steps)
            guided(parts, scheduler)
    denoisings = denoisings_in(run)
    assert [len(one.steps) for one in denoisings] == [5, 3]
    assert [one.facts["denoiser_calls"] for one in denoisings] == [{"unet": 10}, {"unet": 6}]


def test_a_loop_that_was_broken_off_between_two_calls_of_a_step_and_begins_anew_is_another(
    parts: Any,
) -> None:
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    with sigmascope.watch() as run:
        guided(parts, scheduler, breaks_off_at=2)
        guided(parts, scheduler)
    denoisings = denoisings_in(run)
    assert [one.facts["scheduler_steps"] for one in denoisings] == [2, 4]
    assert sum(one.facts["denoiser_calls"]["unet"] for one in denoisings) == 5 + 8


def test_a_named_denoiser_has_one_name_in_the_record() -> None:
    model = Plain()
    with sigmascope.watch(model) as run:
        ddpm(model)
    (generation,) = run.stages
    assert list(generation.facts["pipeline"]["components"]) == ["denoiser"]
    assert run.stage("denoising").facts["denoiser_calls"] == {"denoiser": 4}


def test_a_named_unet_has_the_name_that_pipelines_give_it(parts: Any) -> None:
    with sigmascope.watch(parts.unet, parts.vae) as run:
        by_hand(parts, 2)
    (generation,) = run.stages
    denoising = run.stage("denoising")
    assert denoising.facts["component"] == "unet"
    assert denoising.facts["component"] in generation.facts["pipeline"]["components"]


def in_turn(first: nn.Module, second: nn.Module, steps: int = 4, *, apart: int = 0) -> None:
    """Two loops whose steps alternate; the second's timesteps are so much higher."""
    x = torch.ones(1, 3, 8, 8)
    with torch.no_grad():
        for step in range(steps, 0, -1):
            first(x, torch.tensor([10 * step]))
            second(x, torch.tensor([10 * step + apart]))


def unclear(run: Any) -> list[str]:
    return [
        str(stage.facts["steps_unclear"]) for stage in run.record().walk() if "steps_unclear" in stage.facts
    ]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("apart", [0, 5])
def test_loops_that_alternate_are_said_to_be_unclear(is_named: bool, apart: int) -> None:
    first, second = Plain(), Plain()
    with sigmascope.watch(*([first, second] if is_named else [])) as run:
        in_turn(first, second, apart=apart)
    assert unclear(run) == ["denoiser and denoiser_2 were called in turn"]
    assert run.stage("denoising").facts["denoiser_calls"] == {"denoiser": 4, "denoiser_2": 4}
    (told,) = (finding for finding in run.record().findings if finding.id == "time.steps_unclear")
    assert "which cannot be told: denoiser and denoiser_2 were called in turn" in told.message


def test_two_loops_on_one_model_are_said_to_be_unclear() -> None:
    model = Plain()
    with sigmascope.watch(model) as run, torch.no_grad():
        for step in (40, 30, 40, 30, 20, 10, 20, 10):
            model(torch.ones(1, 3, 8, 8), torch.tensor([step]))
    assert unclear(run) == ["timesteps went back and forth"]


@torch.no_grad()
def on_one_model(*lengths: int, is_in_turn: bool, is_shared: bool = False) -> None:
    """Loops on one model, whose schedules are all set before the first of them begins."""
    model = Plain()
    schedulers = [DDIMScheduler() for _ in lengths]
    schedulers = schedulers[:1] * len(lengths) if is_shared else schedulers
    for scheduler, length in zip(schedulers, lengths, strict=True):
        scheduler.set_timesteps(length)
    latents = [torch.ones(1, 3, 8, 8) for _ in lengths]
    order = [(step, loop) for loop, length in enumerate(lengths) for step in range(length)]
    for step, loop in sorted(order) if is_in_turn else order:
        timestep = schedulers[loop].timesteps[step]
        noise = model(latents[loop], timestep[None])
        latents[loop] = schedulers[loop].step(noise, timestep, latents[loop]).prev_sample


@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (6, 4)])
def test_loops_on_one_model_whose_schedulers_step_in_turn_are_said_to_be_unclear(
    lengths: tuple[int, int],
) -> None:
    with sigmascope.watch() as run:
        on_one_model(*lengths, is_in_turn=True)
    assert [len(stage.steps) for stage in run.record().walk() if stage.name == "denoising"] == [sum(lengths)]
    assert unclear(run) == ["scheduler and scheduler_2 made steps in turn"]


def test_loops_in_turn_that_share_a_scheduler_are_said_to_be_unclear() -> None:
    with sigmascope.watch() as run:
        on_one_model(4, 4, is_in_turn=True, is_shared=True)
    assert set(unclear(run)) == {"timesteps came again that the schedule has once"}


@pytest.mark.parametrize("lengths", [(4, 4), (4, 6), (6, 4)])
def test_loops_one_after_another_have_the_steps_of_their_own_schedules(lengths: tuple[int, int]) -> None:
    with sigmascope.watch() as run:
        on_one_model(*lengths, is_in_turn=False)
    assert [len(stage.steps) for stage in run.record().walk() if stage.name == "denoising"] == [*lengths]
    assert unclear(run) == []


@pytest.mark.parametrize("kind", [HeunDiscreteScheduler, DPMSolverSinglestepScheduler])
def test_a_schedule_that_names_a_timestep_twice_is_one_loop(kind: Any) -> None:
    model, scheduler = Plain(), kind()
    with sigmascope.watch() as run, torch.no_grad():
        scheduler.set_timesteps(4)
        latents = torch.ones(1, 3, 8, 8)
        for timestep in scheduler.timesteps:
            latents = scheduler.step(model(latents, timestep[None]), timestep, latents).prev_sample
    assert len(run.stage("denoising").steps) == len(scheduler.timesteps)
    assert unclear(run) == []


def test_a_scheduler_that_only_follows_another_s_steps_makes_none() -> None:
    """Sound beside pictures: one call of the model, and a scheduler for each."""
    model, first, second = Plain(), DDIMScheduler(), DDIMScheduler()
    with sigmascope.watch() as run, torch.no_grad():
        for scheduler in (first, second):
            scheduler.set_timesteps(4)
        latents = torch.ones(1, 3, 8, 8)
        for timestep in first.timesteps:
            noise = model(latents, timestep[None])
            latents = first.step(noise, timestep, latents).prev_sample
            second.step(noise, timestep, latents)
    assert [len(stage.steps) for stage in run.record().walk() if stage.name == "denoising"] == [4]
    assert unclear(run) == []


@pytest.mark.parametrize("apart", [0, 5])
def test_loops_that_alternate_have_their_own_steps_in_watches_of_their_own(apart: int) -> None:
    first, second = Plain(), Plain()
    with sigmascope.watch(first) as one, sigmascope.watch(second) as other:
        in_turn(first, second, apart=apart)
    for run in (one, other):
        denoising = run.stage("denoising")
        assert (len(denoising.steps), denoising.facts["denoiser_calls"]) == (4, {"denoiser": 4})
        assert unclear(run) == []


def test_a_base_and_its_refiner_are_one_loop_of_two() -> None:
    base, refiner = Plain(), Plain()
    with sigmascope.watch() as run, torch.no_grad():
        for model, step in ((base, 40), (base, 30), (refiner, 20), (refiner, 10)):
            model(torch.ones(1, 3, 8, 8), torch.tensor([step]))
    denoising = run.stage("denoising")
    assert len(denoising.steps) == 4
    assert denoising.facts["component_turns"] == [["denoiser", 0], ["denoiser_2", 2]]
    assert unclear(run) == []


@pytest.mark.parametrize("make", [ddpm, euler, heun])
def test_solvers_are_one_loop(make: Callable[[nn.Module], Tensor]) -> None:
    with sigmascope.watch() as run:
        make(Plain())
    assert unclear(run) == []


def test_windows_of_one_picture_are_calls_of_one_step() -> None:
    model = Plain()
    with sigmascope.watch() as run, torch.no_grad():
        for step in (3, 2, 1):
            for _ in range(5):
                model(torch.ones(1, 3, 8, 8), torch.tensor([step]))
    assert (len(run.stage("denoising").steps), unclear(run)) == (3, [])


class Around(Plain):
    """Denoises with another model in each of its own calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        ddpm(self.inner, 3, len(x))
        return super().forward(x, t)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_loop_within_a_denoisers_call_is_part_of_that_call(is_named: bool) -> None:
    inner = Plain()
    outer = Around(inner)
    with sigmascope.watch(*([outer, inner] if is_named else [])) as run:
        ddpm(outer)
    denoising = run.stage("denoising")
    assert (len(denoising.steps), denoising.facts["denoiser_calls"]) == (4, {"denoiser": 4})
    assert unclear(run) == []
