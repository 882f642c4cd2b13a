"""The dict structures that every stage's baseline and analysis share. MB are MiB, None is unknown."""

from typing import TypedDict


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


class Check(TypedDict):
    """One check: `passed` is None when it could not be made."""

    passed: bool | None
    messages: list[str]
