"""What is wrong with the LoRAs on a model: of the file, of one model's weights and changes, of the application."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite, prod, sqrt
from typing import Final, NamedTuple

import torch

from sigmascope.analysis.lora_facts import SCALED
from sigmascope.lora.applied_verdict import AppliedVerdict
from sigmascope.lora.arrival import Arrival, arrival_findings
from sigmascope.lora.effect import WEIGHT_NOT_FINITE
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file_verdict import LoraVerdict
from sigmascope.lora.linalg import as_float64, root_sum_square
from sigmascope.lora.patches import is_by_peft, keeps_norms, sort_patches
from sigmascope.lora.verdict import VERDICTS, is_opposed, is_without_values, opposed_finding, verdict_finding
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import Pending
from sigmascope.probes.peft import NO_VALUES
from sigmascope.probes.reading import Reading, attempt, error_text
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.stages.lora_on_model import (
    OPPOSITE,
    SAME_CANCELLED,
    Alike,
    alike,
    begin_extremes,
    begin_sums,
    elements_of_change,
    has_extremes,
)
from sigmascope.stages.model_snapshot import ModelPatches, ModelSnapshot
from sigmascope.stages.schema import (
    OutsideLora,
    PatchAnalysis,
    ShareAndNoise,
    WeightChanges,
)
from sigmascope.stages.signed_patches import begin_contents
from sigmascope.stages.weight_verdict import MAY_BE_LOST, NOT_SEEN, is_below_any_bit
from sigmascope.units import counted, first_few

STAGE: Final = "lora_application"
_ABOUT_NAMES: Final = {id for id, row in VERDICTS.items() if row.about_names} | {"lora_controlnet"}
_ABOUT_LOADERS: Final = _ABOUT_NAMES | {id for id, row in VERDICTS.items() if row.leaves_all_out}
"""Those that no longer matter where every module was found on the model."""
_WIDENED_ON_PURPOSE: Final = "x_embedder"
"""The layer that takes the latent, which diffusers widens for a control LoRA: it takes the control picture too."""
_FILE_IS_WHY: Final = frozenset({"lora_matches_nothing", "lora_unreadable"})
"""Findings on a file that say already why nothing is on the models."""
_WHY_NOT_LOADED: Final = {
    id for id, row in VERDICTS.items() if row.leaves_all_out or (row.many and row.severity == "error")
}
"""Findings on a file that a loader may have refused all of it for: its form, or modules that do not fit."""
_SAID_BY_CAUSES: Final = frozenset({"lora_not_acting", "lora_inactive"})
"""What the reasons of idle changes say better."""
_CONSEQUENCES: Final = _SAID_BY_CAUSES | {"lora_not_loaded", "lora_partly_loaded"}
"""What follows where the models were given back unchanged."""
_SEVERITIES: Final = ("critical", "error", "warning", "info")
_AS_BEFORE: Final = "lora_as_before"
IN_BASE: Final = "lora_in_base"
"""The finding that nobody knows whether a LoRA acts that changed the model itself."""
MERGED_AT_ZERO: Final = "lora_merged_at_zero"
"""Without a baseline nobody knows with which strength it was merged: PEFT keeps the one that was set last."""
OFF_IN_BASE: Final = "lora_off_in_base"
"""The finding that an adapter which is off, or gone, changed the model itself, beside what acts."""
_CANCELLED: Final = {SAME_CANCELLED, OPPOSITE}
_MUCH_OVERLAP: Final = 0.5
_SAME_FACTOR: Final = 1e-3
_Evidence = dict[str, JsonScalar]
_Models = Sequence[tuple[str, WeightChanges, PatchAnalysis]]


class IdleChange(NamedTuple):
    """A change that has no effect: its weight, the id of the reason, what only this reason's words need, and its LoRA."""

    key: str
    cause: str
    why: str = ""
    source: str | None = None


def application_findings(
    models: _Models,
    of_file: Sequence[Finding],
    effective: Reading[bool],
    *,
    applied: bool,
    left_off: bool,
    puts_on: bool = True,
    before: Sequence[AppliedPatch] = (),
    in_conditioning: bool = False,
    idle: Collection[IdleChange] = (),
    now: Sequence[AppliedPatch] = (),
    raised: str | None = None,
    fused: Collection[str] = (),
) -> list[Finding]:
    """What is wrong with the application or worth knowing of it, the worst first.

    Args:
        models: Each model's name, how its weights changed, and the changes on it.
        of_file: Findings about the file; those that the models show too are left out.
        effective: Whether the models compute something else than before; None if unknown.
        applied: Whether the host says that it applied the LoRA.
        left_off: Whether it gave back the models as they went in.
        puts_on: Whether it was to put one on, and not to take it off or to set what is there.
        before: The changes that were on them at the baseline.
        in_conditioning: Whether it gave back hooks, or conditioning with hooks.
        idle: Where the models have changes and none has an effect, why each has none.
        now: The changes that are on them now.
        raised: What the application raised: `raised_by_loader`.
        fused: The names of LoRAs that may be in the weights.
    """
    findings: list[Finding] = []
    for name, weights, patches in models:
        findings += [*on_patches(name, patches, raised), *on_weights(name, weights)]
    known = {finding.id for finding in findings}
    if effective.value:  # another reader took what ours does not read
        of_file = [
            replace(finding, severity="info") if finding.id == "lora_unreadable" else finding
            for finding in of_file
        ]
    if "lora_not_finite" in known:  # what it was merged into holds NaN too
        findings = [finding for finding in findings if finding.id != "weights_not_finite"]
    named = [_named(finding, models, before, fused) for finding in of_file]
    distinct = {(finding.id, finding.message): finding for finding in named if finding.id not in known}
    findings += distinct.values()
    file_is_why = any(finding.id in _FILE_IS_WHY for finding in of_file)
    if in_conditioning and not effective.value and not file_is_why:
        findings = [one for one in findings if one.id not in _CONSEQUENCES]
        findings.append(verdict_finding("lora_in_conditioning"))
    elif left_off and not file_is_why:
        findings = [finding for finding in findings if finding.id not in _CONSEQUENCES]
        findings.append(verdict_finding("lora_left_off", {"patched_keys": 0}))
    elif effective.value is False and idle:
        findings = _with_causes(findings, idle, by_name=bool(fused))
    elif not file_is_why and not any(finding.id == "lora_not_loaded" for finding in findings):
        findings += _on_whole(models, effective, applied, before, puts_on=puts_on)
    known = {finding.id for finding in findings}
    if IN_BASE not in known:
        findings += off_in_base([*now, *_gone(models, before, now)])
    if "lora_others_merged" not in known:
        findings += beside_merged(now)
    findings += squared_strengths(now)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return [replace(finding, stage=STAGE) for finding in findings]


def _named(
    finding: Finding, models: _Models, before: Sequence[AppliedPatch], fused: Collection[str]
) -> Finding:
    """A finding on a file by the name of its LoRA, where others are on the models too, or in their weights."""
    on = {name for _, _, patches in models for name in patches["loras"]}
    new = sorted(on - {patch.source for patch in before})
    if len(on | {*fused}) < 2 or len(new) != 1:
        return finding
    return replace(finding, message=finding.message.replace("The LoRA ", f"The LoRA {new[0]} ", 1))


def file_findings(
    verdict: LoraVerdict | None,
    applied: AppliedVerdict | None,
    host: str,
    *,
    by_pipeline: bool = False,
    no_loader: bool = False,
    raised: str | None = None,
    prefix: str | None = None,
) -> Iterator[Finding]:
    """The findings of both verdicts on a file that matter on this host's models.

    Args:
        verdict: On the file.
        applied: On what is on the models.
        host: `diffusers` or `comfyui`; `peft`, where it loaded the file itself.
        by_pipeline: Whether it is known that a pipeline loaded it, and not a model by itself.
        no_loader: Whether the weights show that no loader need have left it out.
        raised: What the loader raised: the reason, where the file shows none.
        prefix: With which the names that a model's own loader took had to begin.
    """
    complete = applied is not None and bool(applied.there) and not applied.missing
    on_model = () if applied is None else applied.findings
    left_out = any(finding.id == "lora_part_left_out" for finding in on_model)
    of_file: list[Finding] = []
    for finding in () if verdict is None else verdict.findings:
        is_said = left_out and finding.id == "lora_text_encoder_missing"
        is_solved = complete and (finding.id in _ABOUT_LOADERS or _is_of_control(finding))
        row = VERDICTS.get(finding.id)
        of_models_own = by_pipeline or no_loader or raised is not None
        is_of_other_loader = row is not None and (
            row.host not in (None, host) or (row.of_model and of_models_own)
        )
        if not is_of_other_loader and not is_said and not is_solved:
            of_file.append(finding)
    by_model = raised is not None and not by_pipeline
    whys = (finding for finding in of_file if finding.id in _WHY_NOT_LOADED)
    cause = next((why for why in whys if not (by_model and VERDICTS[why.id].of_pipeline)), None)
    if applied is not None and any(is_without_values(module.detail) for module in applied.missing):
        cause = None  # the loader knew the modules
    if no_loader and cause is not None and cause.id in _ABOUT_LOADERS:
        cause = None
    if raised is None and prefix is not None and verdict is not None:
        other = _of_other_names(prefix, verdict, of_file)
        cause = other or cause
        of_file = [finding for finding in of_file if other is None or finding.id not in _TELL_PREFIX]
    for finding in of_file:
        is_remark = finding.severity == "info" and finding.id in _ABOUT_NAMES
        if not is_remark or applied is None or (finding is cause and not applied.there):
            yield finding
    causes = {"lora_not_loaded": cause, "lora_partly_loaded": _why_partly(of_file, verdict, applied)}
    for finding in on_model:
        why = causes.get(finding.id)
        if why is None and raised is not None and finding.id in causes:
            yield replace(
                finding,
                message=f"{_without_why(finding)}: the loader failed with {raised}.",
                advice=_AFTER_ERROR,
            )
        else:
            yield finding if why is None else _because(finding, why)


def _of_other_names(prefix: str, verdict: LoraVerdict, of_file: Sequence[Finding]) -> Finding | None:
    """That a model's own loader took nothing of a file, since no name in it begins with the prefix, if that is so."""
    if any(module.name.startswith(f"{prefix}.") for module in verdict.modules):
        return None
    told = next((one for one in of_file if one.id in _TELL_PREFIX), None)
    fits = "transformer" if told is None else told.evidence["prefix"]
    by_pipeline = "load the file with the pipeline's load_lora_weights"
    by_prefix = "pass prefix=None" if fits is None else f'pass prefix="{fits}"'
    is_known = told is not None or any(module.name.startswith(f"{fits}.") for module in verdict.modules)
    is_unnamed = told is not None and VERDICTS[told.id].of_pipeline
    ways = [*([] if is_unnamed else [by_pipeline]), *([by_prefix] if is_known else [])]
    how = ", or ".join(ways)
    return verdict_finding(
        "lora_other_prefix", {"prefix": prefix}, prefix=prefix, how=how[0].upper() + how[1:]
    )


_TELL_PREFIX: Final = frozenset({"lora_adapter_prefix", "lora_part_unnamed"})
"""Findings on a file that hold which prefix suits its names."""


def raised_by_loader(error: BaseException | str | None) -> str | None:
    """What an application raised, in a line; None if it raised nothing."""
    if error is None:
        return None
    words = " ".join(error_text(error).split())
    return f"{words[:_MOST_OF_ERROR].rstrip('.')}{'…' * (len(words) > _MOST_OF_ERROR)}"


_MOST_OF_ERROR: Final = 200
_AFTER_ERROR: Final = (
    "Mend that, load the model again, since parts of the LoRA may be on it, and then the file."
)


def _why_partly(
    of_file: Sequence[Finding], verdict: LoraVerdict | None, applied: AppliedVerdict | None
) -> Finding | None:
    """What the file shows of why just its whole differences, or just its biases, are not on the model."""
    if verdict is None or applied is None:
        return None
    kinds = {module.name: module.kind for module in verdict.modules}
    missing = [module.name for module in applied.missing]
    biases = all(name.endswith(".bias") for name in missing)
    causes = {"lora_some_biases"} if biases else set()
    causes |= {"lora_whole_differences"} if all(kinds.get(name) == "diff" for name in missing) else set()
    return next((finding for finding in of_file if finding.id in causes), None)


def _is_of_control(finding: Finding) -> bool:
    """Whether the only module of another shape is the one for which diffusers widens the model."""
    modules, first = finding.evidence.get("modules"), finding.evidence.get("first")
    return (
        finding.id == "lora_other_shape" and modules == 1 and str(first).endswith(f".{_WIDENED_ON_PURPOSE}")
    )


def _because(not_loaded: Finding, cause: Finding) -> Finding:
    """That nothing, or not all, is on the model, with what the file shows of the reason."""
    start = _without_why(not_loaded)
    is_whole = not_loaded.id == "lora_not_loaded"
    evidence = {**not_loaded.evidence, "cause": cause.id} if is_whole else not_loaded.evidence
    why = (
        cause.message.replace("The file", "the file", 1)
        if cause.message.startswith("The file")
        else cause.message
    )
    return replace(not_loaded, message=f"{start}: {why}", evidence=evidence, advice=cause.advice)


def _without_why(not_loaded: Finding) -> str:
    return not_loaded.message.partition(": ")[0].partition(" (")[0]


def _on_whole(
    models: _Models,
    effective: Reading[bool],
    applied: bool,
    before: Sequence[AppliedPatch],
    *,
    puts_on: bool,
) -> Iterator[Finding]:
    patched = sum(patches["total_patched_keys"] or 0 for _, _, patches in models)
    read = any(patches["total_patched_keys"] is not None for _, _, patches in models)
    evidence: _Evidence = {"patched_keys": patched, "host_says_applied": applied}
    if effective.value is None and (read or effective.reason != NOT_SEEN):
        is_small = (effective.reason or "").endswith(MAY_BE_LOST)
        yield verdict_finding(
            "lora_may_be_lost" if is_small else "lora_not_seen", evidence, why=effective.reason
        )
    elif effective.value is False and not patched and not before:
        yield verdict_finding("lora_not_applied" if puts_on else "lora_none_there", evidence)


def _gone(
    models: _Models, before: Sequence[AppliedPatch], now: Sequence[AppliedPatch]
) -> Iterator[AppliedPatch]:
    """The changes that were taken off, and not into the weights."""
    on = {(patch.key, patch.source) for patch in now}
    written = {key for _, weights, _ in models for key in weights["keys_value_changed"]}
    for patch in before:
        if (patch.key, patch.source) not in on and patch.key not in written and patch.state != "merged":
            yield replace(patch, state="inactive", cause="not_active")


def off_in_base(patches: Iterable[AppliedPatch]) -> list[Finding]:
    """That adapters which are off changed the model itself, of each way the first."""
    found: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        if patch.in_base is not None and patch.cause is not None:
            found.setdefault(patch.in_base, []).append(patch)
    return [
        verdict_finding(
            OFF_IN_BASE,
            {"patched_keys": len(changes), "example": changes[0].key},
            adapters=" and ".join(dict.fromkeys(change.source or "its adapter" for change in changes)),
            why=why,
            weights=counted(len({change.key for change in changes}), "weight"),
        )
        for why, changes in found.items()
    ]


def beside_merged(patches: Iterable[AppliedPatch]) -> list[Finding]:
    """That adapters which are set to act do not, since PEFT runs merged ones alone."""
    waiting = [patch for patch in patches if patch.cause == "others_merged" and patch.strength != 0.0]
    if not waiting:
        return []
    return [
        verdict_finding(
            "lora_beside_merged",
            {"patched_keys": len(waiting), "example": waiting[0].key},
            adapters=" and ".join(dict.fromkeys(patch.source or "its adapter" for patch in waiting)),
            weights=counted(len({patch.key for patch in waiting}), "weight"),
        )
    ]


def squared_strengths(patches: Iterable[AppliedPatch]) -> list[Finding]:
    """That ComfyUI multiplies a rotation (OFT) with its strength twice, also where that is below 0."""
    by_strength: dict[float, list[AppliedPatch]] = {}
    for patch in patches:
        is_in_weight = patch.state != "failed" and not (patch.source or "").startswith("bypass")
        if patch.adapter_type == "oft" and is_in_weight and not is_by_peft(patch):
            by_strength.setdefault(1.0 if patch.strength is None else patch.strength, []).append(patch)
    return [
        verdict_finding(
            "lora_strength_squared",
            {"patched_keys": len(held), "strength": strength, "acts_as": strength**2, "example": held[0].key},
            weights=counted(len({patch.key for patch in held}), "weight"),
            strength=f"{strength:.3g}",
            squared=f"{strength**2:.3g}",
            how=f"For {strength:.3g}, load it at {sqrt(strength):.3g}."
            if strength > 0
            else "It cannot be turned back by a strength below 0.",
        )
        for strength, held in by_strength.items()
        if strength not in (0.0, 1.0)
    ]


def _with_causes(
    findings: Sequence[Finding], idle: Collection[IdleChange], *, by_name: bool
) -> list[Finding]:
    """The findings with why no change has an effect, and without what follows from it."""
    known = {finding.id for finding in findings} - _CANCELLED
    causes = [
        one for one in idle_findings(idle, by_name=by_name) if one.id not in known | {"lora_changes_failed"}
    ]
    said = _SAID_BY_CAUSES | ({change.cause for change in idle} & _CANCELLED)
    kept = [one for one in findings if one.id not in said]
    return [*causes, *kept]


def idle_findings(idle: Iterable[IdleChange], *, by_name: bool = False) -> list[Finding]:
    """Why no change has an effect, the reason of most changes first; by its LoRA's name where asked, or others act as before.

    That one is not active comes last: others do nothing though they were chosen.
    """
    by_cause: dict[str, list[IdleChange]] = {}
    for change in idle:
        by_cause.setdefault(change.cause, []).append(change)
    found = [
        _idle_finding(cause, changes)
        for cause, changes in sorted(
            by_cause.items(), key=lambda item: (item[0] == _NOT_ACTIVE, -len(item[1]))
        )
    ]
    sources = {change.source for changes in by_cause.values() for change in changes}
    by_name = by_name or _AS_BEFORE in by_cause or (len(by_cause) > 1 and len(sources) > 1)
    return [_by_name(one, by_cause[one.id]) for one in found] if by_name else found


_NOT_ACTIVE: Final = "lora_not_active"


def _by_name(finding: Finding, changes: Sequence[IdleChange]) -> Finding:
    names = [*dict.fromkeys(change.source for change in changes if change.source)]
    if not names or finding.id == _AS_BEFORE:
        return finding
    one = f"The LoRA {names[0]}" if len(names) == 1 else f"Each of the LoRAs {' and '.join(names)}"
    message = re.sub(r"^The LoRA(?= )", one, finding.message)
    return replace(finding, message=re.sub(r"^The LoRAs", f"The LoRAs {' and '.join(names)}", message))


def _idle_finding(cause: str, changes: Sequence[IdleChange]) -> Finding:
    first = changes[0]
    weights = counted(len({change.key for change in changes}), "weight")
    evidence: _Evidence = {"patched_keys": len(changes), "example": first.key}
    if cause == MERGED_AT_ZERO:  # who reads a record may know that it was merged at 0
        evidence["if_merged_at_0"] = verdict_finding("lora_strength_zero", weights=weights).message
    return verdict_finding(
        cause,
        evidence,
        weights=weights,
        modules=weights,
        count=weights,
        holders="The LoRAs change nothing",
        model="The LoRA changes nothing",
        first=first.key,
        **dict.fromkeys(
            ("factor", "component"), " and ".join(dict.fromkeys(change.why for change in changes))
        ),
        **dict.fromkeys(("why", "reason", "dtype", "argument"), first.why),
    )


def without_values(name: str, keys: Sequence[str], raised: str | None = None) -> Finding:
    """That changes of these weights have no values.

    Args:
        name: Of the model, or what ran with it.
        keys: Of the weights.
        raised: What the loader raised; None if it raised nothing.
    """
    how = "the file under names that the loader reads: sigmascope lora convert FILE NEW --format peft"
    return verdict_finding(
        "lora_without_values",
        {"keys": len(keys), "acting": len(keys), "example": keys[0]},
        model=name,
        count=counted(len(keys), "change is", "changes are"),
        first=keys[0],
        why="the loader found none for its factors in the file"
        if raised is None
        else f"the loader failed before it gave it any ({raised})",
        how=how if raised is None else "the file once that is mended",
    )


def on_patches(name: str, patches: PatchAnalysis, raised: str | None = None) -> Iterator[Finding]:
    """What is wrong with the changes on a model, or worth knowing of them; after what the loader `raised`."""
    failed, not_finite = patches["failed"], patches["not_finite"]
    states, total = patches["states"], patches["total_patched_keys"] or 0
    empty = [key for key, reason in failed.items() if reason == NO_VALUES]
    failed = {key: reason for key, reason in failed.items() if reason != NO_VALUES}
    if empty:
        yield without_values(name, empty, raised)
    if failed:
        key, reason = next(iter(failed.items()))
        yield verdict_finding(
            "lora_changes_failed",
            {"keys": len(failed), "example": key, "reason": reason},
            model=name,
            count=counted(len(failed), "weight"),
            first=key,
            reason=reason,
        )
    if not_finite:
        hold = (
            "LoRA's change of 1 weight holds"
            if len(not_finite) == 1
            else f"LoRA's changes of {len(not_finite)} weights hold"
        )
        acting = spoilt_weights(patches)
        key = next(iter(acting), not_finite[0])
        evidence: _Evidence = {"keys": len(not_finite), "acting": len(acting), "example": key}
        yield verdict_finding(
            "lora_not_finite",
            evidence,
            holders=f"{name}: the {hold}",
            first=first_few([key, *not_finite[1:]], 1),
        )
    for twice in patches["applied_twice"]:
        sources, keys = " and ".join(twice["sources"]), twice["keys"]
        evidence = {"keys": keys, "example": twice["example"]}
        weights = f"{counted(keys, 'weight')} ({sources})"
        if twice["why_nothing"] is not None:
            yield verdict_finding(twice["why_nothing"], evidence, holders=name, weights=weights)
            continue
        if is_opposed(twice["strengths"]):
            yield opposed_finding(twice["strengths"], evidence, name, weights)
            continue
        message = f"{name}: the same change is applied more than once to {weights}."
        advice = "Load it once; if you meant both, add the strengths."
        yield Finding("lora_applied_twice", "warning", message, evidence, advice)
    yield from _on_overlaps(name, patches)
    if waiting := states.get("registered"):
        evidence = {"registered": waiting, "keys": total}
        count = counted(waiting, "change is", "changes are")
        yield verdict_finding("lora_registered_only", evidence, model=name, count=count)
    if inactive := states.get("inactive"):
        names = [name for name, lora in patches["loras"].items() if lora["states"].get("inactive")]
        of = f" of {first_few(names, 3)}" if len(patches["loras"]) > 1 else ""
        count = f"{counted(inactive, 'change')}{of} {'is' if inactive == 1 else 'are'}"
        evidence = {"inactive": inactive, "keys": total}
        off = verdict_finding("lora_inactive", evidence, model=name, count=count)
        of_keys = [patch for key in patches["patch_details"].values() for patch in key["patches"]]
        are_joined = all(one["cause"] == "bypassed" for one in of_keys if one["state"] == "inactive")
        yield replace(off, message=f"{name}: {count} on projections that are joined.") if are_joined else off


def spoilt_weights(patches: PatchAnalysis) -> list[str]:
    """The weights on which a change with NaN or Inf acts."""
    return [
        key
        for key in patches["not_finite"]
        if any(
            patch["finite"] is False and _acts_if_not_finite(patch["state"], patch["cause"])
            for patch in patches["patch_details"][key]["patches"]
        )
    ]


def idle_changes(applied: ModelPatches, before: ModelSnapshot) -> list[IdleChange]:
    """Why each change on a model has no effect, where none has: of merged ones, by the elements that the baseline has.

    Args:
        applied: The changes on the model, whose tensors are looked at; an accelerator is waited for.
        before: The model at the baseline.
    """
    return _begin_idle_changes(applied, before).result()


def _begin_idle_changes(applied: ModelPatches, before: ModelSnapshot) -> Pending[list[IdleChange]]:
    acting = {key: sort_patches(patches).acting for key, patches in applied.by_key().items()}
    several = {key: patches for key, patches in acting.items() if len(patches) > 1}
    extremes = begin_extremes(applied.patches)
    contents = begin_contents(patch for patches in several.values() for patch in patches)
    sums = begin_sums(several)
    return Pending(
        lambda: _idle_changes(
            applied, before, extremes.result(), alike(several, contents.result(), sums.result())
        ),
        [extremes, contents, sums],
    )


def _idle_changes(
    applied: ModelPatches,
    before: ModelSnapshot,
    extremes: Mapping[int, Reading[list[float]]],
    same_contents: Iterable[Alike],
) -> list[IdleChange]:
    if any(_spoils(patch, extremes[id(patch)].value or []) for patch in applied.patches):
        return []
    kept = attempt(before.kept.result).value
    acted: dict[str, set[str | None]] = {}
    for patch in sort_patches(kept.patches if kept else ()).acting:
        acted.setdefault(patch.key, set()).add(patch.source)
    zero = {
        id(patch): name
        for patch in applied.patches
        if (name := _zero_tensor(patch, extremes[id(patch)].value or [])) is not None
    }
    cancelled = {
        id(patch): one.why_nothing
        for one in same_contents
        if one.why_nothing is not None
        for patch in one.patches
    }
    found = [
        IdleChange(patch.key, cancelled[id(patch)], source=patch.source)
        if id(patch) in cancelled and patch.key not in acted and patch.in_base is None
        else IdleChange(
            patch.key,
            *_why_idle(patch, zero.get(id(patch)), extremes[id(patch)].value or [], before, acted),
            source=patch.source,
        )
        for patch in applied.patches
    ]
    were_merged = {(p.key, p.source) for p in (kept.patches if kept else ()) if p.state == "merged"}
    found = [
        change._replace(cause=MERGED_AT_ZERO)
        if (change.cause, patch.state) == ("lora_strength_zero", "merged")
        and (patch.key, patch.source) in were_merged
        else change
        for patch, change in zip(applied.patches, found, strict=True)
    ]
    if not any(change.cause == _AS_BEFORE for change in found):
        return found
    were_idle = {(p.key, p.source) for p in (kept.patches if kept else ()) if p.state == "inactive"}
    return [
        change
        for patch, change in zip(applied.patches, found, strict=True)
        if patch.state != "inactive" or (patch.key, patch.source) not in were_idle
    ]


def begin_spoilt(patches: Sequence[AppliedPatch]) -> Pending[bool]:
    """Whether one of these changes holds NaN or Inf and acts. Does not wait for an accelerator."""
    return begin_extremes(patches).then(
        lambda extremes: any(_spoils(patch, extremes[id(patch)].value or []) for patch in patches)
    )


def _spoils(patch: AppliedPatch, extremes: Sequence[float]) -> bool:
    """As `spoilt_weights` tells."""
    return not all(map(isfinite, [patch.scale or 0.0, *extremes])) and _acts_if_not_finite(
        patch.state, patch.cause
    )


def _acts_if_not_finite(state: str, cause: str | None) -> bool:
    """At strength 0 it does too: 0 · NaN is NaN, and hosts multiply."""
    return state not in ("inactive", "failed") or cause == "strength_zero"


def _zero_tensor(patch: AppliedPatch, extremes: Sequence[float]) -> str | None:
    """The first tensor of a patch that is all zeros, by the host's name.

    Args:
        patch: Whose tensors are meant.
        extremes: As `read_extremes` gives them.
    """
    pairs = zip(extremes[::2], extremes[1::2], strict=True)
    place = next((place for place, pair in enumerate(pairs) if pair == (0.0, 0.0)), None)
    names = [name for name, tensor in patch.tensors.items() if has_extremes(tensor)]
    return None if place is None else patch.host_names.get(names[place], names[place])


def begin_all_idle(applied: ModelPatches) -> Pending[list[IdleChange]]:
    """Why each change on a model has no effect, by itself and without a baseline; nothing if one may have an effect.

    Does not wait for an accelerator.
    """
    few = [patch for patches in islice(applied.by_key().values(), _FIRST_LOOK) for patch in patches]
    first = _begin_unless_one_acts(tuple(few))
    if first.has_arrived() and not first.result():  # the others need not be read
        return first
    return _begin_unless_one_acts(applied.patches)


def _begin_unless_one_acts(patches: tuple[AppliedPatch, ...]) -> Pending[list[IdleChange]]:
    begun = _begin_idle_changes(ModelPatches(patches), ModelSnapshot("LoRA"))
    return begun.then(
        lambda idle: [] if any(change.cause == "lora_without_effect" for change in idle) else idle
    )


_FIRST_LOOK: Final = 8  # weights


def _why_idle(
    patch: AppliedPatch,
    zero_tensor: str | None,
    extremes: Sequence[float],
    before: ModelSnapshot,
    acted: Mapping[str, Collection[str | None]],
) -> tuple[str, str]:
    """The id of the reason and what its words need; open where the adapter changed more than what is switched off."""
    cause, why = _why_by_itself(patch, zero_tensor, extremes, before, acted)
    return (cause, why) if patch.in_base is None or cause in _NOT_BY_SWITCH else (IN_BASE, patch.in_base)


_NOT_BY_SWITCH: Final = frozenset({"lora_changes_failed", _AS_BEFORE, "lora_without_effect"})


def _why_by_itself(
    patch: AppliedPatch,
    zero_tensor: str | None,
    extremes: Sequence[float],
    before: ModelSnapshot,
    acted: Mapping[str, Collection[str | None]],
) -> tuple[str, str]:
    if patch.state == "failed":
        return "lora_changes_failed", patch.state_reason
    if patch.scale == 0.0:
        return "lora_alpha_zero", ""
    if patch.adapter_type == "dora" and not before.samples and (zero_tensor or patch.strength == 0.0):
        return _why_by_magnitudes(patch, zero_tensor)
    is_scaled = patch.adapter_type == "dora" and patch.key in acted and keeps_norms(patch) is False
    if zero_tensor is not None and patch.adapter_type in _PRODUCTS and not is_scaled:
        return "lora_is_zero", zero_tensor
    is_replaced = patch.source in acted.get(patch.key, ())  # by what changes its weight alike
    if patch.cause is not None and not is_replaced:
        return f"lora_{patch.cause}", ""
    if patch.key in acted:
        return _AS_BEFORE, ""
    if patch.strength == 0.0 and patch.adapter_type in SCALED:  # merged so
        return "lora_strength_zero" if before.samples else MERGED_AT_ZERO, ""
    if attempt(lambda: _is_product_zero(patch)).value:
        return "lora_is_zero", "their product"
    dtype = attempt(lambda: _lost_in(patch, before)).value
    if dtype is not None:
        return "lora_lost_in_rounding", dtype
    if attempt(lambda: _is_below_any_bit(patch, extremes, before)).value:
        return "lora_lost_in_rounding", "float32"
    why = f"{patch.state_reason or 'its state is not known'}, and the weight is as before"
    merged = " (it was merged with strength 0, or what was merged before cancels it)"
    return "lora_without_effect", f"{why}{merged}" if patch.state == "merged" else why


def _why_by_magnitudes(patch: AppliedPatch, zero_tensor: str | None) -> tuple[str, str]:
    """Of a DoRA without factors, or of strength 0, and without a baseline: what PEFT scales weights to decides."""
    if patch.cause not in (None, "strength_zero"):
        return f"lora_{patch.cause}", ""
    is_nothing = keeps_norms(patch)
    if not is_nothing:
        return "lora_magnitudes_unknown" if is_nothing is None else "lora_without_effect", ""
    if zero_tensor is not None:
        return "lora_is_zero", zero_tensor
    return MERGED_AT_ZERO if patch.state == "merged" else "lora_strength_zero", ""


_PRODUCTS: Final = SCALED | {"dora"}
"""Kinds whose change is zero where one of their tensors is; that of a DoRA, if its magnitudes are still the weight's."""


def _is_product_zero(patch: AppliedPatch) -> bool:
    """Whether up·down is zero though neither factor is; an accelerator is not asked."""
    if patch.adapter_type != "lora" or any(part.device.type != "cpu" for part in patch.tensors.values()):
        return False
    return _product(patch).frobenius_norm() == 0.0


def _product(patch: AppliedPatch) -> LoraFactors:
    up, down = (as_float64(patch.tensors[name]).cpu().flatten(1) for name in ("up", "down"))
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _lost_in(patch: AppliedPatch, before: ModelSnapshot) -> str | None:
    """The weight's dtype if a merged change is below half a step of it, in all elements of the baseline; else None."""
    sample = before.samples.get(patch.key)
    if (
        patch.state != "merged"
        or patch.adapter_type != "lora"
        or sample is None
        or not sample.is_floating_point()
        or patch.weight_shape is None
    ):
        return None
    change = elements_of_change(_product(patch)) * (patch.scale or 0.0) * (patch.strength or 0.0)
    old = as_float64(sample)
    dtype = sample.dtype
    is_lost = len(change) == len(old) and torch.equal((old + change).to(dtype), old.to(dtype))
    return str(dtype).removeprefix("torch.") if is_lost else None


def _is_below_any_bit(patch: AppliedPatch, extremes: Sequence[float], before: ModelSnapshot) -> bool:
    """Whether the largest numbers of its factors, as `read_extremes` gives them, alone say so."""
    sample = before.samples.get(patch.key)
    if patch.adapter_type != "lora" or sample is None or not sample.is_floating_point():
        return False
    largest = [max(map(abs, pair)) for pair in zip(extremes[::2], extremes[1::2], strict=True)]
    sizes = [sqrt(tensor.numel()) for tensor in patch.tensors.values() if has_extremes(tensor)]
    most = prod(largest) * prod(sizes) * abs((patch.scale or 0.0) * (patch.strength or 0.0))
    share = sqrt(prod(patch.weight_shape or ()) / len(sample))
    whole = share * float(torch.linalg.vector_norm(as_float64(sample)))
    return len(largest) == 2 and whole > 0.0 and is_below_any_bit(most / whole, sample.dtype)


def _on_overlaps(name: str, patches: PatchAnalysis) -> Iterator[Finding]:
    for pair in patches["overlaps"]:
        overall, chance, cosine = pair["overall"], pair["chance"], pair["cosine"]
        if overall is None or overall < max(_MUCH_OVERLAP, 2 * (chance or 0.0)):
            continue
        together = "add up" if (cosine or 0.0) > 0 else "work against each other"
        message = (
            f"{name}: {pair['a']} and {pair['b']} act in the same directions of {counted(pair['shared_keys'], 'weight')} "
            f"(overlap {overall:.2f}, chance {chance or 0.0:.2f}): they {together} there."
        )
        evidence = {"overlap": overall, "chance": chance, "cosine": cosine, "keys": pair["shared_keys"]}
        adds = "Lower one of the strengths if the image is overdone."
        advice = adds if (cosine or 0.0) > 0 else "Each takes from the other: use one, or raise it."
        yield Finding("lora_overlap", "info", message, evidence, advice)


def on_weights(name: str, weights: WeightChanges) -> Iterator[Finding]:
    """What is odd about a model's weights."""
    drift, odd, changes = weights["drift"], weights["not_as_predicted"], weights["weight_changes"]
    reshaped = [key for key in weights["unexplained"] if key in changes and changes[key]["shape_changed"]]
    unexplained = [key for key in weights["unexplained"] if key not in reshaped]
    if drift["keys"]:
        largest = drift["largest_relative_change"]
        size = "" if largest is None else f", at most {largest:.1e} of their length"
        message = (
            f"{name}: {counted(len(drift['keys']), 'weight')} changed only by rounding{size}, "
            "as after fusing and unfusing or in another dtype."
        )
        evidence: _Evidence = {"keys": len(drift["keys"]), "largest_relative_change": largest}
        advice = "This does not count as a change. Reload the weights if results must match bit for bit."
        yield Finding("lora_drift", "info", message, evidence, advice)
    spoilt = [
        key
        for key, change in weights["keys_value_changed"].items()
        if change["unavailable"].get("weight_norm") == WEIGHT_NOT_FINITE
    ]
    if spoilt:
        yield Finding(
            "weights_not_finite",
            "error",
            f"{name}: {counted(len(spoilt), 'weight holds', 'weights hold')} NaN or Inf, with any LoRA and without: {spoilt[0]}.",
            {"keys": len(spoilt), "acting": len(spoilt), "example": spoilt[0]},
            "Load the model again. A LoRA with NaN leaves NaN in the weights that it was fused into, which unfusing does not take out.",
        )
    if reshaped:
        key = reshaped[0]
        before, after = (
            changes[key][side].removeprefix("torch.Size") for side in ("original_shape", "modified_shape")
        )
        is_back = prod(map(int, re.findall(r"\d+", after))) < prod(map(int, re.findall(r"\d+", before)))
        yield Finding(
            "weights_reshaped",
            "info" if is_back else "warning",
            f"{name}: {counted(len(reshaped), 'weight has', 'weights have')} another shape now, such as {key} "
            f"({before} before, {after} now).",
            {"keys": len(reshaped), "example": key},
            "unload_lora_weights(reset_to_overwritten_params=True) gives layers that were widened for a control LoRA their shape back."
            if is_back
            else "diffusers widens layers for a LoRA that is made for wider ones, such as a control LoRA of FLUX. If yours is not one, "
            "calls will fail: load the pipeline again, and another LoRA.",
        )
    if unexplained:
        key = unexplained[0]
        outside = [weights["outside"][key] for key in unexplained if key in weights["outside"]]
        size, evidence = _beside_loras(outside, len(unexplained))
        message = (
            f"{name}: {counted(len(unexplained), 'weight')} changed, such as {key}, and no registered change "
            f"explains it{size}."
        )
        advice = "A LoRA was fused and its adapter deleted, or something else wrote into the weights."
        evidence = {"keys": len(unexplained), "example": key, **evidence}
        yield Finding("weights_changed_unexplained", "warning", message, evidence, advice)
    if odd:
        key = odd[0]
        change = weights["keys_value_changed"][key]
        message = f"{name}: {len(odd)} merged weights did not change as predicted, such as {key}."
        by_contents = change["measured_from"] == "contents"
        evidence = {
            "keys": len(odd),
            "example": key,
            "predicted": change["predicted_delta_norm"],
            "found": change["delta_norm"] if by_contents else change["sampled_delta_norm"],
        }
        advice = (
            "The strength was set after merging, the change was merged twice, something else wrote into the weights, "
            "or the dtype is too coarse for it."
        )
        yield Finding("lora_not_as_predicted", "warning", message, evidence, advice)
    against = {
        key: check
        for key, check in weights["checked"].items()
        if check["result"] == "contradicted" and key not in odd
    }
    if against:
        key, check = next(iter(against.items()))
        used, predicted = check["used_norm"], check["predicted_norm"]
        yield verdict_finding(
            "lora_weights_disagree",
            {"keys": len(against), "example": key, "used": used, "predicted": predicted},
            model=name,
            weights=counted(len(against), "weight"),
            first=key,
            used=f"{used:.3g}",
            predicted=f"{predicted:.3g}",
        )
    arriving = weights["arriving"]
    if arriving is not None and arriving["share"] is not None and arriving["noise"] is not None:
        others = {way: _as_arrival(figures) for way, figures in arriving.get("other_ways", {}).items()}
        whole = replace(_as_arrival(arriving), stored=arriving["stored"], others=others)
        yield from arrival_findings(whole, arriving["weights"], f"{name[0].lower()}{name[1:]}")


def _beside_loras(outside: Sequence[OutsideLora], keys: int) -> tuple[str, _Evidence]:
    """By how much weights changed beside the LoRAs, in words and figures."""
    if len(outside) < keys:
        return "", {}
    norm, factors = root_sum_square([one["norm"] for one in outside]), [one["factor"] for one in outside]
    size = f": outside of LoRAs they changed by {norm:.3g}"
    known = [factor for factor in factors if factor is not None]
    if len(known) < keys or max(known) - min(known) > _SAME_FACTOR * abs(known[0]):
        return size, {"outside_norm": norm}
    return f"{size} (multiplied by {known[0]:.4g})", {"outside_norm": norm, "factor": known[0]}


def _as_arrival(figures: ShareAndNoise) -> Arrival:
    """A change of norm 1 with these figures."""
    share, noise = figures["share"] or 0.0, figures["noise"] or 0.0
    return Arrival(1.0, share, share**2 + noise**2)
