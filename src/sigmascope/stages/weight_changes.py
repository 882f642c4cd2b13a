"""What became of a model's weights between two moments: names, facts, and how much each one changed.

How much is measured from both contents where there are two, else calculated from the changes on the weight,
else estimated from a thousand sampled elements. Old contents are taken wherever anybody still has them
(`_originals`). For a weight that plain changes were merged into, the norm that it had before follows from the
merged weight and the changes (`with_unmerged_norm`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.effect import Effect, by_block, effect_of, measured_effect
from sigmascope.lora.linalg import as_float64, blocked_norm, root_sum_square
from sigmascope.lora.patches import WeightedFactors, factors_of, is_product, needs_weight, sort_patches
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.fingerprints import fingerprint, fingerprints, samples
from sigmascope.probes.reading import Reading, attempt
from sigmascope.probes.tensors import place_of
from sigmascope.stages.model_snapshot import (
    ModelPatches,
    ModelSnapshot,
    Weights,
    mark_of,
    take_snapshot,
    weights_in,
)
from sigmascope.stages.schema import Drift, ValueChange, WeightChanges, as_dict

_MEASURED_WITHIN: Final = 0.05  # how far a measured change may be from the predicted one, as a fraction
_SAMPLED_WITHIN: Final = 1.0  # the same for one that a sample estimates
NOT_LOOKED_AT: Final = "this weight was not checked"
_NO_EFFECT: Final = Effect(None, None, None, False)
_CANCELLED: Final = 1e-6  # a difference of squares below this share of them is rounding


@dataclass(frozen=True, slots=True, eq=False)
class BeforeAndAfter:
    """Two moments of a model, and the model itself. It holds the host's tensors."""

    before: ModelSnapshot
    after: ModelSnapshot
    model: object
    applied: ModelPatches

    def samples_of_changed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The elements that were taken of each weight at both moments, where its content is another now."""
        before, after = self.before, self.after
        return {
            key: (sample, after.samples[key])
            for key, sample in before.samples.items()
            if key in after.samples and before.fingerprints.get(key) != after.fingerprints.get(key)
        }


def weight_changes(looks: BeforeAndAfter) -> WeightChanges:
    """Compare names, facts and contents; see `WeightChanges`."""
    before, after = looks.before, looks.after
    verdicts = dict(_verdicts(looks))
    changed = {key: verdict for key, verdict in verdicts.items() if verdict.is_effective}
    effects = {key: verdict.effect for key, verdict in changed.items()}
    total = _total_effect(effects.values())
    keys_before, keys_after = set(before.keys), set(after.keys)
    names_known = "weights" not in before.unavailable and "weights" not in after.unavailable
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
        "predicted": any(verdict.change["predicted"] for verdict in changed.values()),
        "by_block": [block.as_dict() for block in by_block(effects)],
        "drift": _drift(verdicts),
        "unexplained": [key for key, verdict in changed.items() if verdict.is_unexplained],
        "not_as_predicted": [key for key, v in changed.items() if v.is_as_predicted is False],
        "unavailable": {**unavailable, **total.unavailable},
    }


@dataclass(frozen=True, slots=True)
class WeightVerdict:
    """How one weight changed.

    Attributes:
        change: In figures.
        effect: The same for the sums over blocks.
        is_drift: Whether the content changed by no more than rounding, and nothing is merged that would explain more.
        is_unexplained: Whether it changed by more, and nothing is merged.
        is_as_predicted: Whether the weight changed as predicted; None if unknown.
        content_relative: ‖ΔW‖/‖W‖ of the weight itself, measured or sampled; None if unknown.
    """

    change: ValueChange
    effect: Effect
    is_drift: bool
    is_unexplained: bool
    is_as_predicted: bool | None
    content_relative: float | None

    @property
    def is_effective(self) -> bool:
        """Whether the weight has a new effect: a change acts on it, or it changed by more than rounding."""
        return not self.is_drift or self.change["measured_from"] == "patches"


def _verdicts(looks: BeforeAndAfter) -> Iterator[tuple[str, WeightVerdict]]:
    """Of each weight whose content or changes are other than before and that is affected by it."""
    before = looks.before
    held = attempt(lambda: weights_in(looks.model, looks.after.model_type)).value or Weights({}, {})
    fresh: dict[str, list[AppliedPatch]] = {}
    for key, patches in looks.applied.by_key().items():
        marks_before = set(before.marks.get(key, ()))
        fresh[key] = [patch for patch in patches if mark_of(patch) not in marks_before]
    merged = _merged_by_host(held, fresh)
    after = _with_contents_of(looks.after, before, merged)
    now = held.unpatched | merged
    original_of = _originals(looks, held, now)
    twins = {place_of(held.base[key]): key for key in fresh if key in held.base}
    for key, weight in now.items():
        print_before, print_now = before.fingerprints.get(key), after.fingerprints.get(key)
        content = None if print_before is None or print_now is None else print_before != print_now
        acting = fresh.get(key, [])
        twin = twins.get(place_of(held.base[key]), key)
        if key not in fresh and twin != key:  # tied: what is merged into the one is in the other
            acting = [patch for patch in fresh[twin] if patch.state == "merged"]
        if not content and all(patch.state in ("failed", "inactive") for patch in acting):
            continue
        had_patches = bool(before.marks.get(key))
        samples_of_both = None
        # Where the host merged patches that the baseline had, the sample before is without them.
        if key in before.samples and key in after.samples and not (had_patches and key in merged):
            samples_of_both = before.samples[key], after.samples[key]
        original = original_of(key) if key in before.weights else None
        evidence = WeightEvidence(weight, original, acting, had_patches, content, samples_of_both)
        verdict = judge_weight(evidence)
        if content or verdict.effect.delta_norm != 0.0 or verdict.is_as_predicted is False:
            yield key, verdict


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


def _merged_by_host(held: Weights, fresh: dict[str, list[AppliedPatch]]) -> dict[str, Tensor]:
    """The weights that ComfyUI keeps the originals of and that hold just this patcher's changes, new ones among them.

    If the weights hold a clone's changes instead, those in `fresh` are only registered, and in no weight of this
    patcher.
    """
    merged: dict[str, Tensor] = {}
    for key, kept in held.kept.items():
        if kept.is_own and any(patch.state == "merged" for patch in fresh.get(key, ())):
            merged[key] = held.base[key]
        elif not kept.is_own and key in fresh:
            fresh[key] = [
                replace(patch, state="registered") if patch.state == "merged" else patch
                for patch in fresh[key]
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
    taken = {**after.samples, **samples(looked_at)}
    return replace(after, fingerprints={**after.fingerprints, **prints}, samples=taken)


@dataclass(frozen=True, slots=True, eq=False)
class WeightEvidence:
    """One weight and what is known of it. It holds the host's tensors.

    Attributes:
        now: Its content.
        original: Its values before, if the host still keeps them separately.
        fresh: Changes on it that the baseline does not have.
        had_patches: Whether the baseline has some.
        content_changed: By fingerprint; None if not known.
        samples: A thousand elements before and now.
    """

    now: Tensor
    original: Tensor | None
    fresh: Sequence[AppliedPatch]
    had_patches: bool
    content_changed: bool | None
    samples: tuple[Tensor, Tensor] | None


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
    delta = root_sum_square(deltas) if deltas or not effects else None
    return Effect(delta, above / below if below > 0.0 else None, below, unavailable=unavailable)


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
    after = take_snapshot(model, model_type, keys=keys, contents=contents)
    return BeforeAndAfter(before, after, model, applied)


def judge_weight(weight: WeightEvidence) -> WeightVerdict:
    """Measure or predict the change of one weight."""
    acting = sort_patches(weight.fresh).acting
    predicted = _predicted(weight, acting) if acting else None
    contents = None
    if weight.content_changed and weight.original is not None:
        contents = measured_effect(weight.original, weight.now)
    measured = _measured(weight, acting, contents)
    sampled = sampled_effect(weight.samples, weight.now.numel())
    beside = any(patch.state != "merged" for patch in acting)  # of which contents say nothing
    effect, source = _best_known(measured, predicted, None if beside else sampled)
    seen = contents or sampled or _NO_EFFECT
    content = seen.relative_change
    within_rounding = seen.delta_norm == 0.0 or (
        content is not None and content <= rounding(weight.now.dtype)
    )
    bare = weight.content_changed is True and not any(patch.state == "merged" for patch in acting)
    return WeightVerdict(
        _value_change(weight, effect, source, predicted, sampled),
        effect,
        bare and within_rounding,
        bare and not within_rounding and not weight.had_patches,
        _as_predicted(weight, acting, measured, predicted, sampled),
        content,
    )


def _predicted(weight: WeightEvidence, acting: Sequence[AppliedPatch]) -> Effect:
    if weight.original is not None or not any(patch.state == "merged" for patch in acting):
        return effect_of(weight.fresh, weight.now if weight.original is None else weight.original)
    if any(map(needs_weight, acting)):
        return effect_of(weight.fresh, None)
    return with_unmerged_norm(effect_of(weight.fresh, None), weight.now, acting)


def _measured(
    weight: WeightEvidence, acting: Sequence[AppliedPatch], contents: Effect | None
) -> Effect | None:
    """Of the contents, where these are all of the change."""
    if weight.had_patches or any(patch.state != "merged" for patch in acting):
        return None
    if weight.content_changed is False and acting:
        return Effect(0.0, 0.0, None, False, unavailable={"weight_norm": "nothing changed"})
    return contents


def _best_known(
    measured: Effect | None, predicted: Effect | None, sampled: Effect | None
) -> tuple[Effect, str | None]:
    for effect, source in ((measured, "contents"), (predicted, "patches"), (sampled, "sample")):
        if effect is not None and effect.delta_norm is not None:
            return effect, source
    if predicted is not None:
        return replace(predicted, predicted=False), None
    names = ("delta_norm", "relative_change", "weight_norm")
    why = dict.fromkeys(names, "the old values are gone, and no change explains the new ones")
    return Effect(None, None, None, False, unavailable=why), None


def _value_change(
    weight: WeightEvidence,
    effect: Effect,
    source: str | None,
    predicted: Effect | None,
    sampled: Effect | None,
) -> ValueChange:
    why, by_patches, by_sample = effect.unavailable, predicted or _NO_EFFECT, sampled or _NO_EFFECT
    why_no_prediction = "no new change affects it" if predicted is None else "unknown"
    return as_dict(
        ValueChange,
        effect,
        content_changed=Reading(weight.content_changed, NOT_LOOKED_AT),
        measured_from=Reading(source, why.get("delta_norm")),
        predicted_delta_norm=Reading(
            by_patches.delta_norm, by_patches.unavailable.get("delta_norm", why_no_prediction)
        ),
        sampled_delta_norm=Reading(by_sample.delta_norm, "the weight was not sampled both before and after"),
        predicted=source == "patches",
    )


def _as_predicted(
    weight: WeightEvidence,
    acting: Sequence[AppliedPatch],
    measured: Effect | None,
    predicted: Effect | None,
    sampled: Effect | None,
) -> bool | None:
    """Whether the content changed by what the merged changes say, but for rounding."""
    merged = bool(acting) and all(patch.state == "merged" for patch in acting)
    if not merged or weight.had_patches or predicted is None or predicted.delta_norm is None:
        return None
    seen, within = (measured, _MEASURED_WITHIN) if measured is not None else (sampled, _SAMPLED_WITHIN)
    if seen is None or seen.delta_norm is None:
        return None
    whole = predicted.weight_norm or seen.weight_norm or 0.0
    allowed = within * min(predicted.delta_norm, seen.delta_norm) + rounding(weight.now.dtype) * whole
    return abs(seen.delta_norm - predicted.delta_norm) <= allowed


def with_unmerged_norm(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> Effect:
    """The effect with the norm of the unchanged weight, if it can be calculated.

    ‖W‖² = ‖M‖² − 2·<M, Δ> + ‖Δ‖² for the merged weight M = W + Δ, with <M, up·down> = Σ (upᵀM) ∘ down.
    """
    norm = attempt(lambda: _norm_before(effect, merged, acting)).value
    if norm is None or effect.delta_norm is None:
        reason = "the weight without the changes is gone"
        unavailable = {**effect.unavailable, "weight_norm": reason, "relative_change": reason}
        return replace(effect, relative_change=None, weight_norm=None, unavailable=unavailable)
    return replace(effect, relative_change=effect.delta_norm / norm, weight_norm=norm)


def _norm_before(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> float | None:
    simple = all(is_product(patch) and patch.strength_model == 1.0 for patch in acting)
    if effect.delta_norm is None or not simple:
        return None
    with torch.no_grad():
        shape = tuple(merged.shape)
        whole = blocked_norm(merged)
        inner = sum(_inner_product(merged, factors_of(patch, shape)) for patch in acting)
    squared = whole**2 - 2.0 * inner + effect.delta_norm**2
    return sqrt(squared) if squared > _CANCELLED * (whole**2 + effect.delta_norm**2) else None


def _inner_product(merged: Tensor, factors: WeightedFactors) -> float:
    """<M, w·up·down>; the products in float32, which is eight digits of each."""
    matrix = merged.detach().flatten(1).to(torch.float32)
    up, down = (factor.to(matrix.device, torch.float32) for factor in (factors.up, factors.down))
    return factors.weight * float(as_float64((up.T @ matrix) * down).sum())


def sampled_effect(samples: tuple[Tensor, Tensor] | None, elements: int) -> Effect | None:
    """‖ΔW‖ and ‖W‖ estimated from the same elements before and now; None without them, or with NaN."""
    if samples is None or samples[0].shape != samples[1].shape or not samples[0].numel():
        return None
    before, after = (as_float64(sample).cpu() for sample in samples)
    share = sqrt(elements / before.numel())
    delta, whole = (float(torch.linalg.vector_norm(values)) * share for values in (after - before, before))
    if not (isfinite(delta) and isfinite(whole)):
        return None
    return Effect(delta, delta / whole if whole > 0 else None, whole, False)


def rounding(dtype: torch.dtype) -> float:
    """‖ΔW‖/‖W‖ up to which adding a change and taking it away again explains a difference.

    Two roundings to the nearest are off by 0.3 ε of the larger of W and W + Δ, in the mean over a weight.
    """
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps if eps > 1e-6 else 4 * eps
