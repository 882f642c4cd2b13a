"""LoRA application: what a LoRA did to a model, and whether it did anything.

    baseline = capture_lora_baseline(unet, clip, "style.safetensors")
    result = apply_lora(...)
    analysis = analyze_lora_application_results(baseline, unet, clip, result)
    print_lora_analysis_summary(analysis)

The functions change nothing, move nothing, put nothing on the host's objects, and keep no model and no weight
alive. They know ComfyUI's patchers and PEFT's layers (and with these diffusers' loaders). What cannot be read
is None, with the reason in the `unavailable` beside it, even if reading the host's objects raises.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from rich.console import Console
from torch import Tensor

from sigmascope.analysis.lora_facts import SCALED
from sigmascope.lora.applied_verdict import AppliedVerdict
from sigmascope.lora.file_verdict import LoraVerdict
from sigmascope.lora.norms_at_once import norms_at_once
from sigmascope.lora.patches import keeps_norms
from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import Pending
from sigmascope.probes.module_tree import one_look
from sigmascope.probes.peft import NO_VALUES
from sigmascope.probes.reading import Reading, attempt, lookup, node_outputs, reasons
from sigmascope.records.memory import MemorySnapshot, PeakMemory, PeakMemoryDict, change, mib
from sigmascope.stages import lora_summary
from sigmascope.stages.baseline import (
    NO_ACCELERATOR,
    NO_BASELINE,
    UNTOLD,
    References,
    baseline_of,
    beside_the_stage,
    measure,
    references_of,
)
from sigmascope.stages.lora_findings import (
    IN_BASE,
    IdleChange,
    application_findings,
    file_findings,
    idle_changes,
    raised_by_loader,
    spoilt_weights,
)
from sigmascope.stages.lora_on_model import (
    FUSED,
    SAME_CANCELLED,
    has_hooks,
    host_of,
    lora_file_facts,
    match_applied,
    match_file,
    names_of_all,
    patch_analysis,
    patches_of_file,
    read_file,
    with_fused,
    with_relative_changes,
)
from sigmascope.stages.model_snapshot import (
    ModelPatches,
    ModelSnapshot,
    Weights,
    identity_changes,
    is_same,
    placement_changes,
    read_model_patches,
    take_snapshot,
    weights_in,
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
    ValueChange,
    WeightChanges,
    as_dict,
)
from sigmascope.stages.summary import (
    print_analysis,
)
from sigmascope.stages.weight_changes import (
    BeforeAndAfter,
    Verdicts,
    acts,
    changes_of_content,
    look_again,
    weight_changes,
    weight_verdicts,
)
from sigmascope.stages.weight_check import Checks, begin_checks, follow_weights
from sigmascope.stages.weight_verdict import MAY_BE_LOST, NOT_SEEN, rounding
from sigmascope.units import counted

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
_Baseline = TypeVar("_Baseline")
_RECORDED_BY_LENGTH = frozenset(
    {"weight_changes", "outside", "keys_modified", "keys_added", "keys_removed", "patch_details"}
)
"""Parts of which the record keeps only how long they are."""
_WHILE_IT_SAMPLES = "the LoRA is a hook in the conditioning, and ComfyUI applies it only while it samples"
_MOST_UNMATCHED = 40
"""Modules of a file that the record keeps: the first that matched nothing; of all there are counts."""


@torch.no_grad()  # a parameter that was made in inference mode raises where its gradient may be wanted
@one_look()
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
        lora_path: The LoRA's file, for its facts and for what of it matches the models; or its tensors by key.
        keys: Whose contents to look at: None all weights, "lora" those that the file changes, "none" nothing, or
            names.
        accelerator: What to ask about devices; None finds out.
    """
    verdict, file_facts = read_file(lora_path, unet_model, clip_model)
    before = [
        take_snapshot(model, name, keys=_keys_to_look_at(keys, verdict.value, name), contents=keys != "none")
        for model, name in ((unet_model, "UNet"), (clip_model, "CLIP"))
    ]
    shared = baseline_of(LoraReferences, accelerator, {}, lora_path=lora_path, verdict=verdict)
    memory = shared["references"].snapshot
    return {
        **shared,
        "unet": _model_baseline(UnetBaseline, before[0], memory),
        "clip": _model_baseline(ClipBaseline, before[1], memory, "patcher_"),
        "lora_file": file_facts,
    }


@dataclass(frozen=True, slots=True, repr=False)
class LoraReferences(References):
    """What a LoRA application's baseline keeps; `unet` and `clip` of the baseline keep their models' snapshots."""

    lora_path: object = None
    verdict: Reading[LoraVerdict] = field(default_factory=lambda: Reading(None))


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


def _model_baseline(
    kind: type[_Baseline], captured: ModelSnapshot, snapshot: MemorySnapshot, prefix: str = ""
) -> _Baseline:
    """One model's part of a baseline. `prefix` stands before the names of what ComfyUI's patcher tells."""
    device = snapshot.accelerator(snapshot.device_in_use() or "")
    seconds, nbytes, why = captured.fingerprint_seconds, captured.fingerprint_bytes, captured.unavailable
    speed = nbytes / seconds / 1e9 if seconds and nbytes else None
    patcher = {"patches_count": captured.patch_count, "patches_uuid": captured.patches_uuid}
    return as_dict(
        kind,
        {f"{prefix}{name}": Reading(value, why.get(name)) for name, value in patcher.items()},
        why,
        **{"class": captured.class_name},
        model_id=captured.model_id,
        device=captured.placement.device,
        memory_allocated=Reading(device.allocated_bytes, NO_ACCELERATOR),
        memory_reserved=Reading(device.reserved_bytes, NO_ACCELERATOR),
        keys=Reading(None if "weights" in why else len(captured.keys), why.get("weights")),
        fingerprinted_keys=len(captured.fingerprints),
        fingerprint_seconds=Reading(seconds, why.get("weights", "not asked for")),
        fingerprint_gb_per_second=Reading(
            speed, "not asked for" if seconds is None else "there was nothing to check"
        ),
        captured=captured,
    )


@torch.no_grad()
@one_look()
def analyze_lora_application_results(
    baseline: object,
    modified_unet: object,
    modified_clip: object,
    lora_result: object,
    *,
    elapsed_time: object = None,
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
    puts_on: bool = True,
    is_untrained: bool = False,
    component: str | None = None,
    lora_path: object = None,
    fused: Collection[str] = (),
    merges: bool = False,
    by_peft: bool = False,
    prefix: str | None = None,
) -> LoraAnalysis:
    """What a LoRA's application changed, each model against its own original. Never raises.

    Args:
        baseline: What `capture_lora_baseline` gave; None: only the models' current changes are reported.
        modified_unet: The denoiser after the application, cloned or changed in place.
        modified_clip: The text encoder or encoders.
        lora_result: What the application returned, such as ComfyUI's (model, clip). diffusers returns None, which
            counts as no success: hand over the pipeline. Whether anything changed is in `effective`.
        elapsed_time: Seconds that the application took.
        peak_memory: The peak of the stage that watched it.
        error: What the application raised, if it did.
        puts_on: Whether a LoRA was to be put on, and not to be taken off or set anew: then none on the models is no fault.
        is_untrained: Whether the adapters were made new and not loaded, as by `add_adapter`: then zeros are no fault.
        component: What findings call a `modified_unet` that is no denoiser, such as "controlnet".
        lora_path: The LoRA's file, where the baseline has none: one that the application itself downloaded.
        fused: The names of LoRAs that may be in the weights: beside them, others are named.
        merges: Whether what it took off, it put into the weights, as PEFT's `merge_and_unload` does.
        by_peft: Whether PEFT loaded the file itself, which what is known of the host's loaders does not hold for.
        prefix: With which the names that a model's own loader took had to begin; None: any names.
    """
    began = time.perf_counter()
    measured = measure(baseline, elapsed_time, peak_memory, error)
    known = references_of(baseline, LoraReferences) or LoraReferences(measured.snapshot, None)
    path, verdict = known.lora_path, known.verdict
    path = lora_path if path is None else path
    if verdict.value is None:
        verdict = match_file(path, modified_unet, modified_clip)
    of_file = _OfFile(path, verdict.value, modified_unet, modified_clip)
    unet = _analyze_model(baseline, "unet", "UNet", modified_unet, measured.snapshot, of_file, merges)
    clip = _analyze_model(baseline, "clip", "CLIP", modified_clip, measured.snapshot, of_file, merges)
    applied = node_outputs(lora_result) is not None
    in_conditioning = has_hooks(node_outputs(lora_result))
    effective = _is_effective((unet, clip))
    if merges and effective.value and (lost := _lost_in_merging(unet, clip)):
        effective = Reading(
            None, f"merging changed {counted(lost, 'weight')} by no more than rounding: {MAY_BE_LOST}"
        )
    if in_conditioning and effective.value is False:
        effective = Reading(None, _WHILE_IT_SAMPLES)
    if effective.value is False and path is None and not any(m.has_patches for m in (unet, clip)):
        strange = next((m.looks.after.strange for m in (unet, clip) if m.looks.after.strange), None)
        effective = Reading(None, strange) if strange else effective
    on_unet, on_clip, left_off = _models_with_lora(unet, clip, modified_unet, modified_clip)
    is_whole = on_unet is modified_unet and on_clip is modified_clip
    placed = verdict.value if is_whole else None
    on_model = match_applied(path, on_unet, on_clip, unet.patches_on, clip.patches_on, placed)
    on_model = _explain_fused_weights(path, verdict, on_model, unet, clip, on_unet, on_clip)
    raised = raised_by_loader(error)
    findings = application_findings(
        [
            (component or "Denoiser", unet.weights, unet.patches),
            ("Text encoders", clip.weights, clip.patches),
        ],
        [
            *file_findings(
                verdict.value,
                on_model.value,
                "peft" if by_peft else host_of(modified_unet, modified_clip),
                by_pipeline=hasattr(type(lora_result), "load_lora_weights"),
                no_loader=_shows_no_loader(of_file, unet, clip),
                raised=raised,
                prefix=prefix,
            )
        ],
        effective,
        applied=applied,
        left_off=left_off,
        puts_on=puts_on,
        before=[patch for model in (unet, clip) for patch in model.patches_before],
        in_conditioning=in_conditioning,
        idle=_idle_changes(unet, clip, is_untrained=is_untrained) if effective.value is False else (),
        now=[patch for model in (unet, clip) for patch in model.patches_on.patches],
        raised=raised,
        fused=fused,
    )
    failed = any(finding.severity in ("error", "critical") for finding in findings)
    unavailable = reasons({"verdict": verdict, "applied_verdict": on_model, "effective": effective})
    impact: Mapping[str, Any] = measured.impact_dict() or {}
    lora_file = lookup(baseline, "lora_file") if known.lora_path is not None else lora_file_facts(path)
    return {
        **measured.as_dict(error is None and effective.value is True and not failed, **unavailable),
        "lora_application_success": applied and error is None,
        "models_returned": _count_models(lora_result),
        "unet_changes": unet.identity,
        "clip_changes": clip.identity,
        "unet_weight_changes": unet.weights,
        "clip_weight_changes": clip.weights,
        "unet_lora_patches": unet.patches,
        "clip_lora_patches": clip.patches,
        "placement_changes": {"unet": unet.placement, "clip": clip.placement},
        "left_in_weights": {"unet": unet.left_in_weights, "clip": clip.left_in_weights},
        "memory_impact": {
            "unet_memory_change": unet.memory,
            "clip_memory_change": clip.memory,
            "ram": impact.get("ram"),
            "process": impact.get("process"),
            "gpu": impact.get("gpu"),
            "gpus": impact.get("gpus", {}),
        },
        "effective": effective.value,
        "analysis_seconds": time.perf_counter() - began,
        "lora_file": cast(LoraFileFacts, lora_file) if isinstance(lora_file, dict) else lora_file_facts(None),
        "verdict": None if verdict.value is None else verdict.value.as_dict(),
        "applied_verdict": None if on_model.value is None else on_model.value.as_dict(),
        "findings": [asdict(finding) for finding in findings],
    }


@dataclass(frozen=True, slots=True, eq=False)
class ModelAnalysis:
    """One model's part of the analysis, and the changes that are on it."""

    patches_on: ModelPatches
    looks: BeforeAndAfter
    identity: IdentityChanges
    weights: WeightChanges
    acts: Reading[bool]
    patches: PatchAnalysis
    placement: PlacementChanges
    memory: MemoryChangeOfModel
    merges: bool

    @property
    def patches_before(self) -> tuple[AppliedPatch, ...]:
        """The changes that the baseline has."""
        return () if self.looks.kept.value is None else self.looks.kept.value.patches

    @property
    def left_in_weights(self) -> list[float]:
        """The strengths of changes that are no longer among those on the model, and were merged at the baseline or since.

        Of kinds that a strength of 0 does not take away it is 1; a DoRA of PEFT's whose factors add nothing, and whose magnitudes
        are the weight's norms, has 0.
        """
        facts, changes = self.weights["weight_changes"], self.weights["keys_value_changed"]
        reshaped = {key for key, change in facts.items() if change["shape_changed"]}
        written = {key for key, change in changes.items() if change["content_changed"]} - reshaped
        if self.merges:  # where nothing changed, what acted beside the weight is in it now
            acted = {patch.key for patch in self._gone if patch.state == "lazy"}
            written = (written | (acted - changes.keys())) - self.lost
        merged = [p for p in self._gone if p.state == "merged" or p.key in written]
        return [] if all(map(_adds_zeros, merged)) else sorted({*map(_strength_in_weight, merged)})

    @property
    def _gone(self) -> list[AppliedPatch]:
        on = {(patch.key, patch.source) for patch in self.patches_on.patches}
        return [patch for patch in self.patches_before if (patch.key, patch.source) not in on]

    @property
    def lost(self) -> set[str]:
        """The weights of which a merging took off what acted, and whose contents it changed by no more than rounding."""
        acted = {patch.key for patch in self._gone if patch.state == "lazy"} if self.merges else set[str]()
        changes, held = self.weights["keys_value_changed"], self.looks.held.base
        return {key for key in acted & changes.keys() & held.keys() if _is_rounding(changes[key], held[key])}

    @property
    def has_patches(self) -> bool:
        """Whether changes that are read are on the model, or were at the baseline."""
        return bool(self.patches_on.patches or self.patches_before)

    @property
    def is_newly_spoilt(self) -> bool:
        """Whether a change with NaN or Inf, or without any values, acts on a weight that had no change before."""
        before = {patch.key for patch in self.patches_before}
        held = self.looks.held.base
        empty = {patch.key for patch in self.patches_on.patches if patch.state_reason == NO_VALUES}
        spoilt = {key for key in empty if key in held and not held[key].is_meta}
        return not before.issuperset([*spoilt, *spoilt_weights(self.patches)])


def _adds_zeros(patch: AppliedPatch) -> bool:
    """Whether one of the two factors of a plain LoRA is zero."""
    factors = [patch.tensors.get(part) for part in ("up", "down")] if patch.adapter_type == "lora" else []
    return any(factor is not None and not factor.is_meta and not bool(factor.any()) for factor in factors)


def _is_rounding(change: ValueChange, weight: Tensor) -> bool:
    """Whether the content of a weight changed by no more than rounding, whatever was taken off beside it."""
    norm, whole = change["sampled_delta_norm"], change["weight_norm"]
    is_small = norm is not None and whole is not None and norm <= rounding(weight.dtype) * whole
    return change["content_changed"] is False or is_small


def _strength_in_weight(patch: AppliedPatch) -> float:
    if patch.adapter_type in SCALED:
        return patch.strength or 0.0
    if patch.adapter_type != "dora" or not keeps_norms(patch):
        return 1.0
    adds_nothing = patch.strength == 0.0 or not all(
        bool(patch.tensors[part].any()) for part in ("up", "down")
    )
    return 0.0 if adds_nothing else 1.0


class _OfFile(NamedTuple):
    """A LoRA's file, which weights its modules are for, and the models."""

    path: object
    verdict: LoraVerdict | None
    unet: object
    clip: object

    def named(self, looks: BeforeAndAfter, side: str) -> dict[str, str]:
        """The weights of one model whose content is another, by the names that the verdict has for them."""
        changed = looks.changed_and_sampled() if self.verdict is not None else []
        if not changed:
            return {}
        of_unet, of_clip = names_of_all(self.unet, self.clip)
        name = of_unet if side == "unet" else of_clip
        return {name(key): key for key in changed}

    def changes_for(self, looks: BeforeAndAfter, side: str) -> dict[str, tuple[AppliedPatch, ...]]:
        """What the file holds for these."""
        named, weights = self.named(looks, side), looks.after.weights
        shapes = {name: tuple(weights[key].shape) for name, key in named.items() if key in weights}
        found = patches_of_file(self.path, self.verdict, shapes)
        return {named[name]: patches for name, patches in found.items()}


def _analyze_model(
    baseline: object,
    name: str,
    model_type: str,
    model: object,
    now: MemorySnapshot,
    of_file: _OfFile,
    merges: bool,
) -> ModelAnalysis:
    """Compare one model with its own part of a baseline."""
    part = lookup(baseline, name)
    before = snapshot_in(part) or ModelSnapshot(
        model_type, unavailable=dict.fromkeys(("class", "device", "patches_count", "weights"), NO_BASELINE)
    )
    patches = read_model_patches(model, model_type)
    looks = look_again(before, model, model_type, patches)
    changes = attempt(lambda: of_file.changes_for(looks, name)).value
    looks = replace(looks, of_file=changes) if changes else looks
    with norms_at_once([patch] for patch in patches.patches if patch.state not in ("inactive", "failed")):
        begun = _begin_weight_changes(looks)
        described = _safe_patch_analysis(patches)
    weights, is_acting = _safe_weight_changes(looks, begun)
    kept = looks.kept.value
    described["loras"] = with_relative_changes(
        described["loras"],
        patches,
        weights["keys_value_changed"],
        looks.held.base,
        {patch.key for patch in kept.patches if patch.state == "merged"} if kept else (),
    )
    return ModelAnalysis(
        patches,
        looks,
        identity_changes(before, looks.after, is_same(before, model)),
        weights,
        is_acting,
        described,
        placement_changes(before, looks.after),
        _memory_change(part, model, looks.held, now),
        merges,
    )


_Begun = tuple[Verdicts, Pending[Checks]]


def _begin_weight_changes(looks: BeforeAndAfter) -> Reading[_Begun]:
    """What the changes on a model say of its weights, and the check of it by the weights in use, not yet waited for."""

    def begin() -> _Begun:
        verdicts = dict(weight_verdicts(looks))
        return verdicts, begin_checks(looks, verdicts)

    return attempt(begin)


def _safe_weight_changes(
    looks: BeforeAndAfter, begun: Reading[_Begun]
) -> tuple[WeightChanges, Reading[bool]]:
    """`weight_changes` and `acts`, or their structure with the reason why there is nothing in it."""
    both = attempt(lambda: None if begun.value is None else _weight_changes(looks, *begun.value))
    if both.value is not None:
        return both.value
    why = begun.reason or both.reason or UNTOLD
    snapshot = ModelSnapshot(looks.after.model_type, unavailable={"weights": why})
    nothing = weight_changes(BeforeAndAfter(snapshot, snapshot, None, ModelPatches()), {}, {})
    return nothing, Reading(None, why)


def _weight_changes(
    looks: BeforeAndAfter, verdicts: Verdicts, begun: Pending[Checks]
) -> tuple[WeightChanges, Reading[bool]]:
    checks = attempt(begun.result).value or {}
    followed = follow_weights(verdicts, checks)
    return weight_changes(looks, followed, checks), acts(looks, followed)


def _safe_patch_analysis(patches: ModelPatches) -> PatchAnalysis:
    """`patch_analysis`, or its structure with the reason why there is nothing in it."""
    analysis = attempt(lambda: patch_analysis(patches))
    return analysis.value or patch_analysis(ModelPatches(unavailable={"model": analysis.reason or UNTOLD}))


def _lost_in_merging(*models: ModelAnalysis) -> int:
    """How many weights lost what acted on them as it was merged, if it is in no other ones."""
    return 0 if any(model.left_in_weights for model in models) else sum(len(model.lost) for model in models)


def _is_effective(models: Sequence[ModelAnalysis]) -> Reading[bool]:
    """Whether any model computes something else than before; None if one could not be looked at."""
    readings = [Reading(True) if model.is_newly_spoilt else model.acts for model in models]
    unknown = [reading for reading in readings if reading.value is None and reading.reason != NOT_SEEN]
    for candidates in ([r for r in readings if r.value], unknown, [r for r in readings if r.value is False]):
        if candidates:
            return candidates[0]
    return Reading(None, NOT_SEEN)


def _explain_fused_weights(
    path: object,
    verdict: Reading[LoraVerdict],
    on_model: Reading[AppliedVerdict],
    unet: ModelAnalysis,
    clip: ModelAnalysis,
    *models: object,
) -> Reading[AppliedVerdict]:
    """What is on the models with what is in their weights, which is taken off the unexplained ones."""
    if on_model.value is None:
        return on_model
    changed = [model.looks.samples_of_changed() for model in (unet, clip)]
    if not any(changed) and not any(model.weights["drift"]["keys"] for model in (unet, clip)):
        return on_model
    names = attempt(lambda: names_of_all(*models)).value
    if names is None:
        return on_model
    samples = {
        name(key): pair for name, pairs in zip(names, changed, strict=True) for key, pair in pairs.items()
    }
    rounded = {
        name(key)
        for name, model in zip(names, (unet, clip), strict=True)
        if not model.has_patches
        for key in model.weights["drift"]["keys"]
    }
    had_changes = {
        name(patch.key)
        for name, model in zip(names, (unet, clip), strict=True)
        for patch in model.patches_before
    }
    fused = with_fused(path, verdict.value, on_model.value, samples, rounded, had_changes)
    explained = {key for module in fused.there if module.state_reason == FUSED for key in module.keys}
    for name, model in zip(names, (unet, clip), strict=True):
        weights = model.weights
        weights["unexplained"] = [key for key in weights["unexplained"] if name(key) not in explained]
    return Reading(fused)


def _shows_no_loader(of_file: _OfFile, unet: ModelAnalysis, clip: ModelAnalysis) -> bool:
    """Whether weights show that no loader need have left a file out.

    A LoRA was on the models and is gone, or weights that the file is for hold something else and no change is on the models: a
    program wrote to them.
    """
    if any(model.weights["drift"]["keys"] for model in (unet, clip)):
        return True
    if of_file.verdict is None or unet.has_patches or clip.has_patches:
        return False
    sides = ((unet, "unet"), (clip, "clip"))
    written = {
        name
        for model, side in sides
        for name in attempt(lambda m=model, s=side: of_file.named(m.looks, s)).value or ()  # type: ignore[misc]
    }
    return any(not written.isdisjoint(module.layers) for module in of_file.verdict.matched)


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


def _idle_changes(*models: ModelAnalysis, is_untrained: bool) -> list[IdleChange]:
    """Without those that the weights in use contradict, which have a finding of their own."""
    return [
        change
        for model in models
        for change in attempt(lambda m=model: [*_idle_on(m, is_untrained=is_untrained)]).value or ()  # type: ignore[misc]
        if lookup(lookup(model.weights["checked"], change.key), "result") != "contradicted"
    ]


def _idle_on(model: ModelAnalysis, *, is_untrained: bool) -> Iterator[IdleChange]:
    """The idle changes of one model: beside a weight that is another now, what was merged into that takes them away.

    A new adapter may have taken out of the weight what it begins with.
    """
    is_other = changes_of_content(model.looks.before, model.looks.after)
    beside = {(patch.key, patch.source) for patch in model.patches_on.patches if patch.state == "lazy"}
    for idle in idle_changes(model.patches_on, model.looks.before):
        is_cancelled = idle.cause == "lora_without_effect" and (idle.key, idle.source) in beside
        if is_untrained:
            yield _before_training(idle)
        else:
            yield idle._replace(cause=SAME_CANCELLED) if is_cancelled and is_other(idle.key) else idle


def _before_training(change: IdleChange) -> IdleChange:
    """Of an adapter that was made new: factors that are zero, or of other kinds a change that is."""
    if change.cause == "lora_is_zero":
        return change._replace(cause="lora_untrained")
    if change.cause in ("lora_without_effect", IN_BASE):
        return change._replace(cause="lora_untrained", why="its change")
    return change


def _count_models(lora_result: object) -> int:
    """How many models the host returned: those of a tuple; one for anything else that is not None."""
    lora_result = node_outputs(lora_result)
    if lora_result is None:
        return 0
    count = attempt(lambda: len(lora_result) if isinstance(lora_result, tuple | list | Mapping) else 1)
    return 1 if count.value is None else count.value


def in_short(analysis: Mapping[str, Any]) -> dict[str, Any]:
    """An analysis for the record: of single weights only how much each changed, of other lists how long they are.

    Of what the stage itself holds only memory's change is kept, which has that of each model.
    """
    memory = {"memory_impact": analysis["memory_impact"]} if "memory_impact" in analysis else {}
    return {name: _short(name, value) for name, value in {**beside_the_stage(analysis), **memory}.items()}


def _short(name: str, value: Any) -> Any:
    if name == "keys_value_changed" and isinstance(value, Mapping):
        return {key: change.get("relative_change") for key, change in value.items()}
    if name in _RECORDED_BY_LENGTH and isinstance(value, Mapping | list):
        return len(value)
    if name == "modules" and isinstance(value, list):
        return [module for module in value if not module.get("matched")][:_MOST_UNMATCHED]
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
    after = take_snapshot(modified_model, model_type, contents=False, since=before)
    return identity_changes(before, after, is_same(before, modified_model))


def _before(original: object, model_type: str, *, contents: bool) -> ModelSnapshot:
    return snapshot_in(original) or take_snapshot(original, model_type, contents=contents)


@torch.no_grad()
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
    looks = look_again(before, modified_model, model_type, applied)
    return _safe_weight_changes(looks, _begin_weight_changes(looks))[0]


@torch.no_grad()
def analyze_lora_patches(modified_model: object, model_type: str) -> PatchAnalysis:
    """List every change on a model now, with its type, strength and state. Never raises.

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
    after = take_snapshot(modified_model, model_type, contents=False, since=before)
    return placement_changes(before, after)


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
    held = attempt(lambda: weights_in(current_model, model_type)).value or Weights({}, {})
    return _memory_change(baseline_info, current_model, held, memory_snapshot())


def _memory_change(
    baseline: object, model: object, held: Weights, now: MemorySnapshot
) -> MemoryChangeOfModel:
    """What PyTorch's allocator holds on the device in use, against the bytes of a baseline."""
    device = now.accelerator(now.device_in_use() or "")
    error = (
        None if isinstance(baseline, Mapping) else f"the baseline is {type(baseline).__name__}, not a dict"
    )
    size = None if model is None else attempt(lambda: weights_nbytes(held)).value
    readings = {"model_size_mb": Reading(mib(size), "no module was found in the model")}
    for name, current in (("allocated", device.allocated_bytes), ("reserved", device.reserved_bytes)):
        why = NO_ACCELERATOR
        if device.device:
            why = device.unavailable.get(f"{name}_bytes", "it could not be read")
        before = lookup(baseline, f"memory_{name}")
        if isinstance(before, bool) or not isinstance(before, int):
            before = None
        why_no_change = why if current is None else "the baseline does not record it"
        readings[f"{name}_change_mb"] = Reading(mib(change(before, current)), why_no_change)
        readings[f"current_{name}_mb"] = Reading(mib(current), why)
    return as_dict(MemoryChangeOfModel, readings, error=error)


def print_lora_analysis_summary(analysis: Mapping[str, Any] | None, console: Console | None = None) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_lora_application_results` gave, or the same read from a file; None prints an error line.
        console: Where to print; standard output by default, without colour if it is not a terminal.
    """
    print_analysis(lora_summary.TITLE, analysis, lora_summary.lora_sections, console)
