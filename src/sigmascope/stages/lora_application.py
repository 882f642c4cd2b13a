"""LoRA application: what a LoRA did to a model, and whether it did anything.

    baseline = capture_lora_baseline(unet, clip, "style.safetensors")
    result = apply_lora(...)
    analysis = analyze_lora_application_results(baseline, unet, clip, result)
    print_lora_analysis_summary(analysis)

The functions change nothing, move nothing, put nothing on the host's objects, and keep no model and no weight
alive. They know ComfyUI's patchers and PEFT's layers (and with these diffusers' loaders). What cannot be read
is None, with the reason in the `unavailable` beside it; so it is where reading the host's objects raises.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console

from sigmascope.lora.load_check import AppliedVerdict
from sigmascope.lora.verdict import LoraVerdict
from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.reading import Reading, lookup, node_outputs, read_host
from sigmascope.records.memory import (
    AcceleratorMemory,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
    PeakMemoryDict,
    change,
    mib,
)
from sigmascope.stages.baseline import (
    NO_ACCELERATOR,
    NO_BASELINE,
    References,
    baseline_of,
    measure,
    plain_baseline,
    references_of,
)
from sigmascope.stages.lora_findings import FileFindings, findings_of
from sigmascope.stages.lora_on_model import (
    fused_keys,
    host_of,
    lora_file_facts,
    match_applied,
    match_file,
    names_of_all,
    patch_analysis,
    touched_keys,
    with_fused,
)
from sigmascope.stages.lora_summary import TITLE, sections
from sigmascope.stages.model_snapshot import (
    ModelPatches,
    ModelSnapshot,
    identity_changes,
    is_same,
    placement_changes,
    read_model_patches,
    take_snapshot,
    weights_nbytes,
)
from sigmascope.stages.schema import (
    ClipBaseline,
    IdentityChanges,
    LoraAnalysis,
    LoraBaseline,
    LoraFileFacts,
    LoraMemoryImpact,
    MemoryChangeOfModel,
    PatchAnalysis,
    PlacementChanges,
    UnetBaseline,
    WeightChanges,
)
from sigmascope.stages.summary import print_analysis
from sigmascope.stages.weight_changes import BeforeAndAfter, look_again, weight_changes

__all__ = [
    "LoraAnalysis",
    "LoraBaseline",
    "analyze_lora_application_results",
    "analyze_lora_patches",
    "calculate_memory_change",
    "capture_lora_baseline",
    "print_lora_analysis_summary",
    "track_model_identity_changes",
    "track_model_placement_changes",
    "track_weight_modifications",
]

Keys = Collection[str] | Literal["lora", "none"] | None
"""Whose contents a baseline looks at: see `capture_lora_baseline`."""
_CHANGE_FIELDS = ("allocated_change_mb", "reserved_change_mb")
_CURRENT_FIELDS = ("current_allocated_mb", "current_reserved_mb")


def capture_lora_baseline(
    unet_model: object,
    clip_model: object,
    lora_path: object = None,
    *,
    keys: Keys = None,
    accelerator: Accelerator | None = None,
) -> LoraBaseline:
    """Models, contents of their weights, file and memory before the application. Never raises.

    Contents are kept as fingerprints and a thousand sampled elements a weight. Taking them reads every weight
    once; those on an accelerator are waited for.

    Args:
        unet_model: The denoiser: a module, ComfyUI's patcher, a pipeline, or several of them; None if there is none.
        clip_model: The text encoder or encoders, likewise, or ComfyUI's CLIP.
        lora_path: The LoRA's file, for its facts and for what of it matches the models.
        keys: Whose contents to look at: None all weights, "lora" those that the file changes, "none" nothing, or
            names.
        accelerator: What to ask about devices; None finds out.
    """
    verdict = match_file(lora_path, unet_model, clip_model)
    before = [
        take_snapshot(model, name, keys=_keys_to_look_at(keys, verdict.value, name), contents=keys != "none")
        for model, name in ((unet_model, "UNet"), (clip_model, "CLIP"))
    ]
    memory = memory_snapshot(accelerator)
    return {
        **baseline_of(LoraReferences(memory, accelerator, lora_path, verdict)),
        "unet": _unet_baseline(before[0], memory),
        "clip": _clip_baseline(before[1], memory),
        "lora_file": lora_file_facts(lora_path),
    }


@dataclass(frozen=True, slots=True, repr=False)
class LoraReferences(References):
    """What a LoRA application's baseline keeps; `unet` and `clip` of the baseline keep their models' snapshots."""

    lora_path: object
    verdict: Reading[LoraVerdict]


def _keys_to_look_at(keys: Keys, verdict: LoraVerdict | None, model_type: str) -> Collection[str] | None:
    """Names of the weights to look at in a model; None: all."""
    if keys is None or keys == "none":
        return None
    if keys != "lora":
        given: Any = keys  # by the host, so it may be anything
        return None if isinstance(given, str) or not isinstance(given, Collection) else given
    touched = touched_keys(verdict)
    if not touched:
        return None
    starts = ("unet.", "transformer.") if model_type == "UNet" else ("text_encoder.", "text_encoders.")
    bare = {key.removeprefix(start) for key in touched for start in starts}
    return frozenset(_with_weight(touched | bare))


def _with_weight(names: Collection[str]) -> set[str]:
    return {*names, *(f"{name}.weight" for name in names)}


def _unet_baseline(captured: ModelSnapshot, snapshot: MemorySnapshot) -> UnetBaseline:
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
        "fingerprint_gb_per_second": _gb_per_second(captured),
        "captured": captured,
        "unavailable": _capture_reasons(captured, device.allocated_bytes, device.reserved_bytes),
    }


def _gb_per_second(captured: ModelSnapshot) -> float | None:
    seconds, nbytes = captured.fingerprint_seconds, captured.fingerprint_bytes
    return nbytes / seconds / 1e9 if seconds and nbytes else None


def _capture_reasons(captured: ModelSnapshot, allocated: int | None, reserved: int | None) -> dict[str, str]:
    reasons = dict(captured.unavailable)
    for name, value in (("memory_allocated", allocated), ("memory_reserved", reserved)):
        if value is None:
            reasons[name] = NO_ACCELERATOR
    if captured.fingerprint_seconds is None:
        reasons |= dict.fromkeys(("fingerprint_seconds", "fingerprint_gb_per_second"), "not asked for")
    elif not captured.fingerprint_bytes:
        reasons["fingerprint_gb_per_second"] = "there was nothing to look at"
    return reasons


def _clip_baseline(captured: ModelSnapshot, snapshot: MemorySnapshot) -> ClipBaseline:
    entries: dict[str, Any] = dict(_unet_baseline(captured, snapshot))
    renamed = {f"patcher_{name}": entries.pop(name) for name in ("patches_count", "patches_uuid")}
    reasons = entries["unavailable"]
    for name in ("patches_count", "patches_uuid"):
        if name in reasons:
            reasons[f"patcher_{name}"] = reasons.pop(name)
    return {**entries, **renamed}  # type: ignore[typeddict-item]


def analyze_lora_application_results(
    baseline: object,
    modified_unet: object,
    modified_clip: object,
    lora_result: object,
    *,
    elapsed_time: object = None,
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
) -> LoraAnalysis:
    """What a LoRA's application changed, each model against its own original. Never raises.

    Args:
        baseline: What `capture_lora_baseline` gave; None: only what is on the models now can be told.
        modified_unet: The denoiser after the application, cloned or changed in place.
        modified_clip: The text encoder or encoders.
        lora_result: What the application returned, such as ComfyUI's (model, clip). diffusers returns None, which
            counts as no success: hand over the pipeline. Whether anything changed is in `effective`.
        elapsed_time: Seconds that the application took.
        peak_memory: The peak of the stage that watched it.
        error: What the application raised, if it did.
    """
    began = time.perf_counter()
    measured = measure(baseline, elapsed_time, peak_memory, error)
    known = references_of(baseline, LoraReferences)
    models: Mapping[str, ModelAnalysis] = {
        "unet": _analyze_model(baseline, "unet", "UNet", modified_unet, measured.snapshot),
        "clip": _analyze_model(baseline, "clip", "CLIP", modified_clip, measured.snapshot),
    }
    unet, clip = models["unet"], models["clip"]
    path = None if known is None else known.lora_path
    verdict: Reading[LoraVerdict] = Reading(None) if known is None else known.verdict
    if verdict.value is None:
        verdict = match_file(path, modified_unet, modified_clip)
    applied = node_outputs(lora_result) is not None
    effective = _is_effective(models)
    on_unet, on_clip, left_off = _models_with_lora(unet, clip, modified_unet, modified_clip)
    on_model = match_applied(path, on_unet, on_clip, unet.patches_on, clip.patches_on)
    on_model, models = _explain_fused_weights(path, verdict, on_model, models, on_unet, on_clip)
    unet, clip = models["unet"], models["clip"]
    findings = findings_of(
        [("UNet", unet.weights, unet.patches), ("CLIP", clip.weights, clip.patches)],
        FileFindings(verdict.value, on_model.value, host_of(modified_unet, modified_clip)),
        effective,
        applied=applied,
        left_off=left_off,
    )
    failed = any(finding.severity in ("error", "critical") for finding in findings)
    return {
        **measured.as_dict(
            error is None and effective is True and not failed, **_why_unknown(verdict, effective)
        ),
        "lora_application_success": applied and error is None,
        "models_returned": _count_models(lora_result),
        "unet_changes": unet.identity,
        "clip_changes": clip.identity,
        "unet_weight_changes": unet.weights,
        "clip_weight_changes": clip.weights,
        "unet_lora_patches": unet.patches,
        "clip_lora_patches": clip.patches,
        "placement_changes": {"unet": unet.placement, "clip": clip.placement},
        "memory_impact": _memory_impact(unet.memory, clip.memory, measured.impact),
        "effective": effective,
        "analysis_seconds": time.perf_counter() - began,
        "lora_file": _lora_file_of(baseline),
        "verdict": None if verdict.value is None else verdict.value.as_dict(),
        "applied_verdict": None if on_model.value is None else on_model.value.as_dict(),
        "findings": [asdict(finding) for finding in findings],
        "baseline": _plain_lora_baseline(baseline),
    }


@dataclass(frozen=True, slots=True, eq=False)
class ModelAnalysis:
    """One model's part of the analysis, and the changes that are on it."""

    patches_on: ModelPatches
    looks: BeforeAndAfter
    identity: IdentityChanges
    weights: WeightChanges
    patches: PatchAnalysis
    placement: PlacementChanges
    memory: MemoryChangeOfModel


def _analyze_model(
    baseline: object, name: str, model_type: str, model: object, now: MemorySnapshot
) -> ModelAnalysis:
    """Compare one model with its own part of a baseline."""
    part = lookup(baseline, name)
    before = snapshot_in(part) or ModelSnapshot(
        model_type, unavailable=dict.fromkeys(("class", "device", "patches_count", "weights"), NO_BASELINE)
    )
    patches = read_model_patches(model, model_type)
    looks = look_again(before, model, model_type, patches)
    return ModelAnalysis(
        patches,
        looks,
        identity_changes(before, looks.after, is_same(before, model)),
        _safe_weight_changes(looks),
        _safe_patch_analysis(patches),
        placement_changes(before, looks.after),
        _memory_change(part, model, model_type, now),
    )


def _safe_weight_changes(looks: BeforeAndAfter) -> WeightChanges:
    """`weight_changes`, or its structure with the reason why there is nothing in it."""
    reading = read_host(lambda: weight_changes(looks))
    if reading.value is not None:
        return reading.value
    nothing = ModelSnapshot(looks.after.model_type, unavailable={"weights": reading.reason or "unknown"})
    return weight_changes(BeforeAndAfter(nothing, nothing, None, ModelPatches()))


def _safe_patch_analysis(patches: ModelPatches) -> PatchAnalysis:
    """`patch_analysis`, or its structure with the reason why there is nothing in it."""
    reading = read_host(lambda: patch_analysis(patches))
    if reading.value is not None:
        return reading.value
    return patch_analysis(ModelPatches(unavailable={"model": reading.reason or "unknown"}))


def _is_effective(models: Mapping[str, ModelAnalysis]) -> bool | None:
    """Whether any weight does something else than before; None if that could not be looked at."""
    if any(model.weights["keys_value_changed"] for model in models.values()):
        return True
    known = any(
        model.weights["keys_compared"] or model.patches["total_patched_keys"] for model in models.values()
    )
    return False if known and not any(map(_is_hidden, models.values())) else None


def _is_hidden(model: ModelAnalysis) -> bool:
    """Whether contents were asked for and none could be compared, as where a model is on the meta device."""
    lacking = any(name.endswith("fingerprints") for name in model.weights["unavailable"])
    return lacking and not model.weights["keys_compared"] and not model.patches["total_patched_keys"]


def _explain_fused_weights(
    path: object,
    verdict: Reading[LoraVerdict],
    on_model: Reading[AppliedVerdict],
    models: Mapping[str, ModelAnalysis],
    unet: object,
    clip: object,
) -> tuple[Reading[AppliedVerdict], Mapping[str, ModelAnalysis]]:
    """What is on the models with what is in their weights, which then is no longer unexplained."""
    if on_model.value is None or not on_model.value.missing:
        return on_model, models
    names = read_host(lambda: names_of_all(unet, clip)).value
    if names is None:
        return on_model, models
    samples = {
        name(key): pair
        for name, model in zip(names, models.values(), strict=True)
        for key, pair in model.looks.samples_of_changed().items()
    }
    fused = with_fused(path, verdict.value, on_model.value, samples)
    explained = fused_keys(fused)
    return Reading(fused), {
        kind: replace(
            model,
            weights=_without_explained(
                model.weights, {key for key in model.weights["unexplained"] if name(key) in explained}
            ),
        )
        for name, (kind, model) in zip(names, models.items(), strict=True)
    }


def _without_explained(weights: WeightChanges, explained: Collection[str]) -> WeightChanges:
    return {**weights, "unexplained": [key for key in weights["unexplained"] if key not in explained]}


def _models_with_lora(
    unet: ModelAnalysis, clip: ModelAnalysis, modified_unet: object, modified_clip: object
) -> tuple[object, object, bool]:
    """The models that the LoRA was meant for, and whether the host gave all of them back as they went in."""
    unet_as_given = _is_returned_as_given(unet, modified_unet)
    clip_as_given = _is_returned_as_given(clip, modified_clip)
    left_off = unet_as_given and clip_as_given and not (modified_unet is None and modified_clip is None)
    return (
        None if unet_as_given and not left_off else modified_unet,
        None if clip_as_given and not left_off else modified_clip,
        left_off,
    )


def _is_returned_as_given(analysis: ModelAnalysis, model: object) -> bool:
    """Whether ComfyUI's loader left a model alone: it clones each one that it registers changes on."""
    if model is None or not is_same(analysis.looks.before, model) or analysis.weights["keys_value_changed"]:
        return model is None
    return analysis.identity["patches_added"] == 0 and host_of(model) == "comfyui"


def _count_models(lora_result: object) -> int:
    """How many models the host returned: those of a tuple; one for anything else that is not None."""
    lora_result = node_outputs(lora_result)
    if lora_result is None:
        return 0
    count = read_host(lambda: len(lora_result) if isinstance(lora_result, tuple | list | Mapping) else 1)
    return 1 if count.value is None else count.value


def _lora_file_of(baseline: object) -> LoraFileFacts:
    facts: LoraFileFacts | None = lookup(baseline, "lora_file")
    return facts if isinstance(facts, dict) else lora_file_facts(None)


def _plain_lora_baseline(baseline: object) -> dict[str, Any] | None:
    """The baseline as JSON values, without what it keeps for the analysis."""
    plain = plain_baseline(baseline)
    for name in ("unet", "clip"):
        if plain is not None and isinstance(plain.get(name), Mapping):
            plain[name] = _plain_part(plain[name])
    return plain


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"device", "patches_uuid", "patcher_patches_uuid"}
    kept = {name: value for name, value in part.items() if name != "captured"}
    return {n: str(v) if n in texts and v is not None else v for n, v in kept.items()}


def _why_unknown(verdict: Reading[LoraVerdict], effective: bool | None) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if verdict.value is None:
        reasons |= dict.fromkeys(("verdict", "applied_verdict"), verdict.reason or "unknown")
    if effective is None:
        reasons["effective"] = "contents of before and now could not be compared, and no change is registered"
    return reasons


def track_model_identity_changes(
    original_model: object, modified_model: object, model_type: str
) -> IdentityChanges:
    """Whether a model was cloned or changed its class, and how many weights got changes. Never raises.

    Args:
        original_model: Before; the model itself or its part of a baseline, `baseline["unet"]`. A model that was
            changed in place can be compared with its baseline alone.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP".
    """
    before, after = _before(original_model, model_type, contents=False), _look(modified_model, model_type)
    return identity_changes(before, after, is_same(before, modified_model))


def _before(original: object, model_type: str, *, contents: bool) -> ModelSnapshot:
    return snapshot_in(original) or take_snapshot(original, model_type, contents=contents)


def _look(model: object, model_type: str) -> ModelSnapshot:
    return take_snapshot(model, model_type, contents=False)


def track_weight_modifications(
    original_model: object, modified_model: object, model_type: str
) -> WeightChanges:
    """Which weights were added, removed and changed, and by how much. Never raises.

    Args:
        original_model: See `track_model_identity_changes`.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP".
    """
    before = _before(original_model, model_type, contents=True)
    applied = read_model_patches(modified_model, model_type)
    return _safe_weight_changes(look_again(before, modified_model, model_type, applied))


def analyze_lora_patches(modified_model: object, model_type: str) -> PatchAnalysis:
    """Every change that is on a model now: what it is, how strong, and how far it has come. Never raises.

    Args:
        modified_model: With LoRAs or without.
        model_type: Such as "UNet" or "CLIP".
    """
    return _safe_patch_analysis(read_model_patches(modified_model, model_type))


def track_model_placement_changes(
    original_model: object, modified_model: object, model_type: str
) -> PlacementChanges:
    """Whether a model went to another device, or its host would have it on another. Never raises.

    Args:
        original_model: See `track_model_identity_changes`.
        modified_model: After.
        model_type: Such as "UNet" or "CLIP"; a CLIP has three more keys.
    """
    return placement_changes(
        _before(original_model, model_type, contents=False), _look(modified_model, model_type)
    )


def snapshot_in(part: object) -> ModelSnapshot | None:
    """What `baseline["unet"]` or `baseline["clip"]` kept; None for anything else."""
    captured = lookup(part, "captured")
    return captured if isinstance(captured, ModelSnapshot) else None


def calculate_memory_change(baseline_info: object, current_model: object) -> MemoryChangeOfModel:
    """What PyTorch's allocator holds more than at the baseline, in MiB. Never raises.

    Args:
        baseline_info: `baseline["unet"]` or `baseline["clip"]`.
        current_model: The model now; for its size.
    """
    captured = snapshot_in(baseline_info)
    model_type = "" if captured is None else captured.model_type
    return _memory_change(baseline_info, current_model, model_type, memory_snapshot())


def _memory_change(
    baseline: object, model: object, model_type: str, now: MemorySnapshot
) -> MemoryChangeOfModel:
    """What PyTorch's allocator holds on the device in use, against the bytes of a baseline.

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


def _bytes_in(baseline: object, name: str) -> int | None:
    value = lookup(baseline, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _memory_reasons(
    device: AcceleratorMemory, before: list[int | None], current: list[int | None], size: int | None
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for index, (old, new) in enumerate(zip(before, current, strict=True)):
        name = ("allocated_bytes", "reserved_bytes")[index]
        why = device.unavailable.get(name, "it could not be read") if device.device else NO_ACCELERATOR
        if new is None:
            reasons[_CURRENT_FIELDS[index]] = why
        if old is None or new is None:
            reasons[_CHANGE_FIELDS[index]] = why if new is None else "the baseline does not say"
    if size is None:
        reasons["model_size_mb"] = "no module was found in the model"
    return reasons


def _memory_impact(
    unet: MemoryChangeOfModel, clip: MemoryChangeOfModel, impact: MemoryImpact | None
) -> LoraMemoryImpact:
    """Both models' entries beside those that every stage has."""
    whole: Mapping[str, Any] = {} if impact is None else impact.as_dict()
    return {
        "unet_memory_change": unet,
        "clip_memory_change": clip,
        "ram": whole.get("ram"),
        "process": whole.get("process"),
        "gpu": whole.get("gpu"),
        "gpus": whole.get("gpus", {}),
    }


def print_lora_analysis_summary(analysis: Mapping[str, Any] | None, console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_lora_application_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(TITLE, analysis, sections, console)
