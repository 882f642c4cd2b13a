"""Pipelines that really spend their time wrongly, watched on a simulated GPU; beside each the same one without the fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from tests.families.encoders import clip

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.finding import Finding
from sigmascope.records.merge import merge_runs
from sigmascope.records.run import Run

from .simulated import Nvml, SimulatedGpu, asked_through, on_this_gpu, watched

STEPS = 8
Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def healthy(pipe: Any) -> dict[str, Finding]:
    return found(watched(pipe, SimulatedGpu(), {"num_inference_steps": STEPS}))


def found(run: Run) -> dict[str, Finding]:
    return {finding.id: finding for finding in diagnose(run)}


def number(finding: Finding, name: str) -> float:
    value = finding.evidence[name]
    assert isinstance(value, float)
    return value


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


def test_a_preview_between_the_steps_keeps_the_device_waiting(pipe: Any, healthy: dict[str, Finding]) -> None:
    gpu = SimulatedGpu()

    def preview(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs["latents"].sum().item()  # waits for the step
        gpu.host_works(0.05)
        return kwargs

    finding = found(watched(pipe, gpu, {"num_inference_steps": STEPS, "callback_on_step_end": preview}))
    waits = finding["time.device_waits"]
    assert number(waits, "seconds") - number(waits, "busy_seconds") == pytest.approx(
        0.05 * (STEPS - 1), rel=0.05
    )
    assert "time.device_waits" not in healthy


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
    assert finding.evidence["longest_stage"] == "what is in no stage"
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
    monitor = sigmascope.PerformanceMonitor(accelerator=gpu, clock=gpu, sample_hz=None)
    watch = sigmascope.watch(pipe, sample_hz=None)
    with on_this_gpu(gpu), watch, torch.no_grad(), gpu, monitor.monitor_generation(model=pipe):
        pipe("a fox", num_inference_steps=1, height=32, width=32)
    assert "generations" not in found(watch.record())["model.guidance_doubles_the_work"].evidence


def test_small_kernels_that_wait_for_python_leave_the_device_idle(pipe: Any) -> None:
    gpu = SimulatedGpu(gflops=1e6, launch_us=100.0)
    with asked_through(Nvml(gpu), gpu):
        findings = found(watched(pipe, gpu, {"num_inference_steps": 25}, sample_hz=10.0))
    assert 10 < number(findings["utilization.device_idle"], "busy_percent") < 30
    assert "time.device_waits" not in findings  # what is idle is so within the steps


@pytest.mark.parametrize(
    ("nvml", "rule"),
    [
        ({"celsius": lambda ns: 70.0 + ns / 5e7}, "utilization.slowed_by_heat"),
        ({"watts": 900.0}, "utilization.held_by_power_cap"),
        ({}, None),
    ],
)
def test_a_device_that_holds_itself_back(pipe: Any, nvml: dict[str, Any], rule: str | None) -> None:
    gpu = SimulatedGpu(gflops=0.03, launch_us=100.0)
    with asked_through(Nvml(gpu, **nvml), gpu):
        findings = found(watched(pipe, gpu, {"num_inference_steps": 8}, sample_hz=10.0))
    assert {name for name in findings if name.startswith("utilization.")} == ({rule} if rule else set())


def test_a_rank_on_a_slower_device(pipe: Any) -> None:
    ranks = [watched(pipe, SimulatedGpu(gflops=gflops)) for gflops in (1.0, 1.0, 0.5)]
    finding = found(merge_runs(ranks))["ranks.slow_rank"]
    assert finding.evidence["rank"] == "rank 2"
    assert number(finding, "step_seconds") > 1.3 * number(finding, "others_seconds")
    assert "ranks.slow_rank" not in found(merge_runs(ranks[:2]))
