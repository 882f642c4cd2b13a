"""What every stage's baseline and analysis hold: a model's state, memory, a duration, and what was raised.

A model's identity is its `id()`, which tells objects apart while they live. Nothing here keeps a model alive.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from sigmascope.probes.models import module_facts, modules_in
from sigmascope.probes.reading import exception_details, read_host
from sigmascope.records.memory import AcceleratorMemory, MemoryImpact, MemorySnapshot, PeakMemory, mib
from sigmascope.stages.schema import GpuNow, MemoryNow, ModelStateDict

COMPARED = (
    "model_id",
    "class_type",
    "device",
    "dtype",
    "parameters",
    "patches_count",
    "patches_uuid",
    "adapters",
)
TEXT_NOT_KEPT = "an error that was told in words, which are not kept"
NO_PATCHER = "patches are ComfyUI's, and this is no ModelPatcher"


def model_state(model: object) -> ModelStateDict:
    """Identity, class, device, patches and adapters of a model or what wraps one. Never raises.

    Args:
        model: An `nn.Module`, ComfyUI's `ModelPatcher` or `CLIP`, a pipeline, or None.
    """
    if model is None:
        return _unknown_state("no model was given")
    reading = read_host(lambda: _state_of(model))
    return _unknown_state(reading.reason or "unknown") if reading.value is None else reading.value


def _unknown_state(reason: str) -> ModelStateDict:
    return {
        "model_id": None,
        "class_type": None,
        "wrapper_class": None,
        "device": None,
        "dtype": None,
        "parameters": None,
        "patches_count": None,
        "patches_uuid": None,
        "adapters": [],
        "changed": None,
        "unavailable": dict.fromkeys(COMPARED, reason),
    }


def _state_of(model: object) -> ModelStateDict:
    facts = module_facts(model)
    unavailable = dict(facts.unavailable)
    patcher = model if hasattr(model, "patches_uuid") else getattr(model, "patcher", None)
    patches = getattr(patcher, "patches", None)
    if not isinstance(patches, Mapping):
        unavailable |= dict.fromkeys(("patches_count", "patches_uuid"), NO_PATCHER)
    device = _most_common(facts.devices)
    dtype = _most_common(facts.dtypes)
    if device is None:
        unavailable.setdefault("device", "it has no weights")
        unavailable.setdefault("dtype", "it has no weights")
    return {
        "model_id": identity(model),
        "class_type": facts.class_name,
        "wrapper_class": facts.wrapper_class_name,
        "device": device,
        "dtype": dtype,
        "parameters": facts.parameters,
        "patches_count": len(patches) if isinstance(patches, Mapping) else None,
        "patches_uuid": str(getattr(patcher, "patches_uuid", "")) or None if patches is not None else None,
        "adapters": _adapters(model),
        "changed": None,
        "unavailable": unavailable,
    }


def _most_common(counts: Mapping[str, int]) -> str | None:
    """Where most elements are, or of which type most are."""
    return next((name for name, _ in Counter(counts).most_common(1)), None)


def identity(model: object) -> int:
    """What tells it from other models that live; a mapping is the modules that it holds."""
    if not isinstance(model, Mapping):
        return id(model)
    return hash(tuple(id(part) for part in model.values() if isinstance(part, nn.Module)))


def _adapters(model: object) -> list[str]:
    """Names of the PEFT adapters that act on the model, at whatever depth they were injected."""
    found: dict[str, None] = {}
    modules = modules_in(model) if isinstance(model, nn.Module) else ()
    for module in modules:
        active = getattr(module, "active_adapters", None) if hasattr(module, "lora_A") else None
        found |= dict.fromkeys(map(str, active)) if isinstance(active, list | tuple) else {}
    return list(found)


def changes(before: ModelStateDict, after: ModelStateDict) -> list[str]:
    """The fields in which two states differ. What is unknown on either side is not compared."""
    pairs = ((name, before.get(name), after.get(name)) for name in COMPARED)
    return [name for name, old, new in pairs if old is not None and new is not None and old != new]


def reference_to(model: object) -> Callable[[], Any] | None:
    """A reference that keeps nothing alive; None if the object takes none.

    Several models in a mapping are referred to one by one, since a dict takes no weak reference.
    """
    if isinstance(model, Mapping):
        parts = {name: reference_to(part) for name, part in model.items() if isinstance(part, nn.Module)}
        return (lambda: _still_there(parts)) if parts else None
    try:
        return weakref.ref(model)
    except TypeError:
        return None


def _still_there(parts: Mapping[Any, Callable[[], Any] | None]) -> dict[Any, Any] | None:
    """The models by name; None if one of them is gone."""
    models = {name: None if reference is None else reference() for name, reference in parts.items()}
    return None if None in models.values() else models


def memory_now(snapshot: MemorySnapshot) -> MemoryNow:
    """The snapshot in MiB and percentages; `gpu` is the device in use."""
    in_use = snapshot.device_in_use()
    return {
        "ram": {
            "used_mb": mib(snapshot.ram_used_bytes),
            "available_mb": mib(snapshot.ram_available_bytes),
            "total_mb": mib(snapshot.ram_total_bytes),
            "percent_used": snapshot.ram_percent_used(),
        },
        "process_rss_mb": mib(snapshot.process_rss_bytes),
        "gpu": _gpu_now(snapshot.accelerator(in_use or "")),
        "gpus": {memory.device: _gpu_now(memory) for memory in snapshot.accelerators},
        "unavailable": dict(snapshot.unavailable),
    }


def _gpu_now(memory: AcceleratorMemory) -> GpuNow:
    return {
        "allocated_mb": mib(memory.allocated_bytes),
        "reserved_mb": mib(memory.reserved_bytes),
        "total_mb": mib(memory.total_bytes),
        "free_mb": mib(memory.free_bytes),
        "driver_used_mb": mib(memory.driver_used_bytes),
        "fragmentation": memory.fragmentation(),
        "allocated_reserved_ratio": memory.allocated_ratio(),
    }


def cleanup_effectiveness(peak: object, impact: MemoryImpact | None) -> tuple[float | None, str | None]:
    """The share of the growth to the peak that was given back, or None and why it is not known.

    Of the device in use where there is one, else of this process.

    Args:
        peak: A stage's `PeakMemory`.
        impact: Memory before and after.
    """
    if impact is None or not isinstance(peak, PeakMemory):
        return None, "it takes a baseline and the peak of a stage"
    device = impact.current.device_in_use()
    share = (
        peak.rss_cleanup_effectiveness(impact)
        if device is None
        else peak.cleanup_effectiveness(impact, device)
    )
    return share, "memory did not grow" if share is None else None


def checked_seconds(seconds: object) -> tuple[float | None, str | None]:
    """A duration, or None and what is wrong with it."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None, "no time was given" if seconds is None else f"{type(seconds).__name__} is no time"
    if not math.isfinite(seconds) or seconds < 0:
        return None, f"{seconds} s is no duration"
    return float(seconds), None


def exception_dict(error: BaseException) -> dict[str, str]:
    """`exception_details` of an analysis: type, message and stack trace. Nothing of it stays alive."""
    return asdict(exception_details(error)) | {"type": type(error).__qualname__}
