"""Whatever of a watch fails, the pipeline finishes, gives the same, and nothing is left on it."""

import functools
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from accelerate import cpu_offload
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers import components, denoising, pipeline_call, watch_session
from sigmascope.integrations.diffusers.watch_session import Session
from sigmascope.monitor import hooks, recorder, scope
from sigmascope.monitor.recorder import CURRENT
from sigmascope.probes.models import pipeline_facts

BREAKABLE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        pipeline_call,
        ("named_arguments", "call_facts", "texts_of_call", "with_outcome", "seeds_of", "stored_prompts"),
    ),
    (
        pipeline_call,
        ("other_arguments", "loras_of"),
    ),
    (
        pipeline_call.CallObserver,
        ("attach_class", "attach", "_before", "_own", "_tell_prompts", "_tell_recipe"),
    ),
    (pipeline_call, ("denoisers_of", "current_stack")),
    (pipeline_call, ("schedule_facts", "end_complete_denoising", "holder_of", "start_denoising")),
    (pipeline_call.DenoiserObserver, ("attach", "_before", "hook_method")),
    (denoising, ("number_of",)),
    (denoising.Denoising, ("__init__", "called", "scheduler_stepped", "finish", "_commit")),
    (denoising.Denoising, ("scheduler_began",)),
    (watch_session.Session, ("_note_load", "own_work")),
    (denoising.Denoising, ("weights_moved",)),
    (pipeline_call.SchedulerObserver, ("attach", "_before_schedule", "_before_step")),
    (components.LoadingObserver, ("start", "attach_class", "_before_load", "_before_move")),
    (components.TransferObserver, ("attach", "_put_on", "_before_move")),
    (components.LoraObserver, ("attach_class", "attach", "_before")),
    (components, ("embeddings", "end_complete_denoising", "readings_of", "record_text_analysis")),
    (components, ("capture_text_encoding_baseline", "analyze_text_encoding_results", "counts_seen")),
    (components.TextEncodingObserver, ("attach_class", "attach", "_before_prompt", "_before_encoder")),
    (components.TextEncodingObserver, ("_before_tokenizer", "_seen_before", "hook_method")),
    (
        components,
        ("first_tensor", "holder_of", "is_final_decode", "capture_vae_baseline", "record_vae_analysis"),
    ),
    (components, ("capture_latent_decoding_baseline", "analyze_latent_decoding_results")),
    (components.VaeObserver, ("attach", "_before", "_before_tiles")),
    (watch_session, ("asks_for_guidance", "frames_here", "take_apart", "set_up_of", "pipelines_in")),
    (watch_session, ("with_findings", "with_owners", "pipeline_facts", "components_of")),
    (watch_session.StageStack, ("__init__", "is_in", "enter", "leave", "end_denoising")),
    (watch_session.StageStack, ("end", "weights_moved")),
    (watch_session.Session, ("watch", "watch_class", "wants", "records", "stack_here", "_parts")),
    (hooks, ("listen",)),
    (hooks.HookSet, ("hook_attribute", "hook_class", "hook_method")),
    (recorder, ("tensor_facts", "as_json")),
    (recorder.Recorder, ("stage", "current_scope", "fact")),
    (recorder.LiveStage, ("__enter__", "tensor", "fact", "record")),
    (scope.Scope, ("open", "add_step", "close", "freeze")),
)
"""Each module and class of ours with what is broken of it."""
FAULTS: dict[str, tuple[Any, str]] = {
    f"{owner.__name__.rpartition('.')[2]}.{name}": (owner, name)
    for owner, names in BREAKABLE
    for name in names
}


def test_no_fault_hides_another() -> None:
    assert len(FAULTS) == sum(len(names) for _, names in BREAKABLE) == 109


def broken(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError("broken on purpose")


@pytest.fixture(scope="module", autouse=True)
def _facts_are_read_once() -> Iterator[None]:
    """What a pipeline is made of takes a third of the time to read, and is the same in all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_session, "pipeline_facts", functools.cache(pipeline_facts))
        yield


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return generate(make_pipeline("sd15"), "sd15", num_inference_steps=1)


MOVING = ("TransferObserver.", "weights_moved", "_before_tiles")
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


@functools.cache
def marks_of_unwatched(pipeline: Any) -> dict[str, Any]:
    """Those before the first watch: each test shows that they are the same after its own."""
    return marks(pipeline)


def nothing_is_left() -> bool:
    return left_behind() == [] and CURRENT.get() is None


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_reaches_nobody(fault: str, plain: Any, moving: Any, expected: Tensor) -> None:
    pipeline = moving if any(part in fault for part in MOVING) else plain
    before = marks_of_unwatched(pipeline)
    assert torch.equal(watched_image(pipeline, [fault], everywhere=False), expected)
    assert marks(pipeline) == before
    assert nothing_is_left()


@pytest.mark.parametrize("fault", ["StageStack.end", "StageStack.leave"])
def test_a_watch_ends_though_what_closes_its_stages_fails(fault: str, plain: Any, expected: Tensor) -> None:
    # with no tap on the parts, the stages of the call are still open when the watch ends
    assert torch.equal(watched_image(plain, [fault, "HookSet.hook_attribute"], everywhere=False), expected)
    assert nothing_is_left()


@pytest.mark.parametrize("fault", ["Denoising.finish", "Denoising._commit", "LiveStage.fact"])
def test_a_fault_leaves_no_thread_that_samples_memory(fault: str, plain: Any, expected: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault], broken)
        with sigmascope.watch(plain, sample_hz=10.0):
            image = generate(plain, "sd15", num_inference_steps=1)
    assert torch.equal(image, expected)
    for thread in threading.enumerate():
        if thread.name == "sigmascope-sampler":
            thread.join(timeout=5)
            assert not thread.is_alive()


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
    ("fault", "observer_name"),
    [
        ("VaeObserver._before", "vae"),
        ("SchedulerObserver._before_schedule", "scheduler"),
        ("DenoiserObserver._before", "denoiser"),
    ],
)
def test_what_is_switched_off_is_told_and_the_rest_goes_on(
    fault: str, observer_name: str, plain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault], broken)
        with sigmascope.watch(plain) as run:
            generate(plain, "sd15", num_inference_steps=3)
    assert run.unavailable[f"watch.{observer_name}"] == "RuntimeError: broken on purpose"
    assert len([line for line in caplog.messages if f"watch.{observer_name}" in line]) == 1
    names = [stage.name for stage in run.stage("generation").children]
    assert "text_encoding" in names
    assert len(names) == 3


def test_a_host_that_is_shaped_otherwise_is_left_alone() -> None:
    class Odd:
        components = "none"

        def __call__(self) -> int:
            return 7

    odd = Odd()
    with sigmascope.watch(odd, object()) as run:
        assert odd() == 7
    assert run.complete


def test_a_broken_handler_of_the_host_s_log_does_not_end_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[str] = []
    done: list[int] = []

    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            handled.append(record.getMessage())
            raise ZeroDivisionError

    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    log = logging.getLogger("sigmascope")
    handler = Broken()
    log.addHandler(handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Session, "open", fail)
            with sigmascope.watch():
                done.append(1)
        with monkeypatch.context() as patched:
            patched.setattr(Session, "record", fail)
            with sigmascope.watch():
                done.append(2)
    finally:
        log.removeHandler(handler)
    assert done == [1, 2]
    assert "The watch could not begin: RuntimeError: ours" in handled
    assert "The watch could not end properly: RuntimeError: ours" in handled
