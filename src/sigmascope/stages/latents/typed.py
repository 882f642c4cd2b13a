"""The dict structures of SPEC sections 1 and 5. MB are MiB, percentages 0-100, None is unknown.

Each dict that can lack something has `unavailable`: the reason for each of its keys that is None.
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from sigmascope.records.typed import MemoryImpactDict, PeakMemoryDict
from sigmascope.stages.text.typed import StatisticsDict
from sigmascope.stages.typed import Check, MemoryNow, ModelStateDict


class VaeDict(TypedDict):
    """What the VAE's class and config say of its latents."""

    class_name: str
    latent_channels: int | None
    image_channels: int | None
    spatial_factor: int | None
    temporal_factor: int | None
    first_frame_apart: bool
    is_video: bool | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    source: str
    unavailable: dict[str, str]


class PicturesDict(TypedDict):
    """The pictures or the video. `sizes` has each [height, width] that occurs; more than one is a mistake."""

    form: str | None
    layout: str | None
    shape: list[int] | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    batch_size: int | None
    length: int | None
    channels: int | None
    height: int | None
    width: int | None
    sizes: list[list[int]]
    min: float | None
    max: float | None
    nan_count: int | None
    inf_count: int | None
    unavailable: dict[str, str]


class LatentAnalysis(TypedDict):
    """`latent_analysis`.

    `status` is "success", "dummy" (a stand-in, no encoding), "missing" (None was given), "no_tensor" or "failed"
    (it could not be read). Sizes by axis are those of the latent unpacked; `shape` is the tensor's own.
    """

    status: str
    latent_type: str | None
    shape: list[int] | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    num_elements: int | None
    batch_size: int | None
    frames: int | None
    channels: int | None
    height: int | None
    width: int | None
    spatial_compression: float | None
    temporal_compression: float | None
    nominal_spatial_compression: float | None
    nominal_temporal_compression: float | None
    latent_layout: str | None
    layout_evidence: str | None
    unpacked_shape: list[int] | None
    expected_shape: list[int] | None
    structure: str
    statistics: StatisticsDict | None
    unavailable: dict[str, str]


class VideoDimensions(TypedDict):
    """Of the pictures: frames, height and width in pixels."""

    length: int | None
    height: int | None
    width: int | None


class PerformanceAnalysis(TypedDict):
    """`performance_analysis`. `total_mb` is the video at a byte a colour, `input_mb` as it was handed over."""

    total_pixels: int | None
    total_mb: float | None
    input_mb: float | None
    elapsed_time: float | None
    strategy_used: str | None
    pixels_per_second: float | None
    mb_per_second: float | None
    frames_per_second: float | None
    video_dimensions: VideoDimensions
    unavailable: dict[str, str]


class GpuChanges(TypedDict):
    """`immediate_gpu_changes`: what the caller measured right after, or else what was read at the analysis."""

    allocated_change_mb: float | None
    reserved_change_mb: float | None
    measured_by: str
    unavailable: dict[str, str]


class MemoryEfficiency(TypedDict):
    """Ratios are 0 to 1; `free_vram_change_mb` is negative where less is free than before."""

    allocated_reserved_ratio: float | None
    fragmentation: float | None
    free_vram_change_mb: float | None
    cleanup_effectiveness: float | None
    unavailable: dict[str, str]


class LatentValidation(TypedDict):
    """`success`: no check failed. `notes` are worth knowing and no failure."""

    success: bool
    input: Check
    output: Check
    vae: Check
    notes: list[str]


class LatentBaseline(TypedDict):
    """What is known before. `references` keeps no model and no tensor alive and is left out of analyses."""

    timestamp: str
    direction: str
    memory: MemoryNow
    vae: VaeDict
    model_state: ModelStateDict
    pictures: PicturesDict | None
    latent: LatentAnalysis | None
    references: Any


class LatentEncodingAnalysis(TypedDict):
    """What `analyze_latent_generation_results` gives (SPEC sections 1 and 5).

    `encoding_success` is False for dummy latents: they are none. `pictures` went in; of a decoding they came
    out, and `latent_analysis` is about what went in. `strategies` are `StrategyAttempt`s with number and name,
    `findings` are `Finding`s. `vace_conditioning` is empty but for WAN-VACE.
    """

    encoding_success: bool
    success: bool
    error: str | None
    exception_details: dict[str, str] | None
    direction: str
    elapsed_time: float | None
    strategy_used: str | None
    strategy_number: int | None
    strategies: list[dict[str, Any]]
    dummy: bool
    vae: VaeDict
    pictures: PicturesDict
    latent_analysis: LatentAnalysis
    vace_conditioning: dict[str, Any]
    performance_analysis: PerformanceAnalysis
    memory_impact: MemoryImpactDict | None
    immediate_gpu_changes: GpuChanges
    efficiency: MemoryEfficiency
    peak_memory: PeakMemoryDict | None
    model_state: dict[str, ModelStateDict]
    baseline: Mapping[str, Any] | None
    current_memory: MemoryNow
    validation: LatentValidation
    findings: list[dict[str, Any]]
    unavailable: dict[str, str]
