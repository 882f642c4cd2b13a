"""The dict structures of one model's part in a LoRA's application. MB are MiB, None is unknown."""

from typing import Any, TypedDict


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

    `measured_from` is `contents` (old and new were there), `patches` (calculated from the changes: `predicted`)
    or `sample` (estimated from a thousand elements). `predicted_delta_norm` and `sampled_delta_norm` are there
    for comparison.
    """

    content_changed: bool | None
    delta_norm: float | None
    relative_change: float | None
    weight_norm: float | None
    predicted: bool
    measured_from: str | None
    predicted_delta_norm: float | None
    sampled_delta_norm: float | None
    unavailable: dict[str, str]


class Drift(TypedDict):
    """Contents that differ by no more than rounding, with no change on them that would explain more."""

    keys: list[str]
    largest_relative_change: float | None


class WeightChanges(TypedDict):
    """What became of the weights. Names are those without adapters.

    `keys_modified` has the seed's meaning, names in both models; `keys_value_changed` are those that are
    effectively changed since the baseline, by content or by changes that act in each forward pass.
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
    predicted: bool
    by_block: list[dict[str, Any]]
    drift: Drift
    unexplained: list[str]
    not_as_predicted: list[str]
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
    unavailable: dict[str, str]


class PatchDetails(TypedDict):
    """The changes on one weight: the first by the seed's names, all of them in `patches`."""

    strength_patch: float | None
    patch_type: str
    patch_data_shape: str
    patch_count: int
    adapter_type: str
    state: str
    patches: list[OnePatch]


class SourceFacts(TypedDict):
    """One LoRA on the model, by its adapter's name or by order."""

    keys: int
    states: dict[str, int]
    adapter_types: dict[str, int]
    ranks: dict[int, int]
    strengths: list[float]
    delta_norm: float | None
    not_finite: list[str]


class SameTwice(TypedDict):
    """Changes with the same tensors that act on one weight more than once."""

    sources: list[str]
    keys: int
    example: str


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
