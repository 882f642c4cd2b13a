"""Pipelines that really spend their time wrongly, watched on a simulated GPU; beside each the same one without the fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.analysis.diagnostics.simulated import SimulatedGpu, found, number, on_this_gpu, watched
from tests.families import make_pipeline
from tests.families.encoders import clip

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.run import Finding

STEPS = 4
Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def healthy(pipe: Any) -> dict[str, Finding]:
    return found(watched(pipe, SimulatedGpu(), {"num_inference_steps": 8}))


def test_a_healthy_pipeline_says_nothing_of_time(healthy: dict[str, Finding]) -> None:
    assert [name for name in healthy if name.startswith("time.")] == []


def test_a_vae_far_larger_than_its_denoiser() -> None:
    from diffusers import AutoencoderKL

    pipe = make_pipeline("sd15")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    pipe.vae = AutoencoderKL(
        latent_channels=4, block_out_channels=[64, 64], norm_num_groups=4, **blocks
    ).eval()
    run = watched(pipe, SimulatedGpu())
    finding = found(run)["time.vae_share"]
    decoding = run.stage("latent_decoding")
    assert decoding.seconds < 0.001  # the host has only queued it
    assert number(finding, "vae_seconds") == decoding.facts["device_seconds"] > 0.02
    assert 0.3 < number(finding, "share") < 0.9


@pytest.mark.slow
def test_a_prompt_that_is_encoded_again_after_each_step() -> None:
    pipe = make_pipeline("sd15")
    pipe.text_encoder = clip(layers=16)

    def encode(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe.encode_prompt("a fox", torch.device("cpu"), 1, False)
        return kwargs

    call = {"num_inference_steps": STEPS}
    again = found(watched(pipe, SimulatedGpu(), call | {"callback_on_step_end": encode}))
    assert again["time.text_encoding_share"].evidence["calls"] == STEPS + 1
    assert "time.text_encoding_share" not in found(watched(pipe, SimulatedGpu(), call))


@pytest.mark.slow
def test_prompts_that_are_encoded_before_the_call_count_too() -> None:
    pipe = make_pipeline("sd15")
    pipe.text_encoder = clip(layers=16)
    gpu = SimulatedGpu()
    with on_this_gpu(gpu), sigmascope.watch(pipe, sample_hz=None) as watch, torch.no_grad(), gpu:
        for _ in range(8):
            embeds, _ = pipe.encode_prompt("a fox", torch.device("cpu"), 1, False)
        pipe(prompt_embeds=embeds, num_inference_steps=1, guidance_scale=1.0, height=32, width=32)
        gpu.synchronize()
    finding = found(watch.record())["time.text_encoding_share"]
    assert finding.evidence["calls"] == 8


@pytest.mark.slow
def test_a_target_that_is_missed_names_what_took_longest(pipe: Any) -> None:
    gpu = SimulatedGpu()
    monitor = sigmascope.PerformanceMonitor(1.0, accelerator=gpu, clock=gpu, sample_hz=None)
    with on_this_gpu(gpu), sigmascope.watch(pipe, sample_hz=None) as watch, torch.no_grad(), gpu:
        for idle in (2.0, 0.0):
            with monitor.monitor_generation("SD", num_steps=4, model=pipe):
                pipe("a fox", num_inference_steps=4, guidance_scale=1.0, height=32, width=32)
                gpu.synchronize()
                gpu.host_works(idle)
    (finding,) = (one for one in diagnose(watch.record()) if one.id == "time.target_missed")
    assert number(finding, "seconds") == pytest.approx(2.0, abs=0.1)
    assert finding.evidence["longest_stage"] == "work outside of stages"
    assert "generations" not in finding.evidence


def test_a_monitor_of_its_own_says_what_share_its_steps_took(pipe: Any) -> None:
    gpu = SimulatedGpu(gflops=0.01)
    monitor = sigmascope.PerformanceMonitor(0.01, accelerator=gpu, clock=gpu, sample_hz=None)
    with gpu, torch.no_grad(), monitor.monitor_generation(num_steps=2) as watching:
        assert watching.recorder is not None
        with watching.recorder.hook_steps(pipe.unet):
            pipe(
                "a fox", num_inference_steps=2, guidance_scale=1.0, height=32, width=32, output_type="latent"
            )
        gpu.synchronize()
    (finding,) = monitor.diagnose()
    assert finding.evidence["longest_stage"] == "its steps"


def test_a_generation_in_another_is_counted_once(pipe: Any) -> None:
    gpu = SimulatedGpu()
    monitor = sigmascope.PerformanceMonitor(1e-9, accelerator=gpu, clock=gpu, sample_hz=None)
    watch = sigmascope.watch(pipe, sample_hz=None)
    with on_this_gpu(gpu), watch, torch.no_grad(), gpu, monitor.monitor_generation(model=pipe):
        pipe("a fox", num_inference_steps=1, height=32, width=32)
    assert "generations" not in found(watch.record())["model.guidance_doubles_the_work"].evidence


@pytest.mark.parametrize("is_watch_outside", [True, False])
def test_a_slow_callback_is_named_with_its_share_whichever_of_watch_and_monitor_is_around_the_other(
    pipe: Any, *, is_watch_outside: bool
) -> None:
    gpu = SimulatedGpu()
    gpu.put(*(part for part in pipe.components.values() if isinstance(part, torch.nn.Module)))
    monitor = sigmascope.PerformanceMonitor(0.1, accelerator=gpu, clock=gpu, sample_hz=None)

    def preview(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        gpu.synchronize()
        gpu.host_works(0.2)
        return kwargs

    with on_this_gpu(gpu):
        watch = sigmascope.watch(pipe, sample_hz=None, prompts="none")
        block = monitor.monitor_generation(model=pipe)
        outer, inner = (watch, block) if is_watch_outside else (block, watch)
        with torch.no_grad(), gpu, outer, inner:
            pipe("a fox", num_inference_steps=4, height=32, width=32, callback_on_step_end=preview)
            gpu.synchronize()
    (run,), told = monitor.runs, {finding.id: finding for finding in monitor.diagnose()}
    slow = told["time.callback_takes_long"]
    assert number(slow, "gain_seconds") == pytest.approx(4 * 0.2, rel=0.05)
    assert number(slow, "share") == pytest.approx(0.8 / run.stage("denoising").seconds, rel=0.05)
    assert "preview" in slow.message
    assert slow.severity == "warning"
    denoiser = sum(one or 0.0 for one in run.stage("denoising").steps.gpu_seconds)
    assert number(told["model.guidance_doubles_the_work"], "gain_seconds") == pytest.approx(denoiser / 2)
    linked = {run.id, *run.facts.get("runs_within", ())}
    assert watch.id in linked
    assert (run.stages[0].facts["call"]["width"], monitor.current_metrics.image_resolution) == (32, (32, 32))
    assert monitor.current_metrics.num_inference_steps == 4
    assert "a fox" not in str(run)
