"""Look at a model, and keep what can be compared later."""

import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sigmascope.probes.fingerprints import Fingerprint, fingerprints
from sigmascope.probes.samples import samples
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.applied import Applied, read_applied
from sigmascope.stages.lora.captured import (
    NO_PATCHER,
    NOT_GIVEN,
    CapturedModel,
    Placement,
    WeightFacts,
    marks_of,
)
from sigmascope.stages.lora.parts import parts_of
from sigmascope.stages.lora.weights import Weights, weights_in


def capture_model(
    model: object, model_type: str, *, keys: Collection[str] | None = None, contents: bool = True
) -> CapturedModel:
    """Look at a model. Never raises; changes nothing, and calls no hook or method of its modules.

    Args:
        model: See `parts.parts_of`.
        model_type: See `parts.parts_of`.
        keys: Of which weights to take fingerprints; None: of all.
        contents: Whether to take any.
    """
    if model is None:
        names = ("model_id", "class", "device", "patches_count", "patches_uuid", "weights")
        return CapturedModel(model_type, unavailable=dict.fromkeys(names, NOT_GIVEN))
    unavailable: dict[str, str] = {}
    weights = read_host(lambda: weights_in(model, model_type))
    if weights.value is None:
        unavailable["weights"] = weights.reason or "unknown"
    applied = read_applied(model, model_type)
    found = weights.value or Weights({}, {})
    count, uuid = _patches(model, applied, unavailable)
    placement = placement_of(model, found, unavailable)
    prints, taken, seconds, nbytes = _contents(found, keys, unavailable) if contents else ({}, {}, None, 0)
    return CapturedModel(
        model_type,
        id(model),
        type(model),
        read_host(lambda: weakref.ref(model)).value,
        _references(model, model_type),
        count,
        uuid,
        placement,
        marks_of(applied),
        {name: WeightFacts(w.shape, w.dtype, w.device) for name, w in found.base.items()},
        tuple(found.adapters),
        len(found.wrapped),
        prints,
        taken,
        seconds,
        nbytes,
        unavailable,
    )


def patcher_in(model: object) -> object:
    """ComfyUI's patcher: the model itself, or what its CLIP or VAE holds."""
    return model if isinstance(_attribute(model, "patches"), Mapping) else _attribute(model, "patcher")


def placement_of(model: object, weights: Weights, unavailable: dict[str, str]) -> Placement:
    """Read where a model is; reasons go to `unavailable`."""
    patcher = patcher_in(model)
    inner = _attribute(patcher, "model")
    named = [_device(_attribute(thing, "device")) for thing in (model, inner)]
    device = next((one for one in named if one is not None), None) or _most_common(weights)
    load, offload = (_device(_attribute(patcher, f"{name}_device")) for name in ("load", "offload"))
    if device is None:
        unavailable["device"] = "it has no weights"
    for name, found in (("load_device", load), ("offload_device", offload)):
        if found is None:
            unavailable[name] = NO_PATCHER
    return Placement(device, load, offload)


def _references(model: object, model_type: str) -> dict[str, Any]:
    parts = read_host(lambda: parts_of(model, model_type)).value or {}
    return {name: read_host(lambda part=part: weakref.ref(part)).value for name, part in parts.items()}  # type: ignore[misc]


def _patches(model: object, applied: Applied, unavailable: dict[str, str]) -> tuple[int | None, object]:
    patcher = patcher_in(model)
    patches, uuid = _attribute(patcher, "patches"), _attribute(patcher, "patches_uuid")
    if uuid is None:
        unavailable["patches_uuid"] = NO_PATCHER
    if isinstance(patches, Mapping):
        return read_host(lambda: len(patches)).value, uuid
    if applied.unavailable:
        unavailable["patches_count"] = "; ".join(applied.unavailable.values())
        return None, uuid
    return len(applied.by_key()), uuid


def _contents(
    weights: Weights, keys: Collection[str] | None, unavailable: dict[str, str]
) -> tuple[dict[str, Fingerprint], dict[str, Tensor], float, int]:
    began = time.perf_counter()
    wanted = {name: w for name, w in weights.base.items() if keys is None or name in keys}
    readings = fingerprints(wanted)
    found = {name: reading.value for name, reading in readings.items() if reading.value is not None}
    lacking = [reading.reason for reading in readings.values() if reading.value is None]
    if lacking:
        unavailable["fingerprints"] = f"of {len(lacking)} of {len(readings)} weights: {lacking[0]}"
    nbytes = sum(wanted[name].nbytes for name in found)
    return found, samples({n: wanted[n] for n in found}), time.perf_counter() - began, nbytes


def _most_common(weights: Weights) -> torch.device | None:
    counts: Counter[torch.device] = Counter()
    for weight in _distinct(weights.base.values()):
        counts[weight.device] += weight.numel()
    return next((device for device, _ in counts.most_common(1)), None)


def _distinct(tensors: Collection[Tensor]) -> Iterator[Tensor]:
    yield from {id(tensor): tensor for tensor in tensors}.values()


def _device(value: object) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    return read_host(lambda: torch.device(value)).value if isinstance(value, str) else None


def _attribute(thing: object, name: str) -> Any:
    return None if thing is None else read_host(lambda: getattr(thing, name, None)).value
