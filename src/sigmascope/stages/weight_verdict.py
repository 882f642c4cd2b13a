"""How one weight changed, from all that is known of it: its contents, a thousand elements, and the LoRAs on it.

What acts besides the weight is known exactly. What was merged into its content is measured from both contents where
there are two, else explained by the LoRAs of both moments, else estimated from the elements. For a weight that plain
changes were merged into, the norm that it had before follows from the merged weight and the changes
(`with_unmerged_norm`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.arrival import Arrival
from sigmascope.lora.effect import WEIGHT_NOT_FINITE, Effect, delta_of, measured_effect, weight_norm
from sigmascope.lora.linalg import as_float64, blocked_norm
from sigmascope.lora.norms_at_once import known_inner_product, known_weight_norm
from sigmascope.lora.patches import WeightedFactors, factors_of, is_product, needs_weight
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.reading import Reading, attempt
from sigmascope.replaced import replaced
from sigmascope.stages.schema import OutsideLora, ValueChange, as_dict
from sigmascope.stages.signed_patches import (
    Contents,
    Explained,
    SampledContent,
    SignedPatches,
    elements_of,
    joined,
    net_effect,
    signed_effect,
)

_MEASURED_WITHIN: Final = 0.05  # how far a measured change may be from the predicted one, as a fraction
_SAMPLED_WITHIN: Final = 1.0  # the same for one that a sample estimates
NOT_LOOKED_AT: Final = "this weight was not checked"
_OLD_VALUES_GONE: Final = "the old values are gone, and no change explains the new ones"
_UNSEEN: Final = "the weight changed, but in none of the thousand elements that the baseline keeps"
_WEIGHT_GONE: Final = "the weight before is gone, and a change depends on it"
_FORMED_IN: Final = torch.float32  # what hosts form a change in that depends on the weight
_NO_EFFECT: Final = Effect(None, None, None, False)
_UNEXPLAINED: Final = 4.0  # times the rounding of one merge: a weight may have been merged and unmerged often
_CANCELLED: Final = 1e-6  # a difference of squares below this share of them is rounding
_MOST_AT_ONCE: Final = 1024  # weights whose elements are compared together
_SHARE_OF_NO_BIT: Final = torch.finfo(torch.float32).eps ** 2
"""‖ΔW‖/‖W‖ up to which no output of a layer moves by a bit in float32: of so many outputs one lies so near to a step."""
MAY_BE_LOST: Final = "outputs of that dtype may have none of it"
"""How the reason ends why it is unknown whether a very small change acts."""
NOT_SEEN: Final = "the weights before and after could not be compared, and no change is registered"


@dataclass(frozen=True, slots=True)
class WeightVerdict:
    """How one weight changed.

    Attributes:
        change: In figures.
        effect: The same for the sums over blocks.
        is_effective: Whether the layer computes something else than before; None if that is not understood.
        is_drift: Whether the content changed by no more than rounding, and nothing is merged that would explain more.
        is_unexplained: Whether it changed by more, and nothing that is merged explains it.
        is_as_predicted: Whether the weight changed as predicted; None if unknown.
        content_relative: ‖ΔW‖/‖W‖ of the weight itself, measured or sampled; None if unknown.
        unread: Why a change on it is not understood; None if all are.
        arrival: What arrived of the changes merged into a coarsely stored weight; None for others, or if not measured.
        inside: The changes that explain what became of the content; None if it is as before, was measured, or none do.
        outside: What became of the content beside them, estimated from its elements; None if they explain it.
    """

    change: ValueChange
    effect: Effect
    is_effective: bool | None
    is_drift: bool
    is_unexplained: bool
    is_as_predicted: bool | None
    content_relative: float | None
    unread: str | None = None
    arrival: Arrival | None = None
    inside: tuple[AppliedPatch, ...] | None = None
    outside: OutsideLora | None = None

    @property
    def why_unknown(self) -> str | None:
        """Why it is not known whether the layer computes something else; None if it is."""
        return (
            None if self.is_effective is not None else self.change["unavailable"].get("delta_norm", NOT_SEEN)
        )


@dataclass(frozen=True, slots=True, eq=False)
class WeightEvidence:
    """One weight and what is known of it. It holds the host's tensors.

    Attributes:
        now: Its content.
        original: Its content before, if the host still keeps it separately.
        beside: The changes that act besides its content.
        inside: Those that the host says are in its content.
        content_changed: By fingerprint or elements; None if not known.
        samples: A thousand elements before and now.
        known: All changes of both moments, each content once.
        contents: See `contents_of`.
    """

    now: Tensor
    original: Tensor | None
    beside: SignedPatches
    inside: SignedPatches
    content_changed: bool | None
    samples: tuple[Tensor, Tensor] | None
    known: tuple[AppliedPatch, ...]
    contents: Contents

    @property
    def has_own_changes(self) -> bool:
        """Whether a change that is known of is for this weight."""
        sides = self.beside, self.inside
        return bool(self.known) or any(side.now or side.before or side.unread for side in sides)

    @property
    def sampled_content(self) -> SampledContent | None:
        """What is to be explained by the LoRAs; None where the content is as before or was not sampled as it is now."""
        expected, samples = self.inside.net, self.samples
        is_other = self.content_changed or (self.content_changed is None and not self.inside.is_nothing)
        if not is_other or expected is None or samples is None or samples[0].shape != samples[1].shape:
            return None
        return SampledContent(samples, expected, self.known, tuple(self.now.shape), rounding(self.now.dtype))

    @property
    def is_first(self) -> bool:
        """Whether all that changed is that something was merged where there was nothing before."""
        return bool(self.inside.now) and not self.inside.before and self.beside.is_nothing


@dataclass(frozen=True, slots=True)
class _Found:
    """The effect that is reported, with its source and the changes that explain the content; None if none do."""

    effect: Effect
    source: str | None
    explained: bool
    within_rounding: bool = False
    inside: tuple[AppliedPatch, ...] | None = None


def judge_weight(
    weight: WeightEvidence, explained: Reading[Explained] | None, sampled: Effect | None
) -> WeightVerdict:
    """Measure or predict the change of one weight.

    Args:
        weight: What is known of it.
        explained: What `explain_contents` says of its `sampled_content`; None where that is None.
        sampled: What `sampled_effects` says of its samples; None where there are none.
    """
    contents = None
    if weight.content_changed and weight.original is not None:
        contents = measured_effect(weight.original, weight.now)
    is_unseen = contents is None and _is_unseen(weight, sampled)
    seen = contents or sampled or _NO_EFFECT
    content_relative = seen.relative_change
    content_is_rounding = seen.delta_norm == 0.0 or _is_rounding(content_relative, weight.now.dtype)
    by_books = _by_books(weight, is_other=bool(weight.content_changed) and not content_is_rounding)
    if is_unseen:
        unknown = dict.fromkeys(("delta_norm", "relative_change", "weight_norm"), _UNSEEN)
        found = _Found(Effect(None, None, None, False, unavailable=unknown), None, True)
    elif weight.content_changed or (weight.content_changed is None and not weight.inside.is_nothing):
        found = _with_content(weight, explained, by_books, contents, sampled)
    elif weight.is_first and weight.content_changed is False:
        nothing = Effect(0.0, 0.0, None, False, unavailable={"weight_norm": "nothing changed"})
        found = _Found(nothing, "contents", True)
    elif by_books is not None and weight.inside.is_nothing:
        found = _found(by_books, "patches")
    else:
        found = _found(signed_effect(weight.beside, weight.now), "patches")
    is_effective = None if is_unseen else _is_effective(weight, found, content_is_rounding)
    bare = weight.content_changed is True and not weight.inside.now
    outside = None if found.explained and bare else _outside(weight, found)
    return WeightVerdict(
        _value_change(weight, found.effect, found.source, by_books, sampled),
        found.effect,
        is_effective,
        bare and content_is_rounding and is_effective is False,
        not content_is_rounding and not found.explained if bare else outside is not None,
        _as_predicted(weight, contents, by_books, sampled),
        content_relative,
        weight.beside.unread
        or weight.inside.unread
        or weight.beside.same_by_name
        or weight.inside.same_by_name,
        inside=found.inside,
        outside=outside,
    )


def _outside(weight: WeightEvidence, found: _Found) -> OutsideLora | None:
    """What became of the elements of the content beside what the host says was merged into it."""
    samples, expected, shape = weight.samples, weight.inside.net, tuple(weight.now.shape)
    is_explained = found.inside is not None or found.within_rounding or weight.original is not None
    if is_explained or not weight.content_changed or samples is None or expected is None:
        return None
    merged = attempt(lambda: sum((elements_of(patch, shape) for patch in expected), as_float64(samples[0])))
    after = as_float64(samples[1])
    if merged.value is None or merged.value.shape != after.shape:
        return None
    whole, share = torch.linalg.vector_norm(merged.value), sqrt(weight.now.numel() / len(after))
    rest = torch.linalg.vector_norm(after - merged.value)
    allowed = _UNEXPLAINED * rounding(weight.now.dtype) * whole
    if not rest > allowed:
        return None
    factor = (after @ merged.value) / whole**2
    is_factor = torch.linalg.vector_norm(after - factor * merged.value) <= allowed
    return {"norm": float(rest) * share, "factor": float(factor) if is_factor else None}


def _is_unseen(weight: WeightEvidence, sampled: Effect | None) -> bool:
    """Whether the content is another, but the same in the elements: one row of a table of words, for one."""
    if not weight.content_changed or not weight.inside.is_nothing or weight.samples is None:
        return False
    before, now = weight.samples
    is_part = now.numel() < weight.now.numel() and before.dtype == now.dtype
    return is_part and sampled is not None and sampled.delta_norm == 0.0


def is_sum(patch: AppliedPatch) -> bool:
    """Whether a change is up · down added to the unscaled weight."""
    return is_product(patch) and patch.strength_model == 1.0


def _found(effect: Effect, source: str) -> _Found:
    return _Found(effect, source if effect.delta_norm is not None else None, True)


def _is_rounding(relative: float | None, dtype: torch.dtype) -> bool:
    return relative is not None and relative <= rounding(dtype)


def _share_of_weight(effect: Effect, now: Tensor) -> float | None:
    """‖ΔW‖/‖W‖; where ‖W‖ without the changes is unknown, of the weight as it is now."""
    if effect.relative_change is not None or effect.delta_norm is None:
        return effect.relative_change
    whole = attempt(lambda: weight_norm(now)).value
    return effect.delta_norm / whole if whole else None


def _is_effective(weight: WeightEvidence, found: _Found, content_is_rounding: bool) -> bool | None:
    is_measured = weight.content_changed is True and found.source in ("contents", "sample")
    if weight.beside.unread or (weight.inside.unread and not is_measured):
        return None
    if is_measured and weight.inside.unread:
        return not content_is_rounding
    if found.effect.delta_norm is None:
        depends = weight.beside.net is None or weight.inside.net is None
        return None if depends and weight.content_changed and found.source is None else True
    nothing_inside = not weight.inside.now or weight.inside.is_nothing
    formed = weight.beside.net is None and found.source == "patches"
    if formed and _is_rounding(found.effect.relative_change, _FORMED_IN):
        return False
    if found.within_rounding or (found.source != "patches" and nothing_inside and content_is_rounding):
        return False
    return found.effect.delta_norm > 0.0 and not is_below_any_bit(
        found.effect.relative_change, weight.now.dtype
    )


def is_below_any_bit(relative: float | None, dtype: torch.dtype) -> bool:
    """Whether a change of this share of a weight moves nothing that the layer computes, though it is not zero."""
    return relative is not None and relative <= _SHARE_OF_NO_BIT and dtype != torch.float64


def _by_books(weight: WeightEvidence, *, is_other: bool) -> Effect | None:
    """What the host says was changed, beside the weight and in it; None if nothing.

    Args:
        weight: What is known of it.
        is_other: Whether its content is another by more than rounding.
    """
    beside, inside = weight.beside, weight.inside
    if inside.is_nothing and beside.net is None and is_other:
        return signed_effect(replaced(beside, unread=beside.unread or _WEIGHT_GONE), None)
    if inside.is_nothing:
        return None if beside.is_nothing else signed_effect(beside, weight.now)
    if beside.net is not None and inside.net is not None:
        of_content = net_effect(inside.net, None)
        both = of_content
        if not beside.is_nothing:
            both = net_effect(joined(inside.net, beside.net, contents=weight.contents), None)
        return _with_weight_norm(weight, both, of_content, inside.net)
    if inside.before or not beside.is_nothing or inside.unread:
        return signed_effect(replaced(inside, unread=inside.unread or beside.unread or _WEIGHT_GONE), None)
    return signed_effect(inside, weight.original)


def _with_weight_norm(
    weight: WeightEvidence, effect: Effect, of_content: Effect, inside: Sequence[AppliedPatch]
) -> Effect:
    """The effect with ‖W‖ of the content before, given the effect of what is inside of it."""
    if weight.original is not None:
        return with_norm(effect, attempt(lambda: weight_norm(weight.original)).value)
    return with_norm(effect, with_unmerged_norm(of_content, weight.now, inside).weight_norm)


def with_norm(
    effect: Effect, norm: float | None, unknown: str = "the weight without the changes is gone"
) -> Effect:
    """An effect with the norm of the unchanged weight, or why it is not known."""
    if norm is not None and not isfinite(norm):
        return with_norm(effect, None, WEIGHT_NOT_FINITE)
    if not norm or effect.delta_norm is None:
        reason = "the weight is all zeros" if norm is not None else unknown
        why = dict.fromkeys(("weight_norm", "relative_change"), reason)
        if norm == 0.0:
            del why["weight_norm"]
        return replaced(
            effect, relative_change=None, weight_norm=norm, unavailable={**effect.unavailable, **why}
        )
    known = {name: why for name, why in effect.unavailable.items() if name == "delta_norm"}
    return replaced(effect, relative_change=effect.delta_norm / norm, weight_norm=norm, unavailable=known)


def _with_content(
    weight: WeightEvidence,
    explained: Reading[Explained] | None,
    by_books: Effect | None,
    contents: Effect | None,
    sampled: Effect | None,
) -> _Found:
    """The effect of a weight whose content is another."""
    beside, inside = weight.beside, weight.inside
    if contents is not None and contents.delta_norm is not None and beside.is_nothing:
        return _Found(contents, "contents", bool(inside.now))
    inner = _in_content(weight, explained)
    if inner is not None and beside.net is not None:
        is_guess = inner is not inside.net
        if is_guess or by_books is None or inside.is_nothing:
            both = net_effect(joined(inner, beside.net, contents=weight.contents), None)
            effect = _with_weight_norm(weight, both, net_effect(inner, None), inner)
        else:  # the same, calculated already
            effect = by_books
        is_small = is_guess and _is_rounding(_share_of_weight(effect, weight.now), weight.now.dtype)
        return replaced(_found(effect, "patches"), within_rounding=is_small, inside=inner)
    together = _sampled_together(weight) if beside.net is not None else None
    if together is not None and together.delta_norm is not None:
        return _Found(together, "sample", bool(inside.now))
    if by_books is not None and by_books.delta_norm is not None and beside.is_nothing:
        return _found(by_books, "patches")
    if by_books is not None:
        return _Found(replaced(by_books, predicted=False), None, bool(inside.now))
    why = dict.fromkeys(("delta_norm", "relative_change", "weight_norm"), _OLD_VALUES_GONE)
    return _Found(Effect(None, None, None, False, unavailable=why), None, False)


def _in_content(weight: WeightEvidence, found: Reading[Explained] | None) -> tuple[AppliedPatch, ...] | None:
    """What was merged into the content: as the host says, or as its elements say; None if neither explains them."""
    expected = weight.inside.net
    if expected is None:
        return None
    if found is None:
        return expected if weight.inside.now or weight.inside.before else None
    if found.value == () and not weight.known:
        return None  # nothing is known that could be in it
    return found.value if found.reason is None else expected or None


def _sampled_together(weight: WeightEvidence) -> Effect | None:
    """Of the elements of the content, with what acts beside it."""
    if weight.samples is None or weight.samples[0].shape != weight.samples[1].shape:
        return None
    net, shape = weight.beside.net or (), tuple(weight.now.shape)
    before, after = map(as_float64, weight.samples)
    added = attempt(lambda: sum((elements_of(patch, shape) for patch in net), torch.zeros_like(after)))
    return None if added.value is None else sampled_effect((before, after + added.value), weight.now.numel())


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
        spread=0.0
        if effect.delta_norm is not None and source != "sample"
        else _spread(weight, why.get("delta_norm")),
    )


def _spread(weight: WeightEvidence, no_norm: str | None) -> Reading[float]:
    """The standard error of the norm that the elements of a weight estimate, as a share of it: half of that of its square.

    Args:
        weight: What is known of it.
        no_norm: Why there is no norm, if there is none.
    """
    if no_norm is not None or weight.samples is None:
        return Reading(None, no_norm or NOT_LOOKED_AT)
    before, after = (as_float64(side).flatten() for side in weight.samples)
    if len(after) >= weight.now.numel():
        return Reading(0.0)
    squares = (after - before).square()
    if len(squares) < 2:
        return Reading(None, "one element alone was looked at")
    if not squares.any():
        return Reading(None, "none of the elements that were looked at changed")
    return Reading(float(squares.std() / squares.mean()) / sqrt(len(squares)) / 2)


def _as_predicted(
    weight: WeightEvidence, contents: Effect | None, predicted: Effect | None, sampled: Effect | None
) -> bool | None:
    """Whether the content changed by what the merged changes say, but for rounding."""
    if not weight.is_first or predicted is None or predicted.delta_norm is None:
        return None
    if weight.content_changed is False:
        contents = Effect(0.0, 0.0, None, False)
    seen, within = (contents, _MEASURED_WITHIN) if contents is not None else (sampled, _SAMPLED_WITHIN)
    if seen is None or seen.delta_norm is None:
        return None
    whole = predicted.weight_norm or seen.weight_norm or 0.0
    allowed = within * min(predicted.delta_norm, seen.delta_norm) + rounding(weight.now.dtype) * whole
    return abs(seen.delta_norm - predicted.delta_norm) <= allowed


def with_unmerged_norm(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> Effect:
    """The effect with the norm of the unchanged weight, if it can be calculated.

    ‖W‖² = ‖M‖² − 2·<M, Δ> + ‖Δ‖² for the merged weight M = W + Δ, with <M, up·down> = Σ (upᵀM) ∘ down. Other kinds
    are formed.
    """
    norm = attempt(lambda: _norm_before(effect, merged, acting)).value
    if norm is None or effect.delta_norm is None:
        reason = "the weight without the changes is gone"
        unavailable = {**effect.unavailable, "weight_norm": reason, "relative_change": reason}
        return replaced(effect, relative_change=None, weight_norm=None, unavailable=unavailable)
    return replaced(effect, relative_change=effect.delta_norm / norm, weight_norm=norm)


def _norm_before(effect: Effect, merged: Tensor, acting: Sequence[AppliedPatch]) -> float | None:
    are_added = not any(map(needs_weight, acting))
    if effect.delta_norm is None or not are_added:
        return None
    with torch.no_grad():
        shape = tuple(merged.shape)
        known = known_weight_norm(merged)
        whole = blocked_norm(merged) if known is None else known
        inner = 0.0
        for patch in acting:
            product = known_inner_product(merged, patch)
            if product is None and is_sum(patch):
                product = _inner_product(merged, factors_of(patch, shape))
            elif product is None:
                product = float(
                    (as_float64(merged.detach()) * delta_of([patch], None).to(merged.device)).sum()
                )
            inner += product
    squared = whole**2 - 2.0 * inner + effect.delta_norm**2
    return sqrt(squared) if squared > _CANCELLED * (whole**2 + effect.delta_norm**2) else None


def _inner_product(merged: Tensor, factors: WeightedFactors) -> float:
    """<M, w·up·down>; the products in float32, which is eight digits of each."""
    matrix = merged.detach().flatten(1).to(torch.float32)
    up, down = (factor.to(matrix.device, torch.float32) for factor in (factors.up, factors.down))
    return factors.weight * float(as_float64((up.T @ matrix) * down).sum())


def sampled_effect(samples: tuple[Tensor, Tensor] | None, elements: int) -> Effect | None:
    """‖ΔW‖ and ‖W‖ estimated from the same elements before and now; None without them, or with NaN."""
    return None if samples is None else sampled_effects({"": (samples, elements)})[""]


def sampled_effects(samples: Mapping[str, tuple[tuple[Tensor, Tensor], int]]) -> dict[str, Effect | None]:
    """The same of many weights, by name: the elements before and now, and how many the weight has."""
    found: dict[str, Effect | None] = dict.fromkeys(samples)
    alike: dict[object, list[str]] = {}
    for name, ((before, after), _) in samples.items():
        if before.shape == after.shape and before.numel():
            form = before.shape, before.dtype, before.device, after.dtype, after.device
            alike.setdefault(form, []).append(name)
    several = (
        names[start : start + _MOST_AT_ONCE]
        for names in alike.values()
        for start in range(0, len(names), _MOST_AT_ONCE)
    )
    for names in several:
        before, after = (
            as_float64(torch.stack([samples[name][0][side].flatten() for name in names])).cpu()
            for side in (0, 1)
        )
        norms = (torch.linalg.vector_norm(values, dim=1).tolist() for values in (after - before, before))
        for name, *both in zip(names, *norms, strict=True):
            share = sqrt(samples[name][1] / before.shape[1])
            delta, whole = (norm * share for norm in both)
            if isfinite(delta) and isfinite(whole):
                found[name] = Effect(delta, delta / whole if whole > 0 else None, whole, False)
    return found


def rounding(dtype: torch.dtype) -> float:
    """‖ΔW‖/‖W‖ up to which adding a change and taking it away again explains a difference.

    Two roundings to the nearest are off by 0.3 ε of the larger of W and W + Δ, in the mean over a weight.
    """
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps if eps > 1e-6 else 4 * eps
