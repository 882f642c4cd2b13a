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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from rich.console import Console

from sigmascope.lora.compatibility import AppliedVerdict
from sigmascope.lora.verdict import LoraVerdict
from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.reading import Reading, lookup, node_outputs, read_host
from sigmascope.records.memory import (
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
    beside_the_stage,
    measure,
    plain_baseline,
    references_of,
    with_reasons,
)
from sigmascope.stages.lora_findings import FileFindings, findings_of
from sigmascope.stages.lora_on_model import (
    FUSED,
    host_of,
    lora_file_facts,
    match_applied,
    match_file,
    names_of_all,
    patch_analysis,
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
_IN_DETAIL = frozenset(
    {"weight_changes", "keys_modified", "keys_added", "keys_removed", "patch_details", "modules"}
)
"""Parts of which the record keeps only how long they are."""


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
    touched = {name for module in verdict.matched for name in module.layers} if verdict else set()
    if not touched:
        return None
    starts = ("unet.", "transformer.") if model_type == "UNet" else ("text_encoder.", "text_encoders.")
    bare = {key.removeprefix(start) for key in touched for start in starts}
    names = touched | bare
    return frozenset((*names, *(f"{name}.weight" for name in names)))


def _unet_baseline(captured: ModelSnapshot, snapshot: MemorySnapshot) -> UnetBaseline:
    device = snapshot.accelerator(snapshot.device_in_use() or "")
    seconds, nbytes = captured.fingerprint_seconds, captured.fingerprint_bytes
    unavailable = dict(captured.unavailable)
    if device.allocated_bytes is None:
        unavailable["memory_allocated"] = NO_ACCELERATOR
    if device.reserved_bytes is None:
        unavailable["memory_reserved"] = NO_ACCELERATOR
    if seconds is None:
        unavailable |= dict.fromkeys(("fingerprint_seconds", "fingerprint_gb_per_second"), "not asked for")
    elif not nbytes:
        unavailable["fingerprint_gb_per_second"] = "there was nothing to look at"
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
        "fingerprint_seconds": seconds,
        "fingerprint_gb_per_second": nbytes / seconds / 1e9 if seconds and nbytes else None,
        "captured": captured,
        "unavailable": unavailable,
    }


def _clip_baseline(captured: ModelSnapshot, snapshot: MemorySnapshot) -> ClipBaseline:
    entries: dict[str, Any] = dict(_unet_baseline(captured, snapshot))
    for name in ("patches_count", "patches_uuid"):
        entries[f"patcher_{name}"] = entries.pop(name)
        if name in entries["unavailable"]:
            entries["unavailable"][f"patcher_{name}"] = entries["unavailable"].pop(name)
    return cast(ClipBaseline, entries)


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
    unet = _analyze_model(baseline, "unet", "UNet", modified_unet, measured.snapshot)
    clip = _analyze_model(baseline, "clip", "CLIP", modified_clip, measured.snapshot)
    path = None if known is None else known.lora_path
    verdict: Reading[LoraVerdict] = Reading(None) if known is None else known.verdict
    if verdict.value is None:
        verdict = match_file(path, modified_unet, modified_clip)
    applied = node_outputs(lora_result) is not None
    effective = _is_effective((unet, clip))
    on_unet, on_clip, left_off = _models_with_lora(unet, clip, modified_unet, modified_clip)
    on_model = match_applied(path, on_unet, on_clip, unet.patches_on, clip.patches_on)
    on_model = _explain_fused_weights(path, verdict, on_model, unet, clip, on_unet, on_clip)
    findings = findings_of(
        [("UNet", unet.weights, unet.patches), ("CLIP", clip.weights, clip.patches)],
        FileFindings(verdict.value, on_model.value, host_of(modified_unet, modified_clip)),
        effective,
        applied=applied,
        left_off=left_off,
    )
    failed = any(finding.severity in ("error", "critical") for finding in findings)
    unavailable: dict[str, str] = {}
    if verdict.value is None:
        unavailable |= dict.fromkeys(("verdict", "applied_verdict"), verdict.reason or "unknown")
    if effective is None:
        unavailable["effective"] = (
            "contents of before and now could not be compared, and no change is registered"
        )
    impact: Mapping[str, Any] = {} if measured.impact is None else measured.impact.as_dict()
    lora_file = lookup(baseline, "lora_file")
    return {
        **measured.as_dict(error is None and effective is True and not failed, **unavailable),
        "lora_application_success": applied and error is None,
        "models_returned": _count_models(lora_result),
        "unet_changes": unet.identity,
        "clip_changes": clip.identity,
        "unet_weight_changes": unet.weights,
        "clip_weight_changes": clip.weights,
        "unet_lora_patches": unet.patches,
        "clip_lora_patches": clip.patches,
        "placement_changes": {"unet": unet.placement, "clip": clip.placement},
        "memory_impact": {
            "unet_memory_change": unet.memory,
            "clip_memory_change": clip.memory,
            "ram": impact.get("ram"),
            "process": impact.get("process"),
            "gpu": impact.get("gpu"),
            "gpus": impact.get("gpus", {}),
        },
        "effective": effective,
        "analysis_seconds": time.perf_counter() - began,
        "lora_file": cast(LoraFileFacts, lora_file) if isinstance(lora_file, dict) else lora_file_facts(None),
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


def _is_effective(models: Sequence[ModelAnalysis]) -> bool | None:
    """Whether any weight does something else than before; None if that could not be looked at."""
    if any(model.weights["keys_value_changed"] for model in models):
        return True
    was_seen = False
    for model in models:
        has_patches = model.patches["total_patched_keys"]
        if model.weights["keys_compared"] or has_patches:
            was_seen = True
        elif any(name.endswith("fingerprints") for name in model.weights["unavailable"]):
            return None  # contents were asked for and none could be compared, as on the meta device
    return False if was_seen else None


def _explain_fused_weights(
    path: object,
    verdict: Reading[LoraVerdict],
    on_model: Reading[AppliedVerdict],
    unet: ModelAnalysis,
    clip: ModelAnalysis,
    *models: object,
) -> Reading[AppliedVerdict]:
    """What is on the models with what is in their weights, which is taken off the unexplained ones."""
    if on_model.value is None or not on_model.value.missing:
        return on_model
    names = read_host(lambda: names_of_all(*models)).value
    if names is None:
        return on_model
    samples = {
        name(key): pair
        for name, model in zip(names, (unet, clip), strict=True)
        for key, pair in model.looks.samples_of_changed().items()
    }
    fused = with_fused(path, verdict.value, on_model.value, samples)
    explained = {key for module in fused.there if module.state_reason == FUSED for key in module.keys}
    for name, model in zip(names, (unet, clip), strict=True):
        weights = model.weights
        weights["unexplained"] = [key for key in weights["unexplained"] if name(key) not in explained]
    return Reading(fused)


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


def _plain_lora_baseline(baseline: object) -> dict[str, Any] | None:
    """The baseline as JSON values, without what it keeps for the analysis."""
    plain = plain_baseline(baseline)
    for name in ("unet", "clip"):
        if plain is None or not isinstance(plain.get(name), Mapping):
            continue
        plain[name] = {entry: value for entry, value in plain[name].items() if entry != "captured"}
        for entry in ("device", "patches_uuid", "patcher_patches_uuid"):
            if plain[name].get(entry) is not None:
                plain[name][entry] = str(plain[name][entry])
    return plain


def in_short(analysis: Mapping[str, Any]) -> dict[str, Any]:
    """An analysis for the record: of single weights only how much each changed, of other lists how long they are.

    Of what the stage itself holds only memory's change is kept, which has that of each model.
    """
    memory = {"memory_impact": analysis["memory_impact"]} if "memory_impact" in analysis else {}
    return {name: _short(name, value) for name, value in {**beside_the_stage(analysis), **memory}.items()}


def _short(name: str, value: Any) -> Any:
    if name == "keys_value_changed" and isinstance(value, Mapping):
        return {key: change.get("relative_change") for key, change in value.items()}
    if name in _IN_DETAIL and isinstance(value, Mapping | list):
        return len(value)
    if isinstance(value, Mapping):
        return {key: _short(str(key), inner) for key, inner in value.items()}
    return value


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
    before = _before(original_model, model_type, contents=False)
    after = take_snapshot(modified_model, model_type, contents=False)
    return identity_changes(before, after, is_same(before, modified_model))


def _before(original: object, model_type: str, *, contents: bool) -> ModelSnapshot:
    return snapshot_in(original) or take_snapshot(original, model_type, contents=contents)


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
    before = _before(original_model, model_type, contents=False)
    return placement_changes(before, take_snapshot(modified_model, model_type, contents=False))


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
    """What PyTorch's allocator holds on the device in use, against the bytes of a baseline."""
    device = now.accelerator(now.device_in_use() or "")
    error = (
        None if isinstance(baseline, Mapping) else f"the baseline is {type(baseline).__name__}, not a dict"
    )
    size = None if model is None else read_host(lambda: weights_nbytes(model, model_type)).value
    readings: dict[str, tuple[float | None, str | None]] = {
        "model_size_mb": (mib(size), "no module was found in the model")
    }
    for name, current in (("allocated", device.allocated_bytes), ("reserved", device.reserved_bytes)):
        why = NO_ACCELERATOR
        if device.device:
            why = device.unavailable.get(f"{name}_bytes", "it could not be read")
        before = lookup(baseline, f"memory_{name}")
        if isinstance(before, bool) or not isinstance(before, int):
            before = None
        why_no_change = why if current is None else "the baseline does not say"
        readings[f"{name}_change_mb"] = (mib(change(before, current)), why_no_change)
        readings[f"current_{name}_mb"] = (mib(current), why)
    return with_reasons(MemoryChangeOfModel, readings, error=error)


def print_lora_analysis_summary(analysis: Mapping[str, Any] | None, console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_lora_application_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(TITLE, analysis, sections, console)
