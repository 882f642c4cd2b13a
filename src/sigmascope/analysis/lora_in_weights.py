"""What LoRAs leave in the weights of a run's models: what is merged stays there when its layers are taken off."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, takewhile
from math import isclose
from typing import Any, Final, NamedTuple

from sigmascope.analysis.lora_facts import (
    FACT,
    MERGED_AT,
    MERGING,
    OF_ENCODERS,
    SCALED,
    TAKE_OFF,
    TAKE_OUT,
    WEIGHTS_BEFORE,
    WEIGHTS_LEFT,
    ZEROS,
    acting_in,
    is_of_encoder,
    is_same,
    loras_in_call,
    mapping,
    names_of_sides,
    patches_in,
    range_of,
    sides_of,
)
from sigmascope.records.run import ONLY_ON, RECIPE, Run, Stage


def saw_merging(run: Run) -> bool:
    """Whether a change in the record tells how LoRAs were put into the weights."""
    changes = ((stage.facts.get(FACT), str(stage.facts.get("method"))) for stage in run.walk())
    return any(method.startswith(MERGING) and acting_in_weights(mapping(one)) for one, method in changes)


def acting_in_weights(analysis: Mapping[str, Any], *, by_kind: bool = True) -> list[bool]:
    """Of each LoRA that a change put into the weights, whether its strength, or its kind too, lets it act there."""
    loras = (mapping(lora) for side in sides_of(analysis) for lora in mapping(side.get("loras")).values())
    merged = (lora for lora in loras if "merged" in mapping(lora.get("states")))
    return [_acts_in_weights(lora, by_kind=by_kind) for lora in merged]


def _acts_in_weights(lora: Mapping[str, Any], *, by_kind: bool) -> bool:
    is_of_kind = by_kind and not mapping(lora.get("adapter_types")).keys() <= SCALED
    return any(range_of(lora.get("strengths")) or ()) or is_of_kind


def seen_merged_at_zero(run: Run, lora: str) -> bool:
    """Whether a LoRA of a call, such as "unet.style", was seen merged with strength 0: one that is set later puts nothing in."""
    component, _, adapter = lora.partition(".")
    found = [
        mapping(
            mapping(mapping(mapping(stage.facts[FACT]).get(f"{side}_lora_patches")).get("loras")).get(adapter)
        )
        for stage in run.walk()
        if FACT in stage.facts
        for name, side in names_of_sides(stage)
        if name == _side_of(component)
    ]
    merged = [*takewhile(lambda one: "merged" in mapping(one.get("states")), reversed(found))]
    return bool(merged) and not _acts_in_weights(merged[-1], by_kind=True)


def left_in_weights(run: Run, until: Stage | None = None) -> list[str]:
    """The sides in whose weights a LoRA, or a part of one, stays that is off or gone, whatever was loaded since.

    Args:
        run: The record.
        until: A stage, if what was on after it does not count.
    """
    left = [
        name
        for stage in takewhile(lambda stage: stage is not until, run.walk())
        for name, side in names_of_sides(stage)
        if _stays_in_weights(run, stage, side)
    ]
    parts = () if until is not None else _partly_taken_out(run)
    back = {*map(_side_of, are_back(run))} - {*map(_side_of, _merged_into(run) - are_back(run))}
    return [name for name in dict.fromkeys([*left, *parts]) if name not in back]


def may_be_left(run: Run) -> bool:
    """Whether LoRAs were taken off that had been merged before the watch and have strength 0, which may have been set since."""
    changes = [stage for stage in run.walk() if FACT in stage.facts]
    left = [mapping(mapping(stage.facts[FACT]).get("left_in_weights")).values() for stage in changes]
    return not saw_merging(run) and any(side and not any(side) for sides in left for side in sides)


class _Ran(NamedTuple):
    """With which weights the components ran in the last call.

    Attributes:
        back: Those with the weights which they had before any LoRA was merged into them.
        others: Those with other weights than LoRAs had been merged into: their layers are no longer on the models, or the weights
            are not those that were left when these were taken off.
        is_active: Whether a LoRA was active.
    """

    back: set[str]
    others: set[str]
    is_active: bool


def _last_ran(run: Run) -> _Ran:
    into = _merged_into(run)
    before: dict[str, object] = {}
    left: dict[str, object] = {}
    moved: set[str] = set()  # by the merge: else their fingerprint does not tell that it is in them
    exchanged: set[str] = set()  # that ran without the layers which hold what is merged
    ran = _Ran(set(), set(), is_active=True)
    holds: dict[str, bool] = {}  # of each side, whether there are such layers
    for stage in run.walk():
        for name, side in names_of_sides(stage) if FACT in stage.facts else ():
            loras = mapping(mapping(mapping(stage.facts[FACT]).get(f"{side}_lora_patches")).get("loras"))
            holds[name] = any("merged" in mapping(mapping(one).get("states")) for one in loras.values())
        if told := mapping(stage.facts.get(WEIGHTS_BEFORE)):
            before, ran = {**told, **before}, ran._replace(back=set())
        method = str(stage.facts.get("method"))
        left = {} if method.startswith(MERGING) or method in TAKE_OUT else left
        left |= mapping(stage.facts.get(WEIGHTS_LEFT))
        recipe = mapping(stage.facts.get(RECIPE))
        models, loras = mapping(recipe.get("models")), loras_in_call(stage)
        moved |= _others_than(before, models or mapping(stage.facts.get(WEIGHTS_LEFT)))
        if RECIPE not in stage.facts:
            continue
        on, is_told = {name.partition(".")[0] for name in loras}, recipe.get("loras") is not None
        exchanged = {name for name in before if is_told and holds.get(_side_of(name))} - on
        ran = ran._replace(back={name for name, content in before.items() if models.get(name) == content})
        if is_told:
            gone = {name for name in into - on if holds.get(_side_of(name))}
            is_active = any(lora.get("active") for lora in loras.values())
            ran = ran._replace(others=gone | _others_than(left, models), is_active=is_active)
    return ran._replace(back=ran.back & (moved | exchanged))


def _others_than(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    """The components of which it is known that their weights are others now."""
    return {name for name, content in before.items() if now.get(name, content) not in (None, content)}


def are_back(run: Run) -> set[str]:
    """The components that ran in the last call with the weights which they had before any LoRA was merged into them."""
    return _last_ran(run).back


def are_all_back(run: Run) -> bool:
    """Whether this is so of all components that a LoRA was merged into, none acts beside the weights, and none was taken out."""
    changes = [
        stage
        for stage in run.walk()
        if stage.facts.get("method") in TAKE_OUT or WEIGHTS_BEFORE in stage.facts
    ]
    if changes and WEIGHTS_BEFORE not in changes[-1].facts:
        return False
    last = next((loras_in_call(one) for one in reversed([*run.walk()]) if RECIPE in one.facts), {})
    beside = any(lora.get("active") != lora.get("merged", 0) for lora in last.values() if lora.get("active"))
    return bool(_merged_into(run)) and _merged_into(run) == are_back(run) and not beside


def are_other_weights(run: Run) -> bool:
    """Whether the last call ran without any active LoRA, and with other weights than those that LoRAs had been merged into."""
    ran = _last_ran(run)
    return not ran.is_active and bool(ran.others) and ran.others >= _merged_into(run)


def with_known_shares(run: Run, change: Stage, name: str, patches: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is on a side, each merged LoRA with the ‖ΔW‖ / ‖W‖ that it was merged with: one that is set later changes nothing.

    Args:
        run: The record.
        change: The stage that says what is on the side.
        name: Of the side.
        patches: What is on it.
    """
    stages = [*run.walk()]
    history = [
        mapping(mapping(mapping(stage.facts[FACT]).get(f"{side}_lora_patches")).get("loras"))
        for stage in reversed(stages[: stages.index(change) + 1])
        if FACT in stage.facts
        for own, side in names_of_sides(stage)
        if own == name
    ]
    loras = dict(mapping(patches.get("loras")))
    for lora, held in loras.items():
        before = [mapping(one.get(lora)) for one in history]
        merged = [*takewhile(lambda one: "merged" in mapping(one.get("states")), before)]
        if not merged or mapping(held).get("relative_change") is not None:
            continue
        norm = merged[-1].get("delta_norm")
        same = (
            one.get("relative_change")
            for one in takewhile(bool, before[len(merged) - 1 :])
            if _is_same_norm(one.get("delta_norm"), norm)
        )
        loras[lora] = {**held, "relative_change": next((one for one in same if one is not None), None)}
    return {**patches, "loras": loras}


def _is_same_norm(one: object, other: object) -> bool:
    return isinstance(one, float) and isinstance(other, float) and isclose(one, other, rel_tol=_SAME_NORM)


_SAME_NORM: Final = 1e-4
"""How near two norms are, as a share, of the same changes: hosts round strengths, and files differ by more."""


def may_cancel(run: Run, name: str, patches: Mapping[str, Any]) -> bool:
    """Whether LoRAs on a side may take away all that others left in its weights: their signed norms sum to 0.

    Args:
        run: The record.
        name: Of the side.
        patches: What is on it.
    """
    left, beside = _signed_norm_left(run, name), [_signed_norm(one) for one in acting_in(patches).values()]
    if not left or not beside or any(one is None for one in beside):
        return False
    return _is_same_norm(float(left), -sum((one or 0.0 for one in beside), 0.0))


def _signed_norm(lora: Mapping[str, Any], merged_at: object = None) -> float | None:
    """‖ΔW‖ with the sign of the strength; None if it is not known or of both signs.

    Args:
        lora: As a change left it.
        merged_at: The least and the largest strength with which it was merged, if that is not how it is set.
    """
    strengths, norm, first = range_of(lora.get("strengths")), lora.get("delta_norm"), range_of(merged_at)
    if strengths is None or not isinstance(norm, float) or strengths[0] * strengths[1] < 0.0:
        return None
    signed = norm if strengths[1] > 0.0 else -norm
    if first is None or all(map(is_same, first, strengths)):
        return signed
    is_one = first[0] == first[1] and strengths[0] == strengths[1] != 0.0
    return signed * first[0] / strengths[0] if is_one else None


def _signed_norm_left(run: Run, name: str) -> float | None:
    """The sum of what is left of all that was merged into a side, and is not any more; None if one is not known.

    Of a LoRA whose layers were taken off, all is left; of one that was taken out, what it was put in with and not taken out with.
    """
    left: list[float | None] = []
    merged: dict[str, tuple[float | None, float | None]] = {}  # as put in, and as set now
    for stage in run.walk():
        is_of_other = bool(stage.facts.get(ONLY_ON)) and is_of_encoder(stage) is not (name == OF_ENCODERS)
        for own, side in names_of_sides(stage) if FACT in stage.facts and not is_of_other else ():
            if own != name:
                continue
            loras = mapping(mapping(mapping(stage.facts[FACT]).get(f"{side}_lora_patches")).get("loras"))
            now = {lora: mapping(one) for lora, one in loras.items()}
            now = {lora: one for lora, one in now.items() if "merged" in mapping(one.get("states"))}
            for lora in merged.keys() - now.keys():
                put_in, taken_out = merged.pop(lora)
                if lora in loras:
                    left.append(_rest(put_in, taken_out))
                elif stage.facts.get("method") in TAKE_OFF:
                    left.append(put_in)
            at_first = _merged_at(stage, name)
            for lora, one in now.items():
                first = _signed_norm(one, at_first.get(lora))
                merged[lora] = merged.get(lora, (first, None))[0], _signed_norm(one)
        for component_and_lora, held in loras_in_call(stage).items():
            component, _, lora = component_and_lora.partition(".")
            if _side_of(component) == name and lora in merged and not held.get("merged"):
                put_in, taken_out = merged.pop(lora)
                left.append(_rest(put_in, taken_out, held.get("call_scale")))
    return None if None in left else sum((one or 0.0 for one in left), 0.0)


def _merged_at(change: Stage, side: str) -> dict[str, object]:
    """The strengths with which LoRAs were merged into a side before the watch, by their names."""
    names = {lora: lora.partition(".") for lora in mapping(change.facts.get(MERGED_AT))}
    return {
        adapter: change.facts[MERGED_AT][lora]
        for lora, (component, _, adapter) in names.items()
        if _side_of(component) == side
    }


def _rest(put_in: float | None, taken_out: float | None, scale: object = None) -> float | None:
    """What stays of what was put in, after as much was taken out, times the scale of the call that did."""
    if put_in is None or taken_out is None:
        return None
    taken_out *= scale if isinstance(scale, int | float) else 1.0
    return 0.0 if _is_same_norm(put_in, taken_out) else put_in - taken_out


def _merged_into(run: Run) -> set[str]:
    return {name for stage in run.walk() for name in mapping(stage.facts.get(WEIGHTS_BEFORE))}


def _partly_taken_out(run: Run) -> Iterator[str]:
    """The sides of which a LoRA was taken out of the weights with another strength than it was put in: a part stays there."""
    merged: dict[tuple[str, str], tuple[tuple[float, float], tuple[float, float]]] = {}  # put in, and set now
    for stage in run.walk():
        if FACT in stage.facts:
            analysis = mapping(stage.facts[FACT])
            for name, side in names_of_sides(stage):
                loras = mapping(mapping(analysis.get(f"{side}_lora_patches")).get("loras"))
                for lora, held in loras.items():
                    strength = range_of(mapping(held).get("strengths"))
                    states = mapping(mapping(held).get("states"))
                    is_zero = mapping(held).get("delta_norm") == 0.0 and states.keys() != {"inactive"}
                    if strength is not None and any(strength) and is_zero:
                        continue  # zeros leave nothing, whatever becomes of them
                    if "merged" in states and strength is not None:
                        merged[name, lora] = merged.get((name, lora), (strength, strength))[0], strength
                    elif _is_part(merged.pop((name, lora), None)):
                        yield name
                if stage.facts.get("method") in TAKE_OFF:
                    merged = {key: held for key, held in merged.items() if key[0] != name or key[1] in loras}
        for component_and_lora, held in loras_in_call(stage).items():
            component, _, lora = component_and_lora.partition(".")
            name = _side_of(component)
            if not held.get("merged") and _is_part(merged.pop((name, lora), None), held.get("call_scale")):
                yield name


def _side_of(component: str) -> str:
    return OF_ENCODERS if component.startswith("text_encoder") else "denoiser"


def _is_part(
    put_in_and_set: tuple[tuple[float, float], tuple[float, float]] | None, scale: object = None
) -> bool:
    """Whether what is taken out, with the strength that is set and a call's scale, is not what was put in."""
    if put_in_and_set is None:
        return False
    put_in, now = put_in_and_set
    scaled = [one * scale for one in now] if isinstance(scale, int | float) else now
    return not all(map(is_same, put_in, scaled))


def is_in_weights(run: Run, change: Stage) -> bool:
    """Whether LoRAs were taken off after a change, and stay in the weights: nothing changed by that."""
    stages = [*run.walk()]
    later = (stage for stage in stages[stages.index(change) + 1 :] if stage.facts.get("method") in TAKE_OFF)
    return any(_took_off_layers_alone(stage) for stage in later)


def _took_off_layers_alone(stage: Stage) -> bool:
    analysis = mapping(stage.facts.get(FACT))
    left = analysis.get("left_in_weights")  # None in a record written earlier
    was_merged = left is None or any(mapping(left).values())
    is_merging = str(stage.facts.get("method")).startswith(MERGING)
    is_bare = not any(side.get("total_patched_keys") for side in sides_of(analysis))
    return analysis.get("effective") is False and is_bare and (was_merged or is_merging)


def _stays_in_weights(run: Run, change: Stage, side: str) -> bool:
    """Whether a change that takes LoRAs off left one in the weights of a side: those that are merged stay there."""
    stages = [*run.walk()]
    left = mapping(mapping(change.facts.get(FACT)).get("left_in_weights")).get(side)
    before = stages[: stages.index(change)]
    if change.facts.get("method") not in TAKE_OFF or not left or _merged_zeros(before, side):
        return False
    merging = [stage for stage in before if str(stage.facts.get("method")).startswith(MERGING)]
    last = mapping(merging[-1].facts.get(FACT)) if merging else {}
    firsts = [one for one in _as_merged(before[: before.index(merging[-1]) + 1]) if one] if merging else []
    merged = [_acts_in_weights(one, by_kind=False) for one in firsts]
    is_of_kind = any(_acts_in_weights(one, by_kind=True) for one in firsts)
    is_of_kind = is_of_kind and (not any(merged) or _is_of_zeros(last))
    return any(
        left if is_of_kind else merged or left
    )  # where merging was seen, what was set since takes nothing out


def _as_merged(stages: Sequence[Stage]) -> Iterator[Mapping[str, Any]]:
    """Each LoRA that is merged after the last of these stages, as it was when it was merged: merging it again does nothing."""
    sides = [patches_in(stage) for stage in stages if FACT in stage.facts]
    for side, last in enumerate(sides[-1] if sides else ()):
        for lora in mapping(last.get("loras")):
            history = (mapping(mapping(one[side].get("loras")).get(lora)) for one in reversed(sides))
            merged = [*takewhile(lambda one: "merged" in mapping(one.get("states")), history)]
            yield from merged[-1:]


def _is_of_zeros(analysis: Mapping[str, Any]) -> bool:
    """Whether a change found out that the LoRAs on the models change nothing, since they hold nothing but zeros."""
    told = map(mapping, analysis.get("findings") or ())
    return analysis.get("effective") is False and any(one.get("id") in ZEROS for one in told)


def _merged_zeros(stages: Sequence[Stage], side: str) -> bool:
    """Whether all that was merged on a side, at another strength than 0, changes nothing."""
    analyses = (mapping(stage.facts.get(FACT)) for stage in stages)
    each = (mapping(mapping(one.get(f"{side}_lora_patches")).get("loras")).values() for one in analyses)
    merged = [
        lora
        for lora in map(mapping, chain.from_iterable(each))
        if "merged" in mapping(lora.get("states")) and any(range_of(lora.get("strengths")) or ())
    ]
    return bool(merged) and all(lora.get("delta_norm") == 0.0 for lora in merged)
