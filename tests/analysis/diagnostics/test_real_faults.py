"""Each fault built into a real pipeline: what the probes read of it must be what the rules look for.

There is no accelerator here. Where a rule needs one, the host is said to have it, and where the weights must lie on
it, the facts read off the pipeline on the CPU are told to be of that device; everything else in them is as it was read.
"""

import json
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from diffusers import LCMScheduler, UNet2DConditionModel
from diffusers.hooks import apply_group_offloading
from tests.families import FAMILIES, make_pipeline
from tests.families.group_offload import needs_group_offload

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.monitor import Recorder
from sigmascope.probes.models import pipeline_facts
from sigmascope.records.run import Finding, PipelineFacts, Run
from sigmascope.records.serialization import from_plain, to_plain

Found = Callable[..., dict[str, Finding]]


@pytest.fixture
def pipe() -> Any:
    return make_pipeline("sd15")


def as_if_on_the_gpu(pipe: Any) -> PipelineFacts:
    plain = json.dumps(to_plain(pipeline_facts(pipe)))
    return from_plain(json.loads(plain.replace('"cpu"', '"cuda:0"')), PipelineFacts, "pipeline")


def in_half(pipe: Any) -> Any:
    for name in ("unet", "text_encoder", "vae"):
        getattr(pipe, name).to(torch.bfloat16)
    return pipe


def watched(pipe: Any, **call: Any) -> Run:
    asked = {"num_inference_steps": 1, "height": 32, "width": 32, "output_type": "latent"} | call
    with sigmascope.watch(pipe, sample_hz=None) as run, torch.no_grad():
        pipe("a fox", **asked)
    return run.record()


def ids(run: Run) -> set[str]:
    return {finding.id for finding in diagnose(run)}


def test_float32_weights(found: Found, pipe: Any) -> None:
    findings = found(pipe=as_if_on_the_gpu(pipe))
    assert "float32 on cuda:0" in findings["precision.float32_on_accelerator"].message
    assert "precision.float32_on_accelerator" not in found(pipe=as_if_on_the_gpu(in_half(pipe)))


def test_a_vae_in_float32_beside_a_half_unet(found: Found, pipe: Any) -> None:
    assert "precision.float32_vae" not in found(pipe=as_if_on_the_gpu(in_half(pipe)))
    pipe.vae.float()
    assert "precision.float32_vae" in found(pipe=as_if_on_the_gpu(pipe))


def test_a_half_unet_whose_weights_are_not_channels_last(found: Found, pipe: Any) -> None:
    in_half(pipe)
    assert "precision.not_channels_last" in found(pipe=as_if_on_the_gpu(pipe))
    pipe.unet.to(memory_format=torch.channels_last)
    assert "precision.not_channels_last" not in found(pipe=as_if_on_the_gpu(pipe))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_pipeline_on_a_gpu_is_left_in_peace(found: Found, family: str) -> None:
    healthy = make_pipeline(family)
    for part in healthy.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    findings = found(pipe=as_if_on_the_gpu(healthy))
    assert [one.id for one in findings.values() if one.severity != "info"] == []


def test_a_unet_left_on_the_cpu(found: Found, pipe: Any) -> None:
    assert "placement.cpu_while_accelerator_free" in found(pipe=pipeline_facts(pipe))
    assert "placement.cpu_while_accelerator_free" not in found(pipe=pipeline_facts(pipe), accelerators=())


def test_offloading_by_layers_and_by_groups(found: Found, pipe: Any) -> None:
    cpu = torch.device("cpu")
    accelerate.cpu_offload(pipe.unet, execution_device=cpu)
    finding = found(pipe=pipeline_facts(pipe))["placement.weights_moved_every_step"]
    assert finding.evidence["offload"] == "sequential"
    needs_group_offload()
    other = make_pipeline("sd15")
    apply_group_offloading(other.unet, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    finding = found(pipe=pipeline_facts(other))["placement.weights_moved_every_step"]
    assert finding.evidence["offload"] == "group"


def test_offloading_whole_models_that_fit(found: Found, pipe: Any) -> None:
    accelerate.cpu_offload_with_hook(pipe.unet, execution_device=torch.device("cpu"))
    findings = found(pipe=pipeline_facts(pipe))
    assert "placement.offloaded_though_it_fits" in findings
    assert "placement.cpu_while_accelerator_free" not in findings


def test_a_text_encoder_loaded_for_each_image(pipe: Any) -> None:
    recorder = Recorder(sample_hz=None)
    for _ in range(2):
        with recorder.stage("model_loading") as loading:
            loading.module("text_encoder", pipe.text_encoder)
    assert "placement.loaded_again" in ids(recorder.run())


def test_an_lcm_scheduler_on_an_ordinary_unet(pipe: Any) -> None:
    assert "model.scheduler_for_distilled_models" not in ids(watched(pipe))
    pipe.scheduler = LCMScheduler()
    assert "model.scheduler_for_distilled_models" in ids(watched(pipe))


def test_many_steps_of_a_unet_distilled_to_few(pipe: Any) -> None:
    pipe.unet = UNet2DConditionModel(**{**pipe.unet.config, "time_cond_proj_dim": 8}).eval()
    assert {"model.too_many_steps"} <= ids(watched(pipe, num_inference_steps=13))


def test_guidance_that_doubles_the_work(pipe: Any) -> None:
    for guidance_scale, expected in ((7.5, True), (1.0, False)):
        monitor = sigmascope.PerformanceMonitor(1e-9)
        with monitor.monitor_generation(model=pipe):
            watched(pipe, guidance_scale=guidance_scale)
        assert ("model.guidance_doubles_the_work" in {one.id for one in monitor.diagnose()}) is expected
    assert "model.guidance_doubles_the_work" not in ids(
        watched(pipe, guidance_scale=7.5)
    )  # no target is missed


def test_an_editing_model_without_an_image() -> None:
    pipe = make_pipeline("qwen_image")
    assert "model.edit_model_for_text_to_image" not in ids(watched(pipe))
    pipe.register_to_config(_name_or_path="Qwen/Qwen-Image-Edit")
    (finding,) = (one for one in diagnose(watched(pipe)) if one.id == "model.edit_model_for_text_to_image")
    assert "QwenImagePipeline" in (finding.advice or "")


def test_nan_weights_and_where_they_first_show(pipe: Any) -> None:
    assert "values.not_finite" not in ids(watched(pipe, output_type="np"))
    with torch.no_grad():
        pipe.unet.conv_out.bias.fill_(torch.nan)
    (finding,) = (one for one in diagnose(watched(pipe, output_type="np")) if one.id == "values.not_finite")
    assert (finding.stage, finding.evidence["tensor"]) == ("latent_decoding", "latent")


def test_nan_in_bfloat16_is_not_called_an_overflow_of_float16() -> None:
    recorder = Recorder(sample_hz=None)
    with recorder.stage("denoising") as denoising:
        denoising.tensor("latents", torch.full((4,), torch.nan, dtype=torch.bfloat16))
    (finding,) = diagnose(recorder.run())
    assert "65,504" not in (finding.advice or "")
