"""Whatever of a watch fails, the pipeline finishes, gives the same, and nothing is left on it."""

import random
from typing import Any, NoReturn

import pytest
import torch
from accelerate import cpu_offload
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers import denoising, loading, vae
from sigmascope.integrations.diffusers import denoising as denoisers
from sigmascope.integrations.diffusers import denoising as schedulers
from sigmascope.integrations.diffusers import hooks as instrument
from sigmascope.integrations.diffusers import hooks as module_calls
from sigmascope.integrations.diffusers import hooks as parts
from sigmascope.integrations.diffusers import loading as transfers
from sigmascope.integrations.diffusers import lora_application as loras
from sigmascope.integrations.diffusers import pipeline_call as calls
from sigmascope.integrations.diffusers import text_encoding as encoding_analysis
from sigmascope.integrations.diffusers import text_encoding as text
from sigmascope.integrations.diffusers import vae as latent_analysis
from sigmascope.integrations.diffusers import watch_session as activity
from sigmascope.integrations.diffusers import watch_session as hearing
from sigmascope.integrations.diffusers import watch_session as session
from sigmascope.monitor import recorder, scope
from sigmascope.monitor import recorder as live
from sigmascope.monitor.recorder import CURRENT

FAULTS: dict[str, tuple[Any, str]] = {
    f"{getattr(owner, '__name__', owner)}.{name}": (owner, name)
    for owner, names in {
        calls.Calls: ("attach_class", "attach", "_before", "_read", "_tell", "_tell_prompts"),
        calls: ("named_arguments", "call_facts", "prompts_of", "with_outcome", "seeds_of", "stored_prompts"),
        denoisers.Denoisers: ("attach", "_before"),
        denoising: ("number_of",),
        denoisers: ("denoisers_of", "hook_calls", "denoising_here"),
        denoising.Denoising: (
            "__init__",
            "called",
            "scheduler_stepped",
            "finish",
            "_commit",
            "weights_moved",
        ),
        loading.Loading: ("start", "attach_class", "_before_load", "_before_move"),
        loras.Loras: ("attach_class", "attach", "_before"),
        schedulers.Schedulers: ("attach", "_before_schedule", "_after_step"),
        schedulers: ("schedule_facts", "denoising_here", "end_finished", "holder_of"),
        text.TextEncoding: (
            "attach_class",
            "attach",
            "_before_prompt",
            "_before_encoder",
            "_before_tokenizer",
            "_begun",
        ),
        text: ("embeddings", "end_finished", "hook_calls", "readings_of", "tell"),
        encoding_analysis: ("capture_text_encoding_baseline", "analyze_text_encoding_results", "counts_seen"),
        transfers.Transfers: ("attach", "_put_on", "_before_move"),
        vae.VaeCalls: ("attach", "_before", "_before_tiles"),
        vae: ("first_tensor", "holder_of", "is_final", "known_before", "tell"),
        latent_analysis: ("capture_latent_decoding_baseline", "analyze_latent_decoding_results"),
        activity: ("guides",),
        activity.Activity: (
            "__init__",
            "is_in",
            "enter",
            "leave",
            "start_denoising",
            "end_denoising",
            "end",
            "weights_moved",
        ),
        hearing: ("_recorders_here",),
        instrument.Instrument: ("tap", "tap_class", "tap_ends", "tap_method"),
        instrument: ("listen",),
        module_calls: ("_hooked",),
        parts: ("pipeline_facts", "components_of"),
        session.Session: ("watch", "watch_class", "wants", "here", "_parts"),
        session: (
            "take_apart",
            "set_up_of",
            "pipelines_in",
            "with_findings",
            "redacted",
            "hears",
            "with_owners",
        ),
        recorder.Recorder: ("stage", "current_scope", "fact"),
        live.LiveStage: ("__enter__", "tensor", "fact", "record"),
        live: ("tensor_facts", "as_json"),
        scope.Scope: ("open", "add_step", "close", "freeze"),
    }.items()
    for name in names
}


def broken(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError("broken on purpose")


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return generate(make_pipeline("sd15"), "sd15", num_inference_steps=1)


MOVING = ("Transfers.", "weights_moved", "_before_tiles")
"""In the names of faults that take a VAE that is offloaded and tiled, which is slow."""


@pytest.fixture(scope="module")
def plain() -> Any:
    """One pipeline for all faults: what a fault left on it would show in the next."""
    pipeline = make_pipeline("sd15")
    generate(pipeline, "sd15", num_inference_steps=1)
    return pipeline


@pytest.fixture(scope="module")
def moving() -> Any:
    """Another one, whose VAE is offloaded and tiled."""
    pipeline = make_pipeline("sd15")
    cpu_offload(pipeline.vae, torch.device("cpu"))
    pipeline.vae.enable_tiling()
    generate(pipeline, "sd15", num_inference_steps=1)
    return pipeline


def watched_image(pipeline: Any, faults: list[str], everywhere: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            patch.setattr(*FAULTS[fault], broken)
        with sigmascope.watch(*(() if everywhere else (pipeline,)), sample_hz=None):
            return generate(pipeline, "sd15", num_inference_steps=1)


def nothing_is_left() -> bool:
    return left_behind() == [] and CURRENT.get() is None


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_reaches_nobody(fault: str, plain: Any, moving: Any, expected: Tensor) -> None:
    pipeline = moving if any(part in fault for part in MOVING) else plain
    before = marks(pipeline)
    assert torch.equal(watched_image(pipeline, [fault], everywhere=False), expected)
    assert marks(pipeline) == before
    assert nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_twenty_random_combinations_of_faults_reach_nobody(
    part: int, plain: Any, moving: Any, expected: Tensor
) -> None:
    chance = random.Random(part)
    pipeline = moving if part == 0 else plain
    before = marks(pipeline)
    for _ in range(20):
        faults = chance.sample(list(FAULTS), chance.randint(2, 6))
        image = watched_image(pipeline, faults, everywhere=chance.random() < 0.3)
        assert torch.equal(image, expected), faults
        assert nothing_is_left(), faults
    assert marks(pipeline) == before


@pytest.mark.parametrize(
    ("fault", "instrument_name"),
    [
        ("VaeCalls._before", "vae"),
        ("Schedulers._before_schedule", "scheduler"),
        ("Denoisers._before", "denoiser"),
    ],
)
def test_what_is_switched_off_is_told_and_the_rest_goes_on(
    fault: str, instrument_name: str, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault], broken)
        with sigmascope.watch(plain) as run:
            generate(plain, "sd15", num_inference_steps=3)
    assert run.unavailable[f"watch.{instrument_name}"] == "RuntimeError: broken on purpose"
    assert len([line for line in caplog.messages if f"watch.{instrument_name}" in line]) == 1
    names = [stage.name for stage in run.stage("generation").children]
    assert "text_encoding" in names
    assert len(names) == 3


def test_a_host_that_is_shaped_otherwise_is_left_alone() -> None:
    class Odd:
        components = "none"

        def __call__(self) -> int:
            return 7

    odd = Odd()
    with sigmascope.watch(odd, object(), 3) as run:
        assert odd() == 7
    assert run.complete
