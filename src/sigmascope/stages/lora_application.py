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
from sigmascope.probes.reading import Reading, error_text, node_outputs, read_host
from sigmascope.records.memory import (
    AcceleratorMemory,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
    PeakMemoryDict,
    change,
    mib,
)
from sigmascope.stages.baseline import checked_seconds, exception_dict, memory_now
from sigmascope.stages.lora_file import (
    fused_keys,
    host_of,
    judged,
    judged_applied,
    lora_file_facts,
    names_of_all,
    touched_keys,
    with_fused,
)
from sigmascope.stages.lora_findings import FileFindings, findings_of
from sigmascope.stages.lora_patches import patch_analysis
from sigmascope.stages.lora_summary import TITLE, sections
from sigmascope.stages.model_snapshot import (
    Applied,
    CapturedModel,
    capture_model,
    identity_changes,
    is_same,
    placement_changes,
    read_applied,
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
from sigmascope.stages.weight_changes import Moments, moments_of, weight_changes

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
NO_BASELINE = "there is no baseline"
NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"
_CHANGE_FIELDS = ("allocated_change_mb", "reserved_change_mb")
_CURRENT_FIELDS = ("current_allocated_mb", "current_reserved_mb")
NO_ACCELERATOR = "no accelerator was found"


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
    return capture(unet_model, clip_model, lora_path, keys, accelerator)


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
    return analyze(
        baseline, modified_unet, modified_clip, Outcome(lora_result, elapsed_time, peak_memory, error)
    )


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


def _before(original: object, model_type: str, *, contents: bool) -> CapturedModel:
    return captured_of(original) or capture_model(original, model_type, contents=contents)


def _look(model: object, model_type: str) -> CapturedModel:
    return capture_model(model, model_type, contents=False)


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
    applied = read_applied(modified_model, model_type)
    return safe_weight_changes(moments_of(before, modified_model, model_type, applied))


def analyze_lora_patches(modified_model: object, model_type: str) -> PatchAnalysis:
    """Every change that is on a model now: what it is, how strong, and how far it has come. Never raises.

    Args:
        modified_model: With LoRAs or without.
        model_type: Such as "UNet" or "CLIP".
    """
    return safe_patch_analysis(read_applied(modified_model, model_type))


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


def calculate_memory_change(baseline_info: object, current_model: object) -> MemoryChangeOfModel:
    """What PyTorch's allocator holds more than at the baseline, in MiB. Never raises.

    Args:
        baseline_info: `baseline["unet"]` or `baseline["clip"]`.
        current_model: The model now; for its size.
    """
    captured = captured_of(baseline_info)
    model_type = "" if captured is None else captured.model_type
    return memory_change(baseline_info, current_model, model_type, memory_snapshot())


def print_lora_analysis_summary(analysis: Mapping[str, Any] | None, console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_lora_application_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(TITLE, analysis, sections, console)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the host gave back, and what watched it."""

    lora_result: object
    elapsed_time: object = None
    peak_memory: PeakMemory | PeakMemoryDict | None = None
    error: BaseException | str | None = None


def analyze(baseline: object, unet: object, clip: object, outcome: Outcome) -> LoraAnalysis:
    """The analysis that `analyze_lora_application_results` gives."""
    began = time.perf_counter()
    known = references_of(baseline)
    snapshot = memory_snapshot(None if known is None else known.accelerator)
    sides: Mapping[str, Side] = {
        "unet": side_of(baseline, "unet", "UNet", unet, snapshot),
        "clip": side_of(baseline, "clip", "CLIP", clip, snapshot),
    }
    path = None if known is None else known.lora_path
    verdict = judged(path, unet, clip) if known is None or known.verdict.value is None else known.verdict
    applied, returned = node_outputs(outcome.lora_result) is not None, models_in(outcome.lora_result)
    effective = is_effective(sides)
    unet_as_given, clip_as_given = (
        _is_returned_as_given(sides[name], model) for name, model in (("unet", unet), ("clip", clip))
    )
    left_off = unet_as_given and clip_as_given and not (unet is None and clip is None)
    on_unet = None if unet_as_given and not left_off else unet
    on_clip = None if clip_as_given and not left_off else clip
    on_model = judged_applied(path, on_unet, on_clip, sides["unet"].applied, sides["clip"].applied)
    on_model, sides = with_fused_explained(path, verdict, on_model, sides, on_unet, on_clip)
    named = [("UNet", sides["unet"]), ("CLIP", sides["clip"])]
    findings = findings_of(
        [(name, side.weights, side.patches) for name, side in named],
        FileFindings(verdict.value, on_model.value, host_of(unet, clip)),
        effective,
        applied=applied,
        left_off=left_off,
    )
    seconds, why_no_time = checked_seconds(outcome.elapsed_time)
    impact = None if known is None else MemoryImpact(known.snapshot, snapshot)
    error = outcome.error
    return {
        "lora_application_success": applied and error is None,
        "models_returned": returned,
        "unet_changes": sides["unet"].identity,
        "clip_changes": sides["clip"].identity,
        "unet_weight_changes": sides["unet"].weights,
        "clip_weight_changes": sides["clip"].weights,
        "unet_lora_patches": sides["unet"].patches,
        "clip_lora_patches": sides["clip"].patches,
        "placement_changes": {"unet": sides["unet"].placement, "clip": sides["clip"].placement},
        "memory_impact": lora_memory_impact(sides["unet"].memory, sides["clip"].memory, impact),
        "success": error is None and effective is True and not _has_errors(findings),
        "effective": effective,
        "error": None if error is None else error_text(error),
        "exception_details": exception_dict(error) if isinstance(error, BaseException) else None,
        "elapsed_time": seconds,
        "analysis_seconds": time.perf_counter() - began,
        "lora_file": _lora_file_of(baseline),
        "verdict": None if verdict.value is None else verdict.value.as_dict(),
        "applied_verdict": None if on_model.value is None else on_model.value.as_dict(),
        "findings": [asdict(finding) for finding in findings],
        "peak_memory": _peak(outcome.peak_memory),
        "baseline": plain_baseline(baseline),
        "current_memory": memory_now(snapshot),
        "unavailable": _unavailable(impact, outcome, verdict, effective, why_no_time),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One model's part of the analysis, and the changes that are on it."""

    applied: Applied
    moments: Moments
    identity: IdentityChanges
    weights: WeightChanges
    patches: PatchAnalysis
    placement: PlacementChanges
    memory: MemoryChangeOfModel


def _is_returned_as_given(side: Side, model: object) -> bool:
    """Whether ComfyUI's loader left a model alone: it clones each one that it registers changes on."""
    if model is None or not is_same(side.moments.before, model) or side.weights["keys_value_changed"]:
        return model is None
    return side.identity["patches_added"] == 0 and host_of(model) == "comfyui"


def models_in(lora_result: object) -> int:
    """How many models the host returned: those of a tuple; one for anything else that is not None."""
    lora_result = node_outputs(lora_result)
    if lora_result is None:
        return 0
    count = read_host(lambda: len(lora_result) if isinstance(lora_result, tuple | list | Mapping) else 1)
    return 1 if count.value is None else count.value


def _has_errors(findings: Any) -> bool:
    return any(finding.severity in ("error", "critical") for finding in findings)


def _lora_file_of(baseline: object) -> LoraFileFacts:
    facts: LoraFileFacts | None = entry_of(baseline, "lora_file")
    return facts if isinstance(facts, dict) else lora_file_facts(None)


def _peak(peak: PeakMemory | PeakMemoryDict | None) -> PeakMemoryDict | None:
    return peak.as_dict() if isinstance(peak, PeakMemory) else peak


def _unavailable(
    impact: MemoryImpact | None,
    outcome: Outcome,
    verdict: Reading[LoraVerdict],
    effective: bool | None,
    why_no_time: str | None,
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if impact is None:
        reasons["memory_impact"] = NO_BASELINE
    if outcome.peak_memory is None:
        reasons["peak_memory"] = NO_PEAKS
    if verdict.value is None:
        reasons |= dict.fromkeys(("verdict", "applied_verdict"), verdict.reason or "unknown")
    if effective is None:
        reasons["effective"] = "contents of before and now could not be compared, and no change is registered"
    if why_no_time is not None:
        reasons["elapsed_time"] = why_no_time
    return reasons


def side_of(baseline: object, name: str, model_type: str, model: object, now: MemorySnapshot) -> Side:
    """Compare one model with its own part of a baseline."""
    part = entry_of(baseline, name)
    before = captured_of(part) or CapturedModel(
        model_type, unavailable=dict.fromkeys(("class", "device", "patches_count", "weights"), NO_BASELINE)
    )
    applied = read_applied(model, model_type)
    moments = moments_of(before, model, model_type, applied)
    return Side(
        applied,
        moments,
        identity_changes(before, moments.after, is_same(before, model)),
        safe_weight_changes(moments),
        safe_patch_analysis(applied),
        placement_changes(before, moments.after),
        memory_change(part, model, model_type, now),
    )


def is_effective(sides: Mapping[str, Side]) -> bool | None:
    """Whether any weight does something else than before; None if that could not be looked at."""
    if any(side.weights["keys_value_changed"] for side in sides.values()):
        return True
    known = any(
        side.weights["keys_compared"] or side.patches["total_patched_keys"] for side in sides.values()
    )
    return False if known and not any(map(_is_hidden, sides.values())) else None


def _is_hidden(side: Side) -> bool:
    """Whether contents were asked for and none could be compared, as where a model is on the meta device."""
    lacking = any(name.endswith("fingerprints") for name in side.weights["unavailable"])
    return lacking and not side.weights["keys_compared"] and not side.patches["total_patched_keys"]


def with_fused_explained(
    path: object,
    verdict: Reading[LoraVerdict],
    on_model: Reading[AppliedVerdict],
    sides: Mapping[str, Side],
    unet: object,
    clip: object,
) -> tuple[Reading[AppliedVerdict], Mapping[str, Side]]:
    """What is on the models with what is in their weights, which then is no longer unexplained."""
    if on_model.value is None or not on_model.value.missing:
        return on_model, sides
    names = read_host(lambda: names_of_all(unet, clip)).value
    if names is None:
        return on_model, sides
    samples = {
        name(key): pair
        for name, side in zip(names, sides.values(), strict=True)
        for key, pair in side.moments.samples_of_changed().items()
    }
    found = with_fused(path, verdict.value, on_model.value, samples)
    explained = fused_keys(found)
    return Reading(found), {
        kind: replace(
            side,
            weights=_without_explained(
                side.weights, {key for key in side.weights["unexplained"] if name(key) in explained}
            ),
        )
        for name, (kind, side) in zip(names, sides.items(), strict=True)
    }


def _without_explained(weights: WeightChanges, explained: Collection[str]) -> WeightChanges:
    return {**weights, "unexplained": [key for key in weights["unexplained"] if key not in explained]}


def safe_weight_changes(moments: Moments) -> WeightChanges:
    """`weight_changes`, or its structure with the reason why there is nothing in it."""
    found = read_host(lambda: weight_changes(moments))
    if found.value is not None:
        return found.value
    nothing = CapturedModel(moments.after.model_type, unavailable={"weights": found.reason or "unknown"})
    return weight_changes(Moments(nothing, nothing, None, Applied()))


def safe_patch_analysis(applied: Applied) -> PatchAnalysis:
    """`patch_analysis`, or its structure with the reason why there is nothing in it."""
    found = read_host(lambda: patch_analysis(applied))
    if found.value is not None:
        return found.value
    return patch_analysis(Applied(unavailable={"model": found.reason or "unknown"}))


def memory_change(
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
            reasons[_CURRENT_FIELDS[index]] = why
        if old is None or new is None:
            reasons[_CHANGE_FIELDS[index]] = why if new is None else "the baseline does not say"
    if size is None:
        reasons["model_size_mb"] = "no module was found in the model"
    return reasons


def lora_memory_impact(
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


def capture(
    unet: object, clip: object, lora_path: object, keys: Keys, accelerator: Accelerator | None
) -> LoraBaseline:
    """The baseline that `capture_lora_baseline` gives."""
    timestamp = time.time()
    verdict = judged(lora_path, unet, clip)
    before = [
        capture_model(model, name, keys=_keys_to_look_at(keys, verdict.value, name), contents=keys != "none")
        for model, name in ((unet, "UNet"), (clip, "CLIP"))
    ]
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": timestamp,
        "unet": _unet_baseline(before[0], snapshot),
        "clip": _clip_baseline(before[1], snapshot),
        "lora_file": lora_file_facts(lora_path),
        "memory": memory_now(snapshot),
        "references": References(snapshot, before[0], before[1], lora_path, verdict, accelerator),
    }


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


def _unet_baseline(captured: CapturedModel, snapshot: MemorySnapshot) -> UnetBaseline:
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


def _gb_per_second(captured: CapturedModel) -> float | None:
    seconds, nbytes = captured.fingerprint_seconds, captured.fingerprint_bytes
    return nbytes / seconds / 1e9 if seconds and nbytes else None


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


def _clip_baseline(captured: CapturedModel, snapshot: MemorySnapshot) -> ClipBaseline:
    found: dict[str, Any] = dict(_unet_baseline(captured, snapshot))
    renamed = {f"patcher_{name}": found.pop(name) for name in ("patches_count", "patches_uuid")}
    reasons = found["unavailable"]
    for name in ("patches_count", "patches_uuid"):
        if name in reasons:
            reasons[f"patcher_{name}"] = reasons.pop(name)
    return {**found, **renamed}  # type: ignore[typeddict-item]


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


def entry_of(thing: object, name: str) -> Any:
    """The entry of that name; None if there is none, it is no mapping, or reading it raises."""
    return read_host(lambda: thing.get(name) if isinstance(thing, Mapping) else None).value
