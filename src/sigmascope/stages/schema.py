"""The dicts of every stage's baseline and analysis, and how they are filled. MB are MiB, percentages 0-100.

None is unknown, with the reason in `unavailable`: that of the dict, or of the nearest one around it that has one.
There the reason stands under the key, the path to it ("gpu.total_mb"), or the name of a dict all of which it is about.

What all stages share comes first, then LoRA application, text encoding, and latent encoding with decoding. In
each part the pieces stand above the baseline and the analysis that are made of them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict, TypeVar, cast
from uuid import UUID

import torch

from sigmascope.probes.reading import Reading
from sigmascope.records.memory import GpuImpact, MemoryImpactDict, PeakMemoryDict, ProcessImpact, RamImpact

_Dict = TypeVar("_Dict")


def as_dict(
    kind: type[_Dict], facts: object = None, why: str | Mapping[str, str] | None = None, **known: object
) -> _Dict:
    """A dict of one of the kinds below, with the reason for each value that is None.

    Args:
        kind: Which one. A name that nothing has a value for is None.
        facts: Its values by name, as attributes or in a mapping, with their own `unavailable` if they have one.
        why: The reason for all that is None, or more reasons by name.
        known: Values that come before those of `facts`; a `Reading` has its reason with it.
    """
    value_of: Callable[..., Any] = facts.get if isinstance(facts, Mapping) else partial(getattr, facts)
    reasons = {**(value_of("unavailable", None) or {}), **(why if isinstance(why, Mapping) else {})}
    values: dict[str, Any] = {}
    for name in kind.__annotations__:
        values[name] = value = known[name] if name in known else value_of(name, None)
        if isinstance(value, Reading):
            values[name], reasons[name] = value.value, value.reason or reasons.get(name)
    inner = [value for value in values.values() if isinstance(value, dict) and "unavailable" not in value]
    values.pop("unavailable", None)
    gaps = [name for held in (values, *inner) for name, value in held.items() if value is None]
    for_all = why if isinstance(why, str) else None
    if "unavailable" in kind.__annotations__:
        values["unavailable"] = {
            name: reason for name in gaps if (reason := reasons.get(name) or for_all) is not None
        }
    return cast(_Dict, values)


class ModelStateDict(TypedDict):
    """One model at one moment. `changed` names what is different from the baseline (None: no baseline)."""

    model_id: int | None
    class_type: str | None
    wrapper_class: str | None
    device: str | None
    dtype: str | None
    parameters: int | None
    patches_count: int | None
    patches_uuid: str | None
    adapters: list[str]
    changed: list[str] | None
    unavailable: dict[str, str]


class RamNow(TypedDict):
    """RAM of the whole machine at one moment."""

    used_mb: float | None
    available_mb: float | None
    total_mb: float | None
    percent_used: float | None


class GpuNow(TypedDict):
    """One device at one moment: PyTorch's allocator, and the driver's view of everybody's use."""

    allocated_mb: float | None
    reserved_mb: float | None
    total_mb: float | None
    free_mb: float | None
    driver_used_mb: float | None
    fragmentation: float | None
    allocated_reserved_ratio: float | None


class MemoryNow(TypedDict):
    """Memory at one moment; `gpu` is the device in use."""

    ram: RamNow
    process_rss_mb: float | None
    gpu: GpuNow
    gpus: dict[str, GpuNow]
    unavailable: dict[str, str]


class StageBaseline(TypedDict):
    """What every baseline holds. `references` keeps no model and no tensor alive and is left out of analyses."""

    timestamp: float
    memory: MemoryNow
    references: Any


class StageAnalysis(TypedDict):
    """What every analysis holds. `error` is what was raised, or what is wrong with the results."""

    success: bool
    error: str | None
    exception_details: dict[str, str] | None
    elapsed_time: float | None
    peak_memory: PeakMemoryDict | None
    baseline: Mapping[str, Any] | None
    current_memory: MemoryNow
    unavailable: dict[str, str]


class StatisticsDict(TypedDict):
    """Over the finite elements; counts are of the others."""

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan_count: int | None
    inf_count: int | None


class TensorDict(TypedDict):
    """One tensor."""

    shape: list[int]
    dtype: str
    device: str
    size_mb: float
    num_elements: int
    statistics: StatisticsDict
    unavailable: dict[str, str]


class Check(TypedDict):
    """One check: `passed` is None when it could not be made."""

    passed: bool | None
    messages: list[str]


_ModelBaseline = TypedDict(
    "_ModelBaseline",
    {
        "model_id": int | None,
        "class": str | None,
        "device": torch.device | None,
        "memory_allocated": int | None,
        "memory_reserved": int | None,
        "keys": int | None,
        "fingerprinted_keys": int,
        "fingerprint_seconds": float | None,
        "fingerprint_gb_per_second": float | None,
        "captured": Any,
        "unavailable": dict[str, str],
    },
)
"""A model before the application. Memory is in bytes; `captured` is for the analysis."""


class UnetBaseline(_ModelBaseline):
    """The denoiser before the application."""

    patches_count: int | None
    patches_uuid: UUID | None


class ClipBaseline(_ModelBaseline):
    """The text encoder before the application."""

    patcher_patches_count: int | None
    patcher_patches_uuid: UUID | None


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


class LoraBaseline(StageBaseline):
    """Everything before the application."""

    unet: UnetBaseline
    clip: ClipBaseline
    lora_file: LoraFileFacts


class PlacementChanges(TypedDict, total=False):
    """Where a model is and was; `clip_…` are there for a CLIP."""

    model_device_changed: bool | None
    load_device_changed: bool | None
    offload_device_changed: bool | None
    original_device: str | None
    modified_device: str | None
    original_load_device: str | None
    modified_load_device: str | None
    original_offload_device: str | None
    modified_offload_device: str | None
    clip_model_device: str | None
    clip_patcher_load_device: str | None
    clip_patcher_offload_device: str | None
    unavailable: dict[str, str]


class MemoryChangeOfModel(TypedDict):
    """PyTorch's allocator on the device in use, before and after."""

    allocated_change_mb: float | None
    reserved_change_mb: float | None
    current_allocated_mb: float | None
    current_reserved_mb: float | None
    model_size_mb: float | None
    error: str | None
    unavailable: dict[str, str]


class LoraMemoryImpact(TypedDict):
    """Of each model, and of the whole machine as in every stage; None without a baseline."""

    unet_memory_change: MemoryChangeOfModel
    clip_memory_change: MemoryChangeOfModel
    ram: RamImpact | None
    process: ProcessImpact | None
    gpu: GpuImpact | None
    gpus: dict[str, GpuImpact]


class IdentityChanges(TypedDict):
    """Whether it is the same object, and how many weights have changes."""

    model_cloned: bool | None
    class_changed: bool | None
    patches_added: int | None
    uuid_changed: bool | None
    original_patch_count: int | None
    modified_patch_count: int | None
    original_class: str | None
    modified_class: str | None
    unavailable: dict[str, str]


class WeightChange(TypedDict):
    """One weight before and after, by its facts."""

    shape_changed: bool
    dtype_changed: bool
    device_changed: bool
    original_shape: str
    modified_shape: str


class ValueChange(TypedDict):
    """How much one weight changed.

    `measured_from` is `contents` (old and new were there), `patches` (calculated from the changes: `predicted`),
    `sample` (estimated from a thousand elements) or `used` (the weight in use contradicts the changes). `spread` is the standard
    error of an estimated `delta_norm` as a share of it (None: it cannot be calculated), else 0. `predicted_delta_norm` and `sampled_delta_norm` are there for
    comparison.
    """

    content_changed: bool | None
    delta_norm: float | None
    relative_change: float | None
    weight_norm: float | None
    predicted: bool
    measured_from: str | None
    spread: float | None
    predicted_delta_norm: float | None
    sampled_delta_norm: float | None
    unavailable: dict[str, str]


class OutsideLora(TypedDict):
    """What became of a weight beside the LoRAs: the norm of that, and the factor that makes all of it (None: no factor does)."""

    norm: float
    factor: float | None


class Drift(TypedDict):
    """Contents that differ by no more than rounding, with no change on them that would explain more."""

    keys: list[str]
    largest_relative_change: float | None


class ShareAndNoise(TypedDict):
    """Of a change that was merged; see `sigmascope.lora.arrival`."""

    share: float | None
    noise: float | None


class Arriving(ShareAndNoise):
    """What arrived of the changes merged into coarsely stored weights, and what would arrive by other ways."""

    stored: str
    weights: int
    other_ways: dict[str, ShareAndNoise]


class WeightCheck(TypedDict):
    """One layer: the change of the weight that it really uses, beside the predicted one.

    `result` is `confirmed`, `contradicted`, `measured` where nothing predicts the change (an OFT of PEFT), or `unavailable`
    with the reason. `difference_norm` is the norm of the used weight less the predicted one, `rounding_norm` of a
    change that rounding alone explains, and `elements` how many were compared: all, or a thousand. `spread` is 0 where all were.
    """

    result: str
    predicted_norm: float | None
    used_norm: float | None
    difference_norm: float | None
    weight_norm: float | None
    rounding_norm: float | None
    elements: int | None
    spread: float | None
    unavailable: dict[str, str]


class WeightChanges(TypedDict):
    """How the weights changed. Names are those without adapters.

    `keys_modified` are all names that both models have. `keys_value_changed` are those whose layers compute with
    something else than at the baseline, by content or by changes that act in each forward pass, or may do so. `spread` is the
    standard error of `delta_norm` as a share of it, where some of them are estimated.
    """

    keys_added: list[str]
    keys_removed: list[str]
    keys_modified: list[str]
    total_keys_original: int | None
    total_keys_modified: int | None
    weight_changes: dict[str, WeightChange]
    keys_value_changed: dict[str, ValueChange]
    keys_wrapped: int
    keys_compared: int
    delta_norm: float | None
    relative_change: float | None
    spread: float | None
    predicted: bool
    by_block: list[dict[str, Any]]
    drift: Drift
    unexplained: list[str]
    not_as_predicted: list[str]
    arriving: Arriving | None
    checked: dict[str, WeightCheck]
    outside: dict[str, OutsideLora]
    unavailable: dict[str, str]


class OnePatch(TypedDict):
    """One change on a weight."""

    source: str | None
    adapter_type: str
    state: str
    state_reason: str
    strength: float | None
    strength_model: float | None
    rank: int | None
    alpha: float | None
    scale: float | None
    finite: bool | None
    cause: str | None
    unavailable: dict[str, str]


class PatchDetails(TypedDict):
    """The changes on one weight: the first one's facts, and all of them in `patches`."""

    strength_patch: float | None
    patch_type: str
    patch_data_shape: str
    patch_count: int
    adapter_type: str
    state: str
    patches: list[OnePatch]


class SourceFacts(TypedDict):
    """One LoRA on the model, by its adapter's name or by order.

    `delta_norm` is ‖ΔW‖ of what it adds now, `relative_change` that beside ‖W‖ of the same weights.
    """

    keys: int
    states: dict[str, int]
    adapter_types: dict[str, int]
    ranks: dict[int, int]
    strengths: list[float]
    delta_norm: float | None
    relative_change: float | None
    not_finite: list[str]
    unavailable: dict[str, str]


class SameTwice(TypedDict):
    """Changes with the same tensors that act on one weight more than once, or changes that cancel each other.

    `why_nothing` is the verdict on those that cancel; None: they do not. `strengths` are those on the example's weight.
    """

    sources: list[str]
    keys: int
    example: str
    cancelled: bool
    why_nothing: str | None
    strengths: list[float]


class PatchAnalysis(TypedDict):
    """All changes that are on a model now."""

    total_patched_keys: int | None
    patch_details: dict[str, PatchDetails]
    states: dict[str, int]
    adapter_types: dict[str, int]
    loras: dict[str, SourceFacts]
    failed: dict[str, str]
    not_finite: list[str]
    applied_twice: list[SameTwice]
    overlaps: list[dict[str, Any]]
    unavailable: dict[str, str]


class LoraAnalysis(StageAnalysis):
    """What `analyze_lora_application_results` gives; plain JSON. `placement_changes` has `unet` and `clip`.

    So has `left_in_weights`: the strengths, as set last, of what was merged and is no longer among the changes on the model.
    """

    lora_application_success: bool
    models_returned: int
    unet_changes: IdentityChanges
    clip_changes: IdentityChanges
    unet_weight_changes: WeightChanges
    clip_weight_changes: WeightChanges
    unet_lora_patches: PatchAnalysis
    clip_lora_patches: PatchAnalysis
    placement_changes: dict[str, PlacementChanges]
    left_in_weights: dict[str, list[float]]
    memory_impact: LoraMemoryImpact
    effective: bool | None
    analysis_seconds: float
    lora_file: LoraFileFacts
    verdict: dict[str, Any] | None
    applied_verdict: dict[str, Any] | None
    findings: list[dict[str, Any]]


class WeightFacts(TypedDict):
    """A piece of a prompt with emphasis; `text` is None where prompts are private."""

    text: str | None
    weight: float


class TokenFacts(TypedDict):
    """What one tokenizer makes of a prompt."""

    token_count: int
    truncated_tokens: int | None
    truncated_words: list[str] | None
    token_limit: int | None
    chunks: int | None
    unavailable: dict[str, str]


class PromptFacts(TypedDict):
    """`text_processing` of one prompt. Tokens are those of the tokenizer that reads most of it."""

    text_content: str | None
    text_sha256: str | None
    character_length: int | None
    word_count: int | None
    special_characters: int | None
    whitespace_characters: int | None
    control_characters: int | None
    prompt_weights: list[WeightFacts] | None
    token_count: int | None
    truncated_tokens: int | None
    truncated_words: list[str] | None
    token_limit: int | None
    tokenizers: dict[str, TokenFacts]
    unavailable: dict[str, str]


class EncoderDict(TypedDict):
    """Which text encoder made a conditioning, and how that is known.

    `evidence` is "class", "token_count", "width" or "none"; `conflict` says what other evidence claims.
    """

    family: str
    evidence: str
    reason: str
    candidates: list[str]
    width: int | None
    clip_variant: str
    clip_variant_by_width: str
    conflict: str | None


class EntryDict(TypedDict):
    """One entry of a conditioning list: regional, scheduled or combined prompts have several."""

    tensor: TensorDict | None
    pooled: TensorDict | None
    attention_mask: TensorDict | None
    others: dict[str, TensorDict]
    metadata: dict[str, Any]


class ConditioningDict(TypedDict):
    """One conditioning. The top level is its first tensor; `entries` has every one.

    `status` is "success", "missing" (None was given), "no_tensor" or "failed" (it could not be read).
    """

    status: str
    structure: str
    shape: list[int] | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    num_elements: int | None
    sequence_length: int | None
    clip_variant: str | None
    encoder_family: str | None
    encoder: EncoderDict | None
    pooled: TensorDict | None
    attention_mask: TensorDict | None
    metadata: dict[str, Any]
    entries: list[EntryDict]
    total_size_mb: float | None
    statistics: StatisticsDict | None
    tensor_dump: str | None
    unavailable: dict[str, str]


class Performance(TypedDict):
    """Seconds. The times of single prompts are known only if they were measured separately."""

    total_execution_time: float | None
    positive_encoding_time: float | None
    negative_encoding_time: float | None
    time_per_character: float | None
    time_per_token: float | None
    unavailable: dict[str, str]


class Efficiency(TypedDict):
    """`memory_per_character_mb` is the size of the conditionings by the prompts' characters.

    `cleanup_effectiveness` (0 to 1) is the share of memory's growth to its peak that was given back.
    """

    characters_per_second: float | None
    tokens_per_second: float | None
    memory_per_character_mb: float | None
    gpu_utilization: float | None
    cleanup_effectiveness: float | None
    unavailable: dict[str, str]


class Compatibility(TypedDict):
    """Whether what was made fits what will use it."""

    clip_model: Check
    tensor_dimensions: Check
    device_placement: Check
    memory_threshold: Check


class Validation(TypedDict):
    """`success`: no check failed. `notes` are worth knowing, but not failures."""

    success: bool
    input: Check
    output: Check
    performance: Check
    compatibility: Compatibility
    notes: list[str]


class TextEncodingBaseline(StageBaseline):
    """What is known before the encoding."""

    clip: ModelStateDict
    unet: ModelStateDict
    tokenizers: dict[str, str]
    encoders: list[Mapping[str, Any]]


class TextEncodingAnalysis(StageAnalysis):
    """What `analyze_text_encoding_results` gives.

    `text_processing` has `positive` and `negative`, `model_state` has `clip` and `unet` after the encoding.
    """

    encoding_success: bool
    positive_conditioning: ConditioningDict
    negative_conditioning: ConditioningDict
    text_processing: dict[str, PromptFacts]
    performance: Performance
    efficiency: Efficiency
    model_state: dict[str, ModelStateDict]
    memory_impact: MemoryImpactDict | None
    validation: Validation


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
    """The pictures or the videos: `length` is the frames of one video, `total_frames` those of the whole batch.

    `sizes` has each [height, width] that occurs; more than one is a mistake.
    """

    form: str | None
    layout: str | None
    shape: list[int] | None
    dtype: str | None
    device: str | None
    size_mb: float | None
    batch_size: int | None
    length: int | None
    total_frames: int | None
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

    `status` is "success", "not_finite" (NaN or Inf is in it), "dummy" (a stand-in, no encoding), "missing" (None was
    given), "no_tensor" or "failed" (it could not be read). Sizes by axis are those of the latent unpacked; `shape` is the tensor's own.
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
    """`performance_analysis`. Totals and rates count the whole batch; `video_dimensions` are those of one video.

    `total_mb` is at a byte a colour, `input_mb` as the pictures were handed over.
    """

    total_frames: int | None
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
    """`success`: no check failed. `notes` are worth knowing, but not failures."""

    success: bool
    input: Check
    output: Check
    vae: Check
    notes: list[str]


class LatentBaseline(StageBaseline):
    """What is known before an encoding or decoding."""

    direction: str
    vae: VaeDict
    model_state: ModelStateDict
    pictures: PicturesDict | None
    latent: LatentAnalysis | None


class LatentEncodingAnalysis(StageAnalysis):
    """What `analyze_latent_generation_results` gives.

    `encoding_success` is False for dummy latents, which are not an encoding. `pictures` went in; of a decoding they came
    out, and `latent_analysis` is about what went in. `strategies` are `StrategyAttempt`s with number and name,
    `findings` are `Finding`s. `vace_conditioning` is empty but for WAN-VACE.
    """

    encoding_success: bool
    direction: str
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
    model_state: dict[str, ModelStateDict]
    validation: LatentValidation
    findings: list[dict[str, Any]]
