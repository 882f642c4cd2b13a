"""What became of a model's weights between two moments: names, facts, and how much each one changed.

The change of a weight is what its layer computes with now less what it computed with before: see
`sigmascope.stages.weight_verdict`. Old contents are taken wherever anybody still has them (`_originals`).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.arrival import together
from sigmascope.lora.effect import Effect, by_block
from sigmascope.lora.linalg import root_sum_square
from sigmascope.lora.norms_at_once import norms_at_once
from sigmascope.lora.patches import needs_weight
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import Pending
from sigmascope.probes.fingerprints import fingerprint, fingerprints, samples
from sigmascope.probes.peft import UNMERGED_NEXT
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt
from sigmascope.probes.tensors import place_of
from sigmascope.stages.coarse_weights import arrived
from sigmascope.stages.codes import in_codes, in_numbers, scales_of
from sigmascope.stages.model_snapshot import (
    ModelPatches,
    ModelSnapshot,
    Weights,
    take_snapshot,
    weights_in,
)
from sigmascope.stages.schema import Arriving, Drift, ShareAndNoise, ValueChange, WeightChanges, WeightCheck
from sigmascope.stages.signed_patches import (
    Contents,
    KeptPatches,
    SignedPatches,
    content_of,
    contents_of,
    explain_contents,
    key_of,
    signed_patches,
    with_tensors_of,
)
from sigmascope.stages.weight_verdict import (
    MAY_BE_LOST,
    NOT_SEEN,
    WeightEvidence,
    WeightVerdict,
    judge_weight,
    sampled_effects,
)
from sigmascope.units import counted

NOT_COARSE: Final = "no change was merged into a coarsely stored weight"


@dataclass(frozen=True, slots=True, eq=False)
class BeforeAndAfter:
    """Two moments of a model, and the model itself. It holds the host's tensors.

    Attributes:
        of_file: By weight, what else may have been merged into it: a file's changes.
    """

    before: ModelSnapshot
    after: ModelSnapshot
    model: object
    applied: ModelPatches
    held: Weights = field(default_factory=lambda: Weights({}, {}))
    kept: Reading[KeptPatches] = field(default_factory=lambda: Reading(KeptPatches()))
    of_file: Mapping[str, Sequence[AppliedPatch]] = field(default_factory=dict)

    def detour_of(self, key: str) -> str | None:
        """Why a weight may not be what its layer computed or computes with; None if nothing stood in its place."""
        return self.after.detour_of(key) or self.before.detour_of(key)

    def changed_and_sampled(self) -> list[str]:
        """The weights whose content is another now, and of which elements were taken at both moments."""
        samples, samples_now = self.before.samples, self.after.samples
        changed = changed_contents(self.before, self.after)
        both = [key for key in samples if key in changed and key in samples_now] if changed else []
        return [key for key in both if samples.dtype(key).is_floating_point]

    def samples_of_changed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Those elements, before and now."""
        samples, samples_now = self.before.samples, self.after.samples
        return {key: (samples[key], samples_now[key]) for key in self.changed_and_sampled()}


def weight_changes(
    looks: BeforeAndAfter, verdicts: "Verdicts", checked: Mapping[str, WeightCheck]
) -> WeightChanges:
    """Compare names, facts and contents; see `WeightChanges`."""
    before, after = looks.before, looks.after
    changed = {key: verdict for key, verdict in verdicts.items() if verdict.is_effective is not False}
    effects = {key: verdict.effect for key, verdict in changed.items()}
    arriving, not_arriving = _arriving(verdicts.values())
    total = _total_effect(effects.values())
    keys_before, keys_after = set(before.keys), set(after.keys)
    names_known = "weights" not in before.unavailable and "weights" not in after.unavailable
    spread = _total_spread([verdict.change for verdict in changed.values()])
    unavailable = {
        name: snapshot.unavailable[what]
        for name, what, snapshot in (
            ("total_keys_original", "weights", before),
            ("total_keys_modified", "weights", after),
            ("keys_compared", "fingerprints", before),
            ("keys_compared", "fingerprints", after),
        )
        if what in snapshot.unavailable
    }
    return {
        "keys_added": [key for key in after.keys if key not in keys_before] if names_known else [],
        "keys_removed": [key for key in before.keys if key not in keys_after] if names_known else [],
        "keys_modified": [key for key in before.keys if key in keys_after],
        "total_keys_original": None if "weights" in before.unavailable else len(before.keys),
        "total_keys_modified": None if "weights" in after.unavailable else len(after.keys),
        "weight_changes": {
            key: {
                "shape_changed": old.shape != after.weights[key].shape,
                "dtype_changed": old.dtype != after.weights[key].dtype,
                "device_changed": old.device != after.weights[key].device,
                "original_shape": str(old.shape),
                "modified_shape": str(after.weights[key].shape),
            }
            for key, old in before.weights.items()
            if key in after.weights
        },
        "keys_value_changed": {key: verdict.change for key, verdict in changed.items()},
        "keys_wrapped": after.wrapped_keys,
        "keys_compared": sum(key in after.fingerprints for key in before.fingerprints),
        "delta_norm": total.delta_norm,
        "relative_change": total.relative_change,
        "spread": spread.value,
        "predicted": any(verdict.change["predicted"] for verdict in changed.values()),
        "by_block": [block.as_dict() for block in by_block(effects)],
        "drift": _drift(verdicts),
        "unexplained": [key for key, verdict in changed.items() if verdict.is_unexplained],
        "not_as_predicted": [key for key, v in changed.items() if v.is_as_predicted is False],
        "arriving": arriving,
        "checked": dict(checked),
        "outside": {key: verdict.outside for key, verdict in changed.items() if verdict.outside},
        "unavailable": {
            **unavailable,
            **total.unavailable,
            **({"spread": spread.reason} if spread.reason else {}),
            **({"arriving": not_arriving} if not_arriving else {}),
        },
    }


def _arriving(verdicts: Iterable[WeightVerdict]) -> tuple[Arriving | None, str | None]:
    """Share and noise of the weights that were measured; or else why there are none."""
    measured = [verdict.arrival for verdict in verdicts if verdict.arrival is not None]
    known = [arrival for arrival in measured if arrival.unavailable is None]
    if not known:
        return None, next((arrival.unavailable for arrival in measured), NOT_COARSE)
    whole = together(known)
    others: dict[str, ShareAndNoise] = {
        name: {"share": other.share, "noise": other.noise} for name, other in whole.others.items()
    }
    return {
        "share": whole.share,
        "noise": whole.noise,
        "stored": whole.stored,
        "weights": len(known),
        "other_ways": others,
    }, None


Verdicts = Mapping[str, WeightVerdict]


def acts(looks: BeforeAndAfter, verdicts: Verdicts) -> Reading[bool]:
    """Whether the model computes something else than before; None with the reason if that is not understood."""
    before, after = looks.before, looks.after
    if any(verdict.is_effective for verdict in verdicts.values()):
        lost = _why_it_may_be_lost(looks, verdicts)
        return Reading(True) if lost is None else Reading(None, lost)
    unread = next((verdict.unread for verdict in verdicts.values() if verdict.unread is not None), None)
    why = unread or next((v.why_unknown for v in verdicts.values() if v.why_unknown), None)
    why = why or "; ".join(looks.applied.unavailable.values()) or before.unavailable.get("patches")
    why = why or looks.kept.reason or _why_not_comparable(before, after)
    if why:
        return Reading(None, why)
    has_patches = looks.applied.patches or (looks.kept.value or KeptPatches()).patches
    if has_patches or (before.samples and after.samples and not before.fingerprints):
        unseen = _why_not_seen(before, after)
        return Reading(None, unseen) if unseen else Reading(False)
    if any(key in after.fingerprints for key in before.fingerprints):
        return Reading(False)
    unavailable = before.unavailable.get("fingerprints") or after.unavailable.get("fingerprints")
    return Reading(None, unavailable or NOT_SEEN)


_SHARE_OF_STEP: Final = 1e-3
"""Of the step of a dtype: by a change of so much of a weight one output in a thousand moves to another number, of a layer that has so many."""
_ADDED_IN: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})


def _why_it_may_be_lost(looks: BeforeAndAfter, verdicts: Verdicts) -> str | None:
    """That what is added to outputs for the first time is so small that their dtype may have none of it; None: it is not."""
    if any(patch.state != "inactive" for patch in (looks.kept.value or KeptPatches()).patches):
        return None
    largest: tuple[float, torch.dtype] | None = None
    for key, verdict in verdicts.items():
        if verdict.is_effective is False:
            continue
        share, weight = verdict.effect.relative_change, looks.held.base.get(key)
        is_added = verdict.change["measured_from"] == "patches" and not verdict.content_relative
        if weight is None or weight.dtype not in _ADDED_IN or share is None or not is_added:
            return None
        if not share <= _SHARE_OF_STEP * torch.finfo(weight.dtype).eps:
            return None
        largest = max(largest or (share, weight.dtype), (share, weight.dtype), key=lambda found: found[0])
    if largest is None:
        return None
    share, dtype = largest
    return (
        f"its change is at most {share:.1e} of a weight, under a thousandth of a step of {str(dtype).removeprefix('torch.')}: "
        f"{MAY_BE_LOST}"
    )


def _why_not_seen(before: ModelSnapshot, after: ModelSnapshot) -> str | None:
    """Where a LoRA may have been fused that is on the model at neither moment; None if it would have been seen."""
    read = [snapshot.fingerprints.keys() | snapshot.samples.keys() for snapshot in (before, after)]
    unseen = [
        key
        for key, outline in before.weights.items()
        if len(outline.shape) > 1 and key in after.weights and not (key in read[0] and key in read[1])
    ]
    if not unseen:
        return None
    return f"{counted(len(unseen), 'weight')} could not be read at both moments, such as {unseen[0]}"


def _why_not_comparable(before: ModelSnapshot, after: ModelSnapshot) -> str | None:
    """What changes a layer without being a weight or an adapter that is read."""
    if not before.weights or not after.weights:
        return None
    other = before.weights.keys() ^ after.weights.keys()
    if other:
        return f"{counted(len(other), 'weight has another name', 'weights have other names')} than before, such as {min(other)}: the layers are others"
    around = before.forwards ^ after.forwards
    if around:
        name, what = min(around)
        return f"{what} stands around the forward pass of {name or 'the model'} at one moment only"
    for kind, forward in before.class_forwards.items():
        if after.class_forwards.get(kind, forward) is not forward:
            return f"the class {kind.__name__} has another forward pass than before"
    kept = dict(before.settings.items() ^ after.settings.items())
    if kept:
        return f"{min(kept)} is of a script's own and keeps other values than before"
    for name, kind in before.classes.items():
        now = after.classes.get(name, kind)
        if now is not kind:
            whole = f"{name or 'the model'} was a {kind.__name__} and is a {now.__name__}"
            return f"{whole}, which may compute something else"
    return None


def weight_verdicts(looks: BeforeAndAfter) -> Iterator[tuple[str, WeightVerdict]]:
    """Of each weight whose content or changes are other than before and that is affected by it."""
    scales = scales_of(looks.held.base)
    evidence = dict(_evidence(looks, scales))
    sums = [(*(weight.beside.net or ()), *(weight.inside.net or ())) for weight in evidence.values()]
    merged = [
        (weight.now, (*weight.inside.net, *weight.known))
        for weight in evidence.values()
        if weight.inside.net is not None and weight.content_changed
    ]
    with norms_at_once(sums, [weight.now for weight in evidence.values()], merged):
        contents = {key: content for key, weight in evidence.items() if (content := weight.sampled_content)}
        explained = explain_contents(contents)
        sampled = sampled_effects(
            {key: (w.samples, w.now.numel()) for key, w in evidence.items() if w.samples is not None}
        )
        verdicts = {
            key: judge_weight(weight, explained.get(key), sampled.get(key))
            for key, weight in evidence.items()
        }
        arrivals = arrived(evidence)
    for key, arrival in arrivals.items():
        verdicts[key] = replace(verdicts[key], arrival=arrival)
    for key in scales.keys() & verdicts.keys():
        verdicts[key] = in_numbers(verdicts[key], scales[key])
    merged_unread = _merged_unread(looks)
    for key, verdict in verdicts.items() if merged_unread else ():
        why = merged_unread.get(key.rpartition(".")[0])
        if why is not None and evidence[key].content_changed and not evidence[key].has_own_changes:
            verdicts[key] = replace(verdict, is_effective=None, is_unexplained=False, unread=why)
    if looks.before.detours or looks.after.detours:
        for key, verdict in verdicts.items():
            if (why := looks.detour_of(key)) is not None:
                verdicts[key] = replace(verdict, is_effective=None, unread=why)
    for key, verdict in verdicts.items():
        is_told = verdict.is_effective is not False or verdict.unread or verdict.is_as_predicted is False
        if evidence[key].content_changed or is_told or verdict.arrival is not None:
            yield key, verdict


def _evidence(looks: BeforeAndAfter, scales: Mapping[str, float]) -> Iterator[tuple[str, WeightEvidence]]:
    """What is known of each weight whose content or changes are other than before."""
    before = looks.before
    held, kept = looks.held, looks.kept.value or KeptPatches()
    patches_now, patches_before = looks.applied.by_key(), by_key(kept.patches)
    merged = _merged_by_host(held, patches_now, patches_before)
    after = _with_contents_of(looks.after, before, merged)
    now = held.unpatched | merged
    original_of = _originals(looks, held, now)
    contents = {**kept.contents, **contents_of(_to_be_told_apart(patches_now, patches_before))}
    keys = {*patches_now, *patches_before}
    twins = {place_of(held.base[key]): key for key in keys if key in held.base}
    addresses = {_address(held.base[key]) for key in keys if key in held.base}
    tied = {key for key, weight in held.base.items() if key not in keys and _address(weight) in addresses}
    samples_before, samples_after = before.samples, after.samples
    is_changed = changes_of_content(before, after)
    looked_at = {*keys, *tied, *changed_contents(before, after)}
    for key, weight in now.items() if looked_at else ():
        if key not in looked_at:
            continue
        content = is_changed(key)
        is_own = key not in tied
        twin = key if is_own else twins.get(place_of(held.base[key]), key)
        if not content and twin not in keys:
            continue
        sides = patches_now.get(twin, []), patches_before.get(twin, [])
        if key in scales:
            sides = in_codes(sides[0], scales[key]), in_codes(sides[1], scales[key])
        own = sides if twin == key else ([], [])
        beside = signed_patches(beside_content(own[0]), beside_content(own[1]), contents)
        # Tied: what is merged into the one is in the other.
        inside = signed_patches(in_content(sides[0]), in_content(sides[1]), contents)
        if not content and beside.is_nothing and inside.is_nothing and not _is_same_by_name(beside, inside):
            continue
        candidates = looks.of_file.get(key, ()) if twin not in keys else ()
        is_sampled = key in samples_before and key in samples_after
        is_reshaped = key in before.weights and before.weights[key].shape != weight.shape
        # Codes are no numbers, and in another shape the same places hold other elements.
        has_samples = is_sampled and samples_before.dtype(key).is_floating_point and not is_reshaped
        yield (
            key,
            WeightEvidence(
                weight,
                original_of(key) if key in before.weights else None,
                beside,
                inside,
                content,
                (samples_before[key], samples_after[key]) if has_samples else None,
                _distinct((patch for side in (*sides, candidates) for patch in side), contents),
                contents,
            ),
        )


def _merged_unread(looks: BeforeAndAfter) -> dict[str, str]:
    """By layer, why nobody knows what was merged into it, or taken out of it, between both moments: it may be in its bias."""
    kept = looks.kept.value or KeptPatches()
    standings: dict[tuple[str, str | None], set[bool]] = {}
    whys: dict[tuple[str, str | None], str] = {}
    for patch in (*looks.applied.patches, *kept.patches):
        if patch.adapter_type == "unknown":
            place = patch.key.rpartition(".")[0], patch.source
            standings.setdefault(place, set()).add(patch.state == "merged")
            whys[place] = next(iter(patch.unavailable.values()), "a change of it is not read")
    return {layer: whys[layer, source] for (layer, source), merged in standings.items() if len(merged) > 1}


def _address(tensor: Tensor) -> int:
    """The same of tensors of one `place_of`."""
    try:
        return tensor.data_ptr() or id(tensor)
    except PROBE_ERRORS:
        return id(tensor)


def _is_same_by_name(*signed: SignedPatches) -> bool:
    return any(patches.same_by_name is not None for patches in signed)


def by_key(patches: Iterable[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    """The changes of each weight."""
    return ModelPatches(tuple(patches)).by_key()


def _to_be_told_apart(*sides: Mapping[str, Sequence[AppliedPatch]]) -> list[AppliedPatch]:
    """The patches of weights that have several, at one moment or both."""
    together = by_key(patch for side in sides for patches in side.values() for patch in patches)
    several = (patches for patches in together.values() if len({key_of(patch) for patch in patches}) > 1)
    return [patch for patches in several for patch in patches]


def _distinct(patches: Iterable[AppliedPatch], contents: Contents) -> tuple[AppliedPatch, ...]:
    distinct: dict[Hashable, AppliedPatch] = {}
    for patch in patches:
        if patch.tensors:
            distinct.setdefault(content_of(patch, contents), patch)
    return tuple(distinct.values())


def beside_content(patches: Sequence[AppliedPatch]) -> list[AppliedPatch]:
    """What acts besides the weight's content; what PEFT takes out of it at the next call acts against it."""
    beside = [patch for patch in patches if patch.state != "merged"]
    taken_out = [patch for patch in in_content(patches) if patch.state_reason == UNMERGED_NEXT]
    return beside + [_taken_out(patch) for patch in taken_out]


def in_content(patches: Sequence[AppliedPatch]) -> list[AppliedPatch]:
    """What was merged into the weight's content."""
    return [patch for patch in patches if patch.state == "merged"]


def _taken_out(patch: AppliedPatch) -> AppliedPatch:
    if patch.strength is None or needs_weight(patch):
        return replace(patch, state="lazy", strength=None, unavailable={"strength": UNMERGED_NEXT})
    return replace(patch, state="lazy", strength=-patch.strength)


def changes_of_content(before: ModelSnapshot, after: ModelSnapshot) -> Callable[[str], bool | None]:
    """Tells whether a weight's content is another; None of one that was not looked at at both moments."""
    changed = changed_contents(before, after)
    prints, prints_now = before.fingerprints, after.fingerprints
    samples, samples_now = before.samples, after.samples

    def is_changed(key: str) -> bool | None:
        if key in changed:
            return True
        is_known = (key in prints and key in prints_now) or (key in samples and key in samples_now)
        return False if is_known else None

    return is_changed


def changed_contents(before: ModelSnapshot, after: ModelSnapshot) -> frozenset[str]:
    """The weights whose content is another, by their fingerprints or else by a thousand elements."""
    prints, prints_now = before.fingerprints, after.fingerprints
    both = prints.keys() & prints_now.keys()
    return frozenset(
        (after.samples.others_than(before.samples) - both)
        | {key for key in both if prints[key] != prints_now[key]}
    )


def _originals(
    looks: BeforeAndAfter, held: Weights, now: Mapping[str, Tensor]
) -> Callable[[str], Tensor | None]:
    """Gives a weight as it was, where anybody still has it apart from that of now.

    What it gives is proved by its fingerprint where the baseline has one.
    """
    original = looks.before.model()
    live: Mapping[str, Tensor] = {}
    if original is not None and original is not looks.model:
        weights = attempt(lambda: weights_in(original, looks.before.model_type)).value
        live = {} if weights is None else weights.unpatched

    def original_of(key: str) -> Tensor | None:
        kept = held.kept[key].weight if key in held.kept else None
        known = looks.before.fingerprints.get(key)
        for candidate in (kept, live.get(key)):
            if candidate is None or _same_memory(candidate, now[key]):
                continue
            if known is None or fingerprint(candidate).value == known:
                return candidate
        return None

    return original_of


def _same_memory(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    return tensor.device == other.device and tensor.data_ptr() == other.data_ptr() != 0


def _merged_by_host(
    held: Weights, patches: dict[str, list[AppliedPatch]], before: Collection[str]
) -> dict[str, Tensor]:
    """The weights that ComfyUI keeps the originals of and that hold just this patcher's changes, the first ones.

    For the others its merged changes are in `patches` as registered: if the weights hold a clone's changes, they are
    in no weight of this patcher, and where there were changes before, the originals of both moments are compared.
    """
    merged: dict[str, Tensor] = {}
    for key, kept in held.kept.items():
        own = patches.get(key, ())
        if kept.is_own and key not in before and any(patch.state == "merged" for patch in own):
            merged[key] = held.base[key]
        elif key in patches:
            patches[key] = [
                replace(patch, state="registered") if patch.state == "merged" else patch for patch in own
            ]
    return merged


def _with_contents_of(
    after: ModelSnapshot, before: ModelSnapshot, merged: Mapping[str, Tensor]
) -> ModelSnapshot:
    """The moment with the contents of these weights as they are, where those before were looked at."""
    looked_at = {key: weight for key, weight in merged.items() if key in before.fingerprints}
    if not looked_at:
        return after
    readings = fingerprints(looked_at).items()
    prints = {key: reading.value for key, reading in readings if reading.value is not None}
    taken = after.samples | samples(looked_at)
    return replace(after, fingerprints={**after.fingerprints, **prints}, begun_samples=Pending(lambda: taken))


def _total_effect(effects: Collection[Effect]) -> Effect:
    unknown = [effect for effect in effects if effect.delta_norm is None]
    deltas = [effect.delta_norm for effect in effects if effect.delta_norm is not None]
    both = [effect for effect in effects if effect.delta_norm is not None and effect.weight_norm is not None]
    below = root_sum_square([effect.weight_norm or 0.0 for effect in both])
    above = root_sum_square([effect.delta_norm or 0.0 for effect in both])
    unavailable: dict[str, str] = {}
    if unknown:
        first = unknown[0].unavailable.get("delta_norm", "unknown")
        unavailable["delta_norm"] = f"of {len(unknown)} of {len(effects)} weights: {first}"
    if below == 0.0:
        reason = "no changed weight has a known norm" if effects else "no weight changed"
        unavailable["relative_change"] = reason
    elif len(both) < len(effects):
        partly = next(effect.unavailable for effect in effects if effect not in both)
        first = partly.get("relative_change", "unknown")
        missing = len(effects) - len(both)
        unavailable["relative_change"] = f"of {missing} of {len(effects)} weights: {first}"
    delta = root_sum_square(deltas) if deltas or not effects else None
    return Effect(delta, above / below if below > 0.0 else None, below, unavailable=unavailable)


def _total_spread(changes: Collection[ValueChange]) -> Reading[float]:
    """That of √Σ‖ΔW‖² from those of its parts."""
    known = [change for change in changes if change["delta_norm"] is not None]
    gaps = [change["unavailable"].get("spread") for change in known or changes if change["spread"] is None]
    if gaps:
        return Reading(None, f"of {len(gaps)} of {len(changes)} weights: {gaps[0] or 'unknown'}")
    squares = [(change["spread"] or 0.0, (change["delta_norm"] or 0.0) ** 2) for change in known]
    whole = sum(square for _, square in squares)
    return Reading(root_sum_square([spread * square for spread, square in squares]) / whole if whole else 0.0)


def _drift(verdicts: Mapping[str, WeightVerdict]) -> Drift:
    relatives = {key: verdict.content_relative for key, verdict in verdicts.items() if verdict.is_drift}
    measured = [relative for relative in relatives.values() if relative is not None]
    return {"keys": list(relatives), "largest_relative_change": max(measured, default=None)}


def look_again(
    before: ModelSnapshot, model: object, model_type: str, applied: ModelPatches
) -> BeforeAndAfter:
    """Look at a model as it is now, at the same weights as before."""
    keys = None if not before.fingerprints else set(before.fingerprints)
    contents = before.fingerprint_seconds is not None
    held = attempt(lambda: weights_in(model, model_type))
    after = take_snapshot(
        model, model_type, keys=keys, contents=contents, since=before, applied=applied, weights=held
    )
    kept = attempt(lambda: with_tensors_of(before.kept.result(), applied.patches))
    return BeforeAndAfter(before, after, model, applied, held.value or Weights({}, {}), kept)
