"""Call settings: by architecture, and by what a pipeline and its model say of themselves."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
from tests.families import FAMILIES, generate, make_pipeline
from tests.pipeline.optimized import CPU, H100, denoiser_of, warm_pipeline

from sigmascope.errors import ConfigError
from sigmascope.pipeline.optimizer import (
    GenerationSettings,
    OptimizationConfig,
    PipelineOptimizer,
    settings_for,
)

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def settings(thing: object) -> GenerationSettings:
    return PipelineOptimizer(hardware=CPU).configure_generation_settings(thing)


@pytest.mark.parametrize("architecture", ["MMDiT", "DiT", "UNet", "mmdit"])
def test_each_architecture_has_steps_and_guidance(architecture: str) -> None:
    assert {"num_inference_steps", "guidance_scale"} <= settings(architecture).keys()


def test_joint_transformers_make_a_megapixel() -> None:
    found = settings("MMDiT")
    assert (found["height"], found["width"]) == (1024, 1024)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="'GAN'"):
        settings("GAN")


def test_a_vae_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="AutoencoderKL"):
        settings(warm_pipeline("sd15").vae)


@EVERY_FAMILY
@pytest.mark.slow
def test_every_argument_is_one_of_the_pipelines_call_and_has_a_reason(family: str) -> None:
    pipeline = warm_pipeline(family)
    found = settings(pipeline)
    assert found.keys() <= inspect.signature(type(pipeline).__call__).parameters.keys()
    assert found.keys() <= found.reasons.keys()


@EVERY_FAMILY
def test_steps_are_the_pipelines_own_default(family: str) -> None:
    pipeline = warm_pipeline(family)
    default = inspect.signature(type(pipeline).__call__).parameters["num_inference_steps"].default
    assert settings_for(pipeline)["num_inference_steps"] == default


@EVERY_FAMILY
def test_the_pipeline_runs_with_its_settings(family: str) -> None:
    pipeline = warm_pipeline(family)
    small = {"num_inference_steps": 1, "height": 32, "width": 32}
    small |= {"num_frames": 5} if FAMILIES[family].name.startswith("wan") else {}
    assert generate(pipeline, family, **{**settings_for(pipeline), **small}).isfinite().all()


@pytest.mark.parametrize(("family", "side"), [("sd15", 32), ("flux", 256), ("sd3", 32)])
def test_size_follows_from_the_models_latent_size(family: str, side: int) -> None:
    assert settings(warm_pipeline(family))["height"] == side


def test_a_denoiser_alone_is_known_by_its_modules() -> None:
    assert settings(denoiser_of(warm_pipeline("flux"), "flux")) == settings("MMDiT")


def test_flux_without_embedded_guidance_is_schnell() -> None:
    pipeline = _flux_schnell()
    found = settings(pipeline)
    assert (found["num_inference_steps"], found["guidance_scale"]) == (4, 0.0)
    assert "guidance_embeds is False" in found.reasons["num_inference_steps"]


def _flux_schnell() -> Any:
    pipeline = make_pipeline("flux")
    pipeline.transformer.register_to_config(guidance_embeds=False)
    return pipeline


def test_a_latent_consistency_model_takes_few_steps_and_keeps_its_guidance() -> None:
    pipeline = make_pipeline("sd15")
    pipeline.unet.register_to_config(time_cond_proj_dim=256)
    found = settings(pipeline)
    assert (found["num_inference_steps"], found["guidance_scale"]) == (4, 7.5)


def test_a_solver_of_higher_order_takes_fewer_steps() -> None:
    from diffusers import DPMSolverMultistepScheduler

    pipeline = make_pipeline("sd15")
    pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    assert settings(pipeline)["num_inference_steps"] == 25


def _where_nothing_is_tiled(mib: int) -> PipelineOptimizer:
    small = replace(H100, total_bytes=mib * 2**20, free_bytes=mib * 2**20)
    return PipelineOptimizer(OptimizationConfig(vae_tiling=False), hardware=small)


def test_an_image_that_a_device_cannot_hold_the_work_for_is_made_smaller() -> None:
    found = _where_nothing_is_tiled(100).configure_generation_settings(warm_pipeline("qwen_image"))
    assert 256 <= found["height"] < 1024
    assert found["height"] % 64 == 0
    assert found.reasons["height"].startswith("1024 × 1024 pixels take about")


@pytest.mark.slow
def test_a_video_keeps_its_shape_when_it_is_made_smaller() -> None:
    found = _where_nothing_is_tiled(300).configure_generation_settings(warm_pipeline("wan"))
    assert (found["height"], found["width"]) != (480, 832)
    assert found["width"] / found["height"] == pytest.approx(832 / 480, rel=0.2)


@pytest.mark.slow
def test_where_no_size_fits_it_is_left_at_what_the_model_is_made_for() -> None:
    found = _where_nothing_is_tiled(1).configure_generation_settings(warm_pipeline("qwen_image"))
    assert (found["height"], found["width"]) == (1024, 1024)


def test_a_device_with_room_gets_the_size_that_the_model_is_made_for() -> None:
    found = PipelineOptimizer(hardware=H100).configure_generation_settings(warm_pipeline("qwen_image"))
    assert (found["height"], found["width"]) == (1024, 1024)
