"""What is known before a LoRA's application, and what of it the analysis needs."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.reading import Reading
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.capturing import capture_model
from sigmascope.stages.lora.entries import entry_of
from sigmascope.stages.lora.judged import judged, touched_keys
from sigmascope.stages.lora.lora_file import lora_file_facts
from sigmascope.stages.lora.memory import NO_ACCELERATOR
from sigmascope.stages.lora.typed import ClipBaseline, LoraBaseline, UnetBaseline
from sigmascope.stages.memory_now import memory_now

Keys = Collection[str] | Literal["lora", "none"] | None
NO_BASELINE = "there is no baseline"


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis. It keeps no model and no weight alive."""

    snapshot: MemorySnapshot
    unet: CapturedModel
    clip: CapturedModel
    lora_path: object
    verdict: Reading[LoraVerdict]
    accelerator: Accelerator | None

    def __repr__(self) -> str:
        return "References(…)"


def capture(
    unet: object, clip: object, lora_path: object, keys: Keys, accelerator: Accelerator | None
) -> LoraBaseline:
    """See `sigmascope.stages.lora_application.capture_lora_baseline`."""
    timestamp = time.time()
    verdict = judged(lora_path, unet, clip)
    before = [
        capture_model(model, name, keys=_wanted(keys, verdict.value, name), contents=keys != "none")
        for model, name in ((unet, "UNet"), (clip, "CLIP"))
    ]
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": timestamp,
        "unet": _unet(before[0], snapshot),
        "clip": _clip(before[1], snapshot),
        "lora_file": lora_file_facts(lora_path),
        "memory": memory_now(snapshot),
        "references": References(snapshot, before[0], before[1], lora_path, verdict, accelerator),
    }


def references_of(baseline: object) -> References | None:
    """What `capture` kept; None for a baseline that is not ours or was read from a file."""
    references = entry_of(baseline, "references")
    return references if isinstance(references, References) else None


def captured_of(part: object) -> CapturedModel | None:
    """What `baseline["unet"]` or `baseline["clip"]` kept; None for anything else."""
    captured = entry_of(part, "captured")
    return captured if isinstance(captured, CapturedModel) else None


def plain_baseline(baseline: object) -> dict[str, Any] | None:
    """The baseline as JSON values, without what it keeps for the analysis."""
    if not isinstance(baseline, Mapping):
        return None
    held = read_host(lambda: dict(baseline)).value or {}
    found = {name: value for name, value in held.items() if name != "references"}
    for side in ("unet", "clip"):
        if isinstance(found.get(side), Mapping):
            found[side] = _plain_part(found[side])
    return found


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"device", "patches_uuid", "patcher_patches_uuid"}
    kept = {name: value for name, value in part.items() if name != "captured"}
    return {n: str(v) if n in texts and v is not None else v for n, v in kept.items()}


def _wanted(keys: Keys, verdict: LoraVerdict | None, model_type: str) -> Collection[str] | None:
    """Names of the weights to look at in a model; None: all."""
    if keys is None or keys == "none":
        return None
    if keys != "lora":
        given: Any = keys  # by the host
        return None if isinstance(given, str) or not isinstance(given, Collection) else given
    touched = touched_keys(verdict)
    if not touched:
        return None
    starts = ("unet.", "transformer.") if model_type == "UNet" else ("text_encoder.", "text_encoders.")
    bare = {key.removeprefix(start) for key in touched for start in starts}
    return frozenset(_with_weight(touched | bare))


def _with_weight(names: Collection[str]) -> set[str]:
    return {*names, *(f"{name}.weight" for name in names)}


def _unet(captured: CapturedModel, snapshot: MemorySnapshot) -> UnetBaseline:
    device = snapshot.accelerator(snapshot.device_in_use() or "")
    return {
        "model_id": captured.model_id,
        "class": captured.class_name,
        "device": captured.placement.device,
        "patches_count": captured.patch_count,
        "patches_uuid": captured.patches_uuid,
        "memory_allocated": device.allocated_bytes,
        "memory_reserved": device.reserved_bytes,
        "keys": len(captured.keys),
        "fingerprinted_keys": len(captured.fingerprints),
        "fingerprint_seconds": captured.fingerprint_seconds,
        "fingerprint_gb_per_second": _speed(captured),
        "captured": captured,
        "unavailable": _capture_reasons(captured, device.allocated_bytes, device.reserved_bytes),
    }


def _clip(captured: CapturedModel, snapshot: MemorySnapshot) -> ClipBaseline:
    found: dict[str, Any] = dict(_unet(captured, snapshot))
    renamed = {f"patcher_{name}": found.pop(name) for name in ("patches_count", "patches_uuid")}
    reasons = found["unavailable"]
    for name in ("patches_count", "patches_uuid"):
        if name in reasons:
            reasons[f"patcher_{name}"] = reasons.pop(name)
    return {**found, **renamed}  # type: ignore[typeddict-item]


def _capture_reasons(captured: CapturedModel, allocated: int | None, reserved: int | None) -> dict[str, str]:
    reasons = dict(captured.unavailable)
    for name, value in (("memory_allocated", allocated), ("memory_reserved", reserved)):
        if value is None:
            reasons[name] = NO_ACCELERATOR
    if captured.fingerprint_seconds is None:
        reasons |= dict.fromkeys(("fingerprint_seconds", "fingerprint_gb_per_second"), "not asked for")
    elif not captured.fingerprint_bytes:
        reasons["fingerprint_gb_per_second"] = "there was nothing to look at"
    return reasons


def _speed(captured: CapturedModel) -> float | None:
    seconds, nbytes = captured.fingerprint_seconds, captured.fingerprint_bytes
    return nbytes / seconds / 1e9 if seconds and nbytes else None
