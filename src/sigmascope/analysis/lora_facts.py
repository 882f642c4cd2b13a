"""How the facts of a run on its LoRAs are read: what a change left on each model, and what a call had."""

from collections.abc import Mapping
from math import isclose
from typing import Any, Final

from sigmascope import units
from sigmascope.records.run import ONLY_ON, RECIPE, Run, Stage

FACT: Final = "lora_application"
"""The stage of a change of LoRAs, and its fact that holds the analysis."""
WEIGHTS_BEFORE: Final = "weights_before"
"""The fact of a change that put LoRAs into bare weights: by component these weights' fingerprint, as calls have it."""
WEIGHTS_LEFT: Final = "weights_left"
"""The same of a change that took off layers of which something is merged: of the weights that it left."""
LAZY: Final = "lazy"
"""The state of changes that a layer applies beside its weight."""
IDLE: Final = frozenset({"inactive", "failed"})
"""States of changes that do nothing."""
MERGING: Final = ("fuse", "merge")
"""How the names of methods begin that put LoRAs into the weights."""
TAKE_OFF: Final = frozenset(
    {"delete_adapter", "delete_adapters", "merge_and_unload", "unload", "unload_lora", "unload_lora_weights"}
)
"""Methods that take adapters off models."""
TAKE_OUT: Final = frozenset({"unfuse_lora", "unmerge_adapter"})
"""Methods that take LoRAs out of the weights again."""
SCALED: Final = frozenset({"lora", "loha", "lokr", "diff"})
"""Kinds of changes that are nothing at strength 0: a DoRA's magnitudes act then too."""
OF_SETTING: Final = frozenset(
    {
        "lora_alpha_zero",
        "lora_bypassed",
        "lora_cancelled",
        "lora_disabled",
        "lora_in_base",
        "lora_is_zero",
        "lora_not_active",
        "lora_opposite",
        "lora_others_merged",
        "lora_strength_zero",
    }
)
"""Findings on how LoRAs are set: a later call that they still hold for has the same."""
_EXACT: Final = 1e-3
"""The spread of a norm, as a share of it, up to which it is not called an estimate."""
ZEROS: Final = frozenset({"lora_alpha_zero", "lora_is_zero", "lora_untrained"})
"""Findings that a LoRA holds nothing but zeros: they stand whatever else is in the weights."""
AFTER_STEP: Final = "after_step"
"""The fact of a change between the steps of a call: how many were over."""
WEAK, NOISY = "lora_arrives_weak", "lora_arrives_noisy"
"""The findings on what arrived of a LoRA in coarse weights."""
OF_ENCODERS: Final = "text encoders"
GIVES_BACK: Final = "it began with a part of the weights (init_lora_weights), which they lack"
"""Why ‖ΔW‖ of a PiSSA, say, is not known: its factors hold what was taken out of the weights, beside what it was trained to."""
MERGED_BEFORE: Final = "merged_before"
"""The fact of a change or a call: that something was merged before the watch of which nobody knows what is left, in a sentence."""
MERGED_AT: Final = "merged_at"
"""The fact of a change: the least and largest strengths, when the watch first saw them, of the LoRAs that were merged before, by "unet.style"."""


def acts_at(strength: float | None, kind: object) -> bool:
    """Whether a change of a kind is something at a strength."""
    return bool(strength) or kind not in SCALED


def sides_of(analysis: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What an analysis has of the changes on the denoiser, and on the text encoders."""
    return [mapping(analysis.get(f"{side}_lora_patches")) for side in ("unet", "clip")]


def patches_in(stage: Stage) -> list[Mapping[str, Any]]:
    """The same of a stage; of one without an analysis, empty."""
    return sides_of(mapping(stage.facts.get(FACT)))


def names_of_sides(change: Stage) -> tuple[tuple[str, str], ...]:
    """What the two sides of a change are called, and what its facts call them."""
    component = change.facts.get("component")
    return (component if isinstance(component, str) else "denoiser", "unet"), (OF_ENCODERS, "clip")


def acting_in(patches: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The LoRAs of which some change acts, by name."""
    loras = {name: mapping(lora) for name, lora in mapping(patches.get("loras")).items()}
    return {
        name: lora
        for name, lora in loras.items()
        if not IDLE.issuperset(mapping(lora.get("states"))) and lora.get("delta_norm") != 0.0
    }


def gives_back(lora: Mapping[str, Any]) -> bool:
    """Whether a LoRA gives its weights back what it took out of them: until it is trained, it changes nothing at strength 1."""
    return mapping(lora.get("unavailable")).get("delta_norm") == GIVES_BACK


def loras_in_call(stage: Stage) -> dict[str, Mapping[str, Any]]:
    """The LoRAs that were on the components of a call, by component and adapter, as they stood when it was over."""
    loras = mapping(mapping(stage.facts.get(RECIPE)).get("loras"))
    return {name: mapping(lora) for name, lora in loras.items()}


def estimate_in(changes: Mapping[str, Any]) -> str | None:
    """From what the norm of a model's changes is estimated, and how closely, in words; None if it is none or exact."""
    spread, why = changes.get("spread"), mapping(changes.get("unavailable")).get("spread")
    source = "from a thousand elements of each weight"
    if isinstance(spread, float):
        return f"{source}, to {units.rough_percent(spread)}" if spread > _EXACT else None
    is_estimate = why is not None and changes.get("delta_norm") is not None
    return f"{source}, and how closely is unknown: {why}" if is_estimate else None


def made_nan(call: Stage) -> bool:
    """Whether a call made NaN or Inf somewhere."""
    return any(
        facts.nan_count or facts.inf_count for stage in call.walk() for facts in stage.tensors.values()
    )


def on_other_side(run: Run, change: Stage) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Of a change of one model: what acts on the other side of the pipeline, as the change before it left that."""
    if change.facts.get(ONLY_ON) is None:
        return []
    stages = [*run.walk()]
    other = "unet" if is_of_encoder(change) else "clip"
    for stage in reversed(stages[: stages.index(change)]):
        if FACT not in stage.facts:
            continue
        if stage.facts.get(ONLY_ON) is None or is_of_encoder(stage) is (other == "clip"):
            analysis = mapping(stage.facts[FACT])
            patches = mapping(analysis.get(f"{other}_lora_patches"))
            name = next(name for name, side in names_of_sides(stage) if side == other)
            changes = mapping(analysis.get(f"{other}_weight_changes"))
            return [(name, changes, patches)] if acting_in(patches) else []
    return []


def is_of_encoder(change: Stage) -> bool:
    """Whether a change was made on a text encoder alone."""
    return str(change.facts.get(ONLY_ON)).startswith("text_encoder")


def active_beside(only_on: object, call: Stage) -> dict[str, Mapping[str, Any]]:
    """The LoRAs of a call that are active, but for those on one component."""
    loras = {name: lora for name, lora in loras_in_call(call).items() if lora.get("active")}
    return {name: lora for name, lora in loras.items() if name.partition(".")[0] != only_on}


def range_of(strengths: object) -> tuple[float, float] | None:
    """The least and the greatest of some numbers; None if there is none."""
    known = (
        [one for one in strengths if isinstance(one, int | float)]
        if isinstance(strengths, list | tuple)
        else []
    )
    return (min(known), max(known)) if known else None


def is_same(one: float, other: float) -> bool:
    """Whether two strengths are the same, but for rounding."""
    return isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)


def mapping(held: object) -> Mapping[str, Any]:
    """What a record holds where it should hold a mapping; empty if it holds something else."""
    return held if isinstance(held, Mapping) else {}
