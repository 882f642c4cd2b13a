"""What the tests of `PipelineOptimizer` share: pipelines, one choice at a time, and devices that are not here."""

from functools import cache
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, generate, make_pipeline
from tests.families.group_offload import OFFLOADS_GROUPS
from torch import Tensor

from sigmascope.pipeline.optimization_plan import Choice, Plan
from sigmascope.pipeline.optimizer import Hardware, OptimizationConfig, PipelineOptimizer

GIB = 2**30
H100 = Hardware("cuda:0", "NVIDIA H100", 80 * GIB, 79 * GIB, (9, 0), 128 * GIB)
RTX_4090 = Hardware("cuda:0", "NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, (8, 9), 64 * GIB)
RTX_3060 = Hardware("cuda:0", "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, (8, 6), 64 * GIB)
T4 = Hardware("cuda:0", "Tesla T4", 15 * GIB, 14 * GIB, (7, 5), 64 * GIB)
CPU = Hardware("cpu", ram_available_bytes=16 * GIB, absence="no accelerator: this PyTorch build is CPU-only")

ALONE: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "layerwise_casting": {"layerwise_casting": True},
    "fused_qkv": {"fuse_qkv": True},
    "channels_last": {"channels_last": True},
    "attention": {"attention_backend": "native"},
    "model_offload": {"offload": "model"},
    "group_offload": {"offload": "group"},
    "vae_slicing": {"vae_slicing": True},
    "vae_tiling": {"vae_tiling": True},
    "fast_matmul": {"fast_matmul": True},
    "first_block_cache": {"cache": "first_block"},
    "pyramid_cache": {"cache": "pyramid"},
    "faster_cache": {"cache": "faster"},
    "taylorseer_cache": {"cache": "taylorseer"},
    "compile": {"compile": True, "compile_backend": "eager"},
}
"""Every kind of choice, asked for by itself. Group offloading and compiling are here as far as a CPU goes."""

_UNETS = {"sd15", "sdxl"}
_GUIDED_IN_TURN = {"qwen_image", "wan", "wan_vace"}
NOT_OFFERED: dict[str, set[str]] = {
    "fused_qkv": {"qwen_image"},
    "channels_last": _GUIDED_IN_TURN,
    "attention": _UNETS | {"sd3"},
    "first_block_cache": _UNETS | {"sd3", "wan_vace"},
    "pyramid_cache": _UNETS | {"sd3"} | _GUIDED_IN_TURN,
    "faster_cache": _UNETS | {"sd3"} | _GUIDED_IN_TURN,
    "taylorseer_cache": _UNETS | {"sd3"},
    "compile": {"sd3"},
    "group_offload": set() if OFFLOADS_GROUPS else set(FAMILIES),
}
"""Families whose classes in diffusers 0.42 do not have it, or for which it would be wrong."""

OFFERED = [
    (family, name) for name in ALONE for family in FAMILIES if family not in NOT_OFFERED.get(name, set())
]

SAMPLES = ("sd15", "flux")
"""A U-Net and a transformer; the other families take part in the slow tests."""
SAMPLES_AND_SLOW_FAMILIES = [
    pytest.param(family, marks=[pytest.mark.slow] * (family not in SAMPLES)) for family in FAMILIES
]

TOGETHER: dict[str, Any] = {
    "dtype": "bfloat16",
    "layerwise_casting": True,
    "fuse_qkv": True,
    "channels_last": True,
    "attention_backend": "native",
    "offload": "group",
    "vae_slicing": True,
    "vae_tiling": True,
    "fast_matmul": True,
    "cache": "first_block",
}


@cache
def warm_pipeline(family: str) -> Any:
    """A pipeline that has run, shared by tests that leave it as it was, which is what they test."""
    pipeline = make_pipeline(family)
    generate(pipeline, family)
    return pipeline


@cache
def first_image(family: str) -> Tensor:
    """What the pipeline makes as it is."""
    return generate(warm_pipeline(family), family)


def optimizer(hardware: Hardware = CPU, **asked: Any) -> PipelineOptimizer:
    """One that does what is asked for, and nothing else."""
    return PipelineOptimizer(OptimizationConfig.nothing(**asked), hardware=hardware)


def automatic(hardware: Hardware, **asked: Any) -> PipelineOptimizer:
    """One that decides by itself."""
    return PipelineOptimizer(OptimizationConfig(**asked), hardware=hardware)


def chosen(plan: Plan, kind: str) -> list[Choice]:
    """A plan's choices of a kind."""
    return [choice for choice in plan.choices if choice.kind == kind]


def reason(plan: Plan, kind: str, component: str | None = None) -> str:
    """Why a kind was not taken; fails if it was."""
    found = [one.reason for one in plan.not_taken if one.kind == kind and component in (None, one.component)]
    assert found, f"{kind} was taken, or not considered: {plan}"
    return found[0]


def denoiser_of(pipeline: Any, family: str) -> Any:
    """The pipeline's denoiser."""
    return getattr(pipeline, FAMILIES[family].denoiser)


def dtypes_of(model: torch.nn.Module) -> set[torch.dtype]:
    """Of the floating-point parameters."""
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
