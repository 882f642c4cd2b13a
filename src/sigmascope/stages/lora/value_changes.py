"""How much each weight changed: from both contents where there are two, else from the changes, else from samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from sigmascope.lora.effect import Effect, effect_of, measured_effect
from sigmascope.lora.effect.acting import sort_patches
from sigmascope.lora.effect.patch_change import needs_weight
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.stages.lora.estimates import rounding, sampled_effect
from sigmascope.stages.lora.merged_base import beside_unmerged
from sigmascope.stages.lora.typed_models import ValueChange

_MEASURED_WITHIN: Final = 0.05
_SAMPLED_WITHIN: Final = 1.0
NOT_LOOKED_AT: Final = "the content of this weight was not looked at"


_NOTHING: Final = Effect(None, None, None, False)


@dataclass(frozen=True, slots=True, eq=False)
class WeightInQuestion:
    """One weight and what is known of it. It holds the host's tensors.

    Attributes:
        now: Its content.
        original: Its content before, where the host still has it apart from `now`.
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one weight.

    Attributes:
        change: In figures.
        effect: The same for the sums over blocks.
        is_drift: Whether the content changed by no more than rounding, and nothing is merged that would explain more.
        is_unexplained: Whether it changed by more, and nothing is merged.
        is_as_predicted: Whether the content changed as the changes say; None if that cannot be told.
        content_relative: ‖ΔW‖/‖W‖ of the contents alone, measured or sampled; None if that cannot be told.
    """

    change: ValueChange
    effect: Effect
    is_drift: bool
    is_unexplained: bool
    is_as_predicted: bool | None
    content_relative: float | None

    @property
    def is_effective(self) -> bool:
        """Whether the weight does something else than before: a change acts, or more than rounding changed."""
        return not self.is_drift or self.change["measured_from"] == "patches"


def judge_weight(weight: WeightInQuestion) -> Verdict:
    """Measure or predict the change of one weight."""
    acting = sort_patches(weight.fresh).acting
    predicted = _predicted(weight, acting) if acting else None
    contents = _of_contents(weight)
    measured = _measured(weight, acting, contents)
    sampled = sampled_effect(weight.samples, weight.now.numel())
    beside = any(patch.state != "merged" for patch in acting)  # of which contents say nothing
    effect, source = _best(measured, predicted, None if beside else sampled)
    seen = contents or sampled or _NOTHING
    content = seen.relative_change
    within_rounding = seen.delta_norm == 0.0 or (
        content is not None and content <= rounding(weight.now.dtype)
    )
    bare = weight.content_changed is True and not any(patch.state == "merged" for patch in acting)
    return Verdict(
        _change(weight, effect, source, predicted, sampled),
        effect,
        bare and within_rounding,
        bare and not within_rounding and not weight.had_patches,
        _as_predicted(weight, acting, measured, predicted, sampled),
        content,
    )


def _of_contents(weight: WeightInQuestion) -> Effect | None:
    """Of the content that changed, where the old one is there."""
    if weight.content_changed and weight.original is not None:
        return measured_effect(weight.original, weight.now)
    return None


def _predicted(weight: WeightInQuestion, acting: Sequence[AppliedPatch]) -> Effect:
    if weight.original is not None or not any(patch.state == "merged" for patch in acting):
        return effect_of(weight.fresh, weight.now if weight.original is None else weight.original)
    if any(map(needs_weight, acting)):
        return effect_of(weight.fresh, None)
    return beside_unmerged(effect_of(weight.fresh, None), weight.now, acting)


def _measured(
    weight: WeightInQuestion, acting: Sequence[AppliedPatch], contents: Effect | None
) -> Effect | None:
    """Of the contents, where these are all of the change."""
    if weight.had_patches or any(patch.state != "merged" for patch in acting):
        return None
    if weight.content_changed is False and acting:
        return Effect(0.0, 0.0, None, False, unavailable={"weight_norm": "nothing changed"})
    return contents


def _best(
    measured: Effect | None, predicted: Effect | None, sampled: Effect | None
) -> tuple[Effect, str | None]:
    for effect, source in ((measured, "contents"), (predicted, "patches"), (sampled, "sample")):
        if effect is not None and effect.delta_norm is not None:
            return effect, source
    reason = {} if predicted is None else dict(predicted.unavailable)
    names = ("delta_norm", "relative_change", "weight_norm")
    why = reason or dict.fromkeys(names, "the old content is gone and no change explains the new one")
    return Effect(None, None, None, False, unavailable=why), None


def _change(
    weight: WeightInQuestion,
    effect: Effect,
    source: str | None,
    predicted: Effect | None,
    sampled: Effect | None,
) -> ValueChange:
    unavailable = dict(effect.unavailable)
    if weight.content_changed is None:
        unavailable["content_changed"] = NOT_LOOKED_AT
    if predicted is None:
        unavailable["predicted_delta_norm"] = "no new change acts on it"
    elif predicted.delta_norm is None:
        unavailable["predicted_delta_norm"] = predicted.unavailable.get("delta_norm", "unknown")
    if sampled is None:
        unavailable["sampled_delta_norm"] = "no sample of both contents was taken"
    if source is None:
        unavailable["measured_from"] = effect.unavailable.get("delta_norm", "unknown")
    return {
        "content_changed": weight.content_changed,
        "delta_norm": effect.delta_norm,
        "relative_change": effect.relative_change,
        "weight_norm": effect.weight_norm,
        "predicted": source == "patches",
        "measured_from": source,
        "predicted_delta_norm": None if predicted is None else predicted.delta_norm,
        "sampled_delta_norm": None if sampled is None else sampled.delta_norm,
        "unavailable": unavailable,
    }


def _as_predicted(
    weight: WeightInQuestion,
    acting: Sequence[AppliedPatch],
    measured: Effect | None,
    predicted: Effect | None,
    sampled: Effect | None,
) -> bool | None:
    """Whether the content changed by what the merged changes say, but for rounding."""
    merged = bool(acting) and all(patch.state == "merged" for patch in acting)
    if not merged or weight.had_patches or predicted is None or predicted.delta_norm is None:
        return None
    found, within = (measured, _MEASURED_WITHIN) if measured is not None else (sampled, _SAMPLED_WITHIN)
    if found is None or found.delta_norm is None:
        return None
    whole = predicted.weight_norm or found.weight_norm or 0.0
    allowed = within * min(predicted.delta_norm, found.delta_norm) + rounding(weight.now.dtype) * whole
    return abs(found.delta_norm - predicted.delta_norm) <= allowed
