"""One model's part of an analysis, and what both parts come to."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from sigmascope.lora.verdict.applied_verdict import AppliedVerdict
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.probes.reading import Reading
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.applied import Applied, read_applied
from sigmascope.stages.lora.baseline import NO_BASELINE, captured_of
from sigmascope.stages.lora.captured import CapturedModel
from sigmascope.stages.lora.entries import entry_of
from sigmascope.stages.lora.identity import identity_changes, is_same
from sigmascope.stages.lora.in_weights import fused_keys, with_fused
from sigmascope.stages.lora.judged import names_of_all
from sigmascope.stages.lora.memory import memory_change
from sigmascope.stages.lora.moments import Moments, moments_of
from sigmascope.stages.lora.placement import placement_changes
from sigmascope.stages.lora.safely import safe_patch_analysis, safe_weight_changes
from sigmascope.stages.lora.typed_models import (
    IdentityChanges,
    MemoryChangeOfModel,
    PatchAnalysis,
    PlacementChanges,
    WeightChanges,
)


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
            weights=_without(
                side.weights, {key for key in side.weights["unexplained"] if name(key) in explained}
            ),
        )
        for name, (kind, side) in zip(names, sides.items(), strict=True)
    }


def _without(weights: WeightChanges, explained: Collection[str]) -> WeightChanges:
    return {**weights, "unexplained": [key for key in weights["unexplained"] if key not in explained]}
