"""What memory a model's application took."""

from collections.abc import Mapping
from typing import Any

from sigmascope.records.arithmetic import change, mib
from sigmascope.records.snapshot import AcceleratorMemory, MemoryImpact, MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.entries import entry_of
from sigmascope.stages.lora.typed import LoraMemoryImpact
from sigmascope.stages.lora.typed_models import MemoryChangeOfModel
from sigmascope.stages.lora.weights import weights_nbytes

_CHANGES = ("allocated_change_mb", "reserved_change_mb")
_CURRENT = ("current_allocated_mb", "current_reserved_mb")
NO_ACCELERATOR = "no accelerator was found"


def memory_change(
    baseline: object, model: object, model_type: str, now: MemorySnapshot
) -> MemoryChangeOfModel:
    """The seed's section 6: PyTorch's allocator on the device in use, against the bytes of a baseline.

    Args:
        baseline: `baseline["unet"]` or `baseline["clip"]`, with `memory_allocated` and `memory_reserved`.
        model: As it is now; for its size.
        model_type: Such as "UNet" or "CLIP".
        now: Memory now.
    """
    device = now.accelerator(now.device_in_use() or "")
    error = (
        None if isinstance(baseline, Mapping) else f"the baseline is {type(baseline).__name__}, not a dict"
    )
    before = [_bytes_in(baseline, name) for name in ("memory_allocated", "memory_reserved")]
    current = [device.allocated_bytes, device.reserved_bytes]
    size = None if model is None else read_host(lambda: weights_nbytes(model, model_type)).value
    changes = [mib(change(old, new)) for old, new in zip(before, current, strict=True)]
    return {
        "allocated_change_mb": changes[0],
        "reserved_change_mb": changes[1],
        "current_allocated_mb": mib(current[0]),
        "current_reserved_mb": mib(current[1]),
        "model_size_mb": mib(size),
        "error": error,
        "unavailable": _memory_reasons(device, before, current, size),
    }


def lora_memory_impact(
    unet: MemoryChangeOfModel, clip: MemoryChangeOfModel, impact: MemoryImpact | None
) -> LoraMemoryImpact:
    """The seed's two entries beside those that every stage has."""
    whole: Mapping[str, Any] = {} if impact is None else impact.as_dict()
    return {
        "unet_memory_change": unet,
        "clip_memory_change": clip,
        "ram": whole.get("ram"),
        "process": whole.get("process"),
        "gpu": whole.get("gpu"),
        "gpus": whole.get("gpus", {}),
    }


def _bytes_in(baseline: object, name: str) -> int | None:
    value = entry_of(baseline, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _memory_reasons(
    device: AcceleratorMemory, before: list[int | None], current: list[int | None], size: int | None
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for index, (old, new) in enumerate(zip(before, current, strict=True)):
        name = ("allocated_bytes", "reserved_bytes")[index]
        why = device.unavailable.get(name, "it could not be read") if device.device else NO_ACCELERATOR
        if new is None:
            reasons[_CURRENT[index]] = why
        if old is None or new is None:
            reasons[_CHANGES[index]] = why if new is None else "the baseline does not say"
    if size is None:
        reasons["model_size_mb"] = "no module was found in the model"
    return reasons
