"""The dict structures of a LoRA's application (seed 000 section 9 and SPEC section 3). MB are MiB, None is unknown."""

from collections.abc import Mapping
from typing import Any, TypedDict
from uuid import UUID

import torch

from sigmascope.records.typed import GpuImpact, PeakMemoryDict, ProcessImpact, RamImpact
from sigmascope.stages.lora.typed_models import (
    IdentityChanges,
    MemoryChangeOfModel,
    PatchAnalysis,
    PlacementChanges,
    WeightChanges,
)
from sigmascope.stages.typed import MemoryNow

UnetBaseline = TypedDict(
    "UnetBaseline",
    {
        "model_id": int | None,
        "class": str | None,
        "device": torch.device | None,
        "patches_count": int | None,
        "patches_uuid": UUID | None,
        "memory_allocated": int | None,
        "memory_reserved": int | None,
        "keys": int,
        "fingerprinted_keys": int,
        "fingerprint_seconds": float | None,
        "fingerprint_gb_per_second": float | None,
        "captured": Any,
        "unavailable": dict[str, str],
    },
)
"""The denoiser before the application. Memory in bytes, as the seed has it; `captured` is for the analysis."""

ClipBaseline = TypedDict(
    "ClipBaseline",
    {
        "model_id": int | None,
        "class": str | None,
        "device": torch.device | None,
        "patcher_patches_count": int | None,
        "patcher_patches_uuid": UUID | None,
        "memory_allocated": int | None,
        "memory_reserved": int | None,
        "keys": int,
        "fingerprinted_keys": int,
        "fingerprint_seconds": float | None,
        "fingerprint_gb_per_second": float | None,
        "captured": Any,
        "unavailable": dict[str, str],
    },
)
"""The text encoder before the application."""


class LoraFileFacts(TypedDict):
    """The LoRA's file. `rank` and `alpha` are those of most modules; `ranks` and `alphas` count all."""

    filename: str | None
    file_exists: bool | None
    file_size: float | None
    format: str | None
    rank: int | None
    ranks: dict[int, int]
    alpha: float | None
    alphas: dict[float, int]
    modules: int | None
    base_hint: str | None
    unavailable: dict[str, str]


class LoraBaseline(TypedDict):
    """Everything before the application. `references` is for the analysis and keeps no model alive."""

    timestamp: float
    unet: UnetBaseline
    clip: ClipBaseline
    lora_file: LoraFileFacts
    memory: MemoryNow
    references: Any


class BothPlacements(TypedDict):
    """Of both models."""

    unet: PlacementChanges
    clip: PlacementChanges


class LoraMemoryImpact(TypedDict):
    """The seed's two, and those of SPEC section 2; None without a baseline."""

    unet_memory_change: MemoryChangeOfModel
    clip_memory_change: MemoryChangeOfModel
    ram: RamImpact | None
    process: ProcessImpact | None
    gpu: GpuImpact | None
    gpus: dict[str, GpuImpact]


class LoraAnalysis(TypedDict):
    """All of it; plain JSON."""

    lora_application_success: bool
    models_returned: int
    unet_changes: IdentityChanges
    clip_changes: IdentityChanges
    unet_weight_changes: WeightChanges
    clip_weight_changes: WeightChanges
    unet_lora_patches: PatchAnalysis
    clip_lora_patches: PatchAnalysis
    placement_changes: BothPlacements
    memory_impact: LoraMemoryImpact
    success: bool
    effective: bool | None
    error: str | None
    exception_details: dict[str, str] | None
    elapsed_time: float | None
    analysis_seconds: float
    lora_file: LoraFileFacts
    verdict: dict[str, Any] | None
    applied_verdict: dict[str, Any] | None
    findings: list[dict[str, Any]]
    peak_memory: PeakMemoryDict | None
    baseline: Mapping[str, Any] | None
    current_memory: MemoryNow
    unavailable: dict[str, str]
