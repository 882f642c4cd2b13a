"""What became of a model's weights between two moments."""

from collections.abc import Iterator, Mapping

from sigmascope.lora.effect import Effect, by_block
from sigmascope.lora.norms import root_sum_square
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.places import place_of
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.captured import CapturedModel, mark_of
from sigmascope.stages.lora.estimates import sample_pair
from sigmascope.stages.lora.moments import KeysOfBoth, Moments, Originals
from sigmascope.stages.lora.typed_models import Drift, WeightChange, WeightChanges
from sigmascope.stages.lora.value_changes import Verdict, WeightInQuestion, judge_weight
from sigmascope.stages.lora.weights import Weights, weights_in


def weight_changes(moments: Moments) -> WeightChanges:
    """Compare names, facts and contents; see `typed.WeightChanges`."""
    before, after = moments.before, moments.after
    common = [key for key in before.weights if key in after.weights]
    verdicts = dict(_verdicts(moments))
    changed = {key: verdict for key, verdict in verdicts.items() if verdict.is_effective}
    effects = {key: verdict.effect for key, verdict in changed.items()}
    keys = KeysOfBoth(before, after)
    whole = _total(effects)
    return {
        "keys_added": keys.only_in(after, before),
        "keys_removed": keys.only_in(before, after),
        "keys_modified": keys.in_both(),
        "total_keys_original": keys.count(before),
        "total_keys_modified": keys.count(after),
        "weight_changes": {key: _facts(key, before, after) for key in common},
        "keys_value_changed": {key: verdict.change for key, verdict in changed.items()},
        "keys_wrapped": after.wrapped_keys,
        "keys_compared": sum(key in after.fingerprints for key in before.fingerprints),
        "delta_norm": whole.delta_norm,
        "relative_change": whole.relative_change,
        "predicted": any(verdict.change["predicted"] for verdict in changed.values()),
        "by_block": [block.as_dict() for block in by_block(effects)],
        "drift": _drift(verdicts),
        "unexplained": [key for key, verdict in changed.items() if verdict.is_unexplained],
        "not_as_predicted": [key for key, v in changed.items() if v.is_as_predicted is False],
        "unavailable": {**_why_not_whole(before, after), **whole.unavailable},
    }


def _facts(key: str, before: CapturedModel, after: CapturedModel) -> WeightChange:
    old, new = before.weights[key], after.weights[key]
    return {
        "shape_changed": old.shape != new.shape,
        "dtype_changed": old.dtype != new.dtype,
        "device_changed": old.device != new.device,
        "original_shape": str(old.shape),
        "modified_shape": str(new.shape),
    }


def _verdicts(moments: Moments) -> Iterator[tuple[str, Verdict]]:
    """Of each weight whose content or changes are other than before and that is affected by it."""
    patches = moments.applied.by_key()
    now = read_host(lambda: weights_in(moments.model, moments.after.model_type)).value or Weights({}, {})
    originals = Originals(moments, now.base)
    twins = {place_of(now.base[key]): key for key in patches if key in now.base}
    for key, weight in now.base.items():
        content = _content_changed(key, moments)
        fresh = _fresh(patches.get(key, ()), moments.before, key)
        twin = twins.get(place_of(weight), key)
        if key not in patches and twin != key:  # tied: what is merged into the one is in the other
            fresh = [p for p in _fresh(patches[twin], moments.before, twin) if p.state == "merged"]
        if not content and not _acts(fresh):
            continue
        verdict = judge_weight(
            WeightInQuestion(
                weight,
                originals.of(key) if key in moments.before.weights else None,
                fresh,
                bool(moments.before.marks.get(key)),
                content,
                sample_pair(key, moments.before.samples, moments.after.samples),
            )
        )
        if content or verdict.effect.delta_norm != 0.0 or verdict.is_as_predicted is False:
            yield key, verdict


def _content_changed(key: str, moments: Moments) -> bool | None:
    old, new = moments.before.fingerprints.get(key), moments.after.fingerprints.get(key)
    return None if old is None or new is None else old != new


def _fresh(patches: "list[AppliedPatch] | tuple[()]", before: CapturedModel, key: str) -> list[AppliedPatch]:
    known = set(before.marks.get(key, ()))
    return [patch for patch in patches if mark_of(patch) not in known]


def _acts(patches: list[AppliedPatch]) -> bool:
    return any(patch.state not in ("failed", "inactive") for patch in patches)


def _total(effects: Mapping[str, Effect]) -> Effect:
    deltas = [effect.delta_norm for effect in effects.values() if effect.delta_norm is not None]
    both = [e for e in effects.values() if e.delta_norm is not None and e.weight_norm is not None]
    unavailable: dict[str, str] = {}
    if len(deltas) < len(effects):
        first = next(
            e.unavailable.get("delta_norm", "unknown") for e in effects.values() if e.delta_norm is None
        )
        unavailable["delta_norm"] = f"of {len(effects) - len(deltas)} of {len(effects)} weights: {first}"
    below = root_sum_square([effect.weight_norm or 0.0 for effect in both])
    above = root_sum_square([effect.delta_norm or 0.0 for effect in both])
    if below == 0.0:
        unavailable["relative_change"] = (
            "no weight changed" if not effects else "no changed weight's norm is known"
        )
    delta = root_sum_square(deltas) if deltas or not effects else None
    return Effect(delta, above / below if below > 0.0 else None, below, unavailable=unavailable)


def _drift(verdicts: Mapping[str, Verdict]) -> Drift:
    found = {key: verdict.content_relative for key, verdict in verdicts.items() if verdict.is_drift}
    known = [relative for relative in found.values() if relative is not None]
    return {"keys": list(found), "largest_relative_change": max(known, default=None)}


def _why_not_whole(before: CapturedModel, after: CapturedModel) -> dict[str, str]:
    """Why the comparison is not whole."""
    reasons = {f"original_{name}": before.unavailable[name] for name in _NAMES if name in before.unavailable}
    return reasons | {
        f"modified_{name}": after.unavailable[name] for name in _NAMES if name in after.unavailable
    }


_NAMES = ("weights", "fingerprints")
