"""Which LoRAs of a run act, where, and how strongly, in a sentence (`acting_lora`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sigmascope import units
from sigmascope.analysis.lora_facts import (
    AFTER_STEP,
    FACT,
    LAZY,
    MERGING,
    NOISY,
    OF_ENCODERS,
    TAKE_OFF,
    WEAK,
    acting_in,
    active_beside,
    estimate_in,
    gives_back,
    is_same,
    loras_in_call,
    made_nan,
    mapping,
    names_of_sides,
    on_other_side,
    patches_in,
    range_of,
    sides_of,
)
from sigmascope.analysis.lora_idle import (
    fused_before,
    idle_in_call,
    idle_lora,
    in_sentences,
    is_change,
    is_idle,
    spoilt,
    spoilt_for_good,
    taken_off_after,
    verdicts_of_prompt,
)
from sigmascope.analysis.lora_in_weights import (
    is_in_weights,
    left_in_weights,
    saw_merging,
    seen_merged_at_zero,
    with_known_shares,
)
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.records.run import IDLE_LORAS, ONLY_ON, RECIPE, Run, Stage

_MAKES: Final = frozenset({"add_adapter", "inject_adapter"})
"""Methods that make an adapter anew."""
ACTS: Final = "acts"


class LoraStanding(NamedTuple):
    """What a run says of its LoRAs: in two words, in sentences, and whether that is well; None of an open question."""

    words: str
    says: str
    is_well: bool | None


def _is_open_what_is_in_weights(run: Run) -> bool:
    """Whether nobody knows what is in the weights: it was fused before the watch, and nothing inside it."""
    return fused_before(run) is not None and not saw_merging(run)


def spoiling_lora(run: Run) -> str | None:
    """Where the LoRAs hold NaN or Inf, or have no values, if these act as the last change left them, or in the last call."""
    spoils = spoiling(run)
    return str(spoils["message"]) if spoils else None


def spoiling(run: Run) -> Mapping[str, Any]:
    """The finding by which all that the LoRAs touch becomes NaN or chance; empty if there is none."""
    last = last_change(run)
    told = {} if last is None else spoilt(mapping(last.facts.get(FACT)).get("findings"))
    calls = [stage.facts.get(IDLE_LORAS) for stage in run.walk() if RECIPE in stage.facts]
    return told or (spoilt(calls[-1]) if calls else {}) or spoilt_for_good(run)


def acting_lora(run: Run) -> str | None:
    """How strongly the LoRAs act, if they do as the last change left them, do not spoil all that they make, and something of them arrives.

    Of a prompt of which some LoRAs act, all are named, these first.
    """
    found = None if spoiling(run) or idle_lora(run) is not None else acting_standing(run)
    return None if found is None else found.says


def acting_standing(run: Run) -> LoraStanding | None:
    """What becomes of LoRAs that act, or that a change took off before the last call."""
    found = _acting_standing(run)
    if found is None or found.is_well is None or not _spoilt_last_call(run):
        return found
    return found._replace(
        says=f"{found.says} The last call made NaN or Inf, which may come from it.", is_well=None
    )


def _spoilt_last_call(run: Run) -> bool:
    """Whether the last call made NaN, and no LoRA was changed after it."""
    stages = [stage for stage in run.walk() if RECIPE in stage.facts or FACT in stage.facts]
    return bool(stages) and RECIPE in stages[-1].facts and made_nan(stages[-1])


def _acting_standing(run: Run) -> LoraStanding | None:
    stage = last_change(run)
    arrives = {} if stage is None else {told["id"]: str(told["message"]) for told in _on_arriving(run, stage)}
    of_prompt = verdicts_of_prompt(run)
    if any(one.get("effective") is True for one in of_prompt):
        return _as_arrived(
            in_sentences(sorted(of_prompt, key=lambda one: one.get("effective") is not True)), arrives
        )
    may_be_in_weights = not _is_open_what_is_in_weights(run)
    if stage is None:
        left = left_in_weights(run) if may_be_in_weights else []
        says = _in_weights(left) if left else _on_before(run)
        return _taken_off_idle(run) if says is None else _as_arrived(says, arrives)
    last = mapping(stage.facts.get(FACT))
    sides = [
        (name, changes, mapping(last.get(f"{side}_lora_patches")))
        for name, side in names_of_sides(stage)
        if (changes := mapping(last.get(f"{side}_weight_changes")))
    ]
    method = str(stage.facts.get("method"))
    changed = any(changes.get("predicted") or patches.get("loras") for _, changes, patches in sides)
    changed |= method in TAKE_OFF and not method.startswith(MERGING)  # widened layers get their shape back
    is_on = any(acting_in(patches) for _, _, patches in sides) and not _is_off_since(run, stage)
    others = on_other_side(run, stage)
    left = left_in_weights(run) if may_be_in_weights else []
    if left and changed and (not is_on or _is_idle_since(run, stage)):
        return _as_arrived(_in_weights(left), arrives)
    if not is_on and changed:
        if not others:
            says = _in_last_call(run, stage)
            off = _taken_off(run, stage) or _taken_off_idle(run) or _acted_until(run)
            return off if says is None else _as_arrived(says, ())
        if not _acts_beside(run, stage):
            return None  # what takes the others off is not heard of each model: a call tells
        sides = []
    away = [
        name
        for name, _, patches in sides
        if name not in left and _is_on_none_since(run, stage, name, patches)
    ]
    sides = [side for side in sides if side[0] not in away]
    sides = sorted([*sides, *others], key=lambda side: side[0] == OF_ENCODERS)
    is_new = method.startswith("load_") or method in _MAKES
    sizes = [
        f"{size} in {_called(run, name, stage)}"
        for name, changes, patches in sides
        if (
            size := _size(
                changes,
                with_known_shares(run, stage, name, patches),
                is_new=is_new and (name, changes, patches) not in others,
            )
        )
    ]
    in_weights = is_on and is_in_weights(run, stage)
    since = _changed_since(run, *as_set_last(run, stage)) if is_on and not in_weights else None
    if since is not None:
        before = f" ‖ΔW‖ / ‖W‖ was {' and '.join(sizes)} before." if sizes else ""
        says = since + before if since else _in_last_call(run)
        return None if says is None else _as_arrived(says, arrives if since else ())
    if WEAK in arrives:
        return _as_arrived(arrives[WEAK], arrives)
    confirmed = sum(
        check.get("result") == "confirmed" for _, changes, _ in sides for check in _checks(changes)
    )
    acting = {
        name for _, _, patches in sides for name, lora in acting_in(patches).items() if not gives_back(lora)
    }
    words = "The LoRAs act" if len(acting) > 1 else "The LoRA acts"
    words += f": ‖ΔW‖ / ‖W‖ is {' and '.join(sizes)}." if sizes else "."
    merged = "They are" if len(acting) > 1 else "It is"
    words += f" {merged} merged into the weights." if in_weights else ""
    words += _left_beside(run, stage, in_weights=in_weights)
    words += _scaled_in_call(run, stage, [patches for _, _, patches in sides]) if sizes else ""
    now = [*as_set_last(run, stage)[1], *(patches for _, _, patches in others)]
    words += "".join(dict.fromkeys(said for patches in now for said in _beside_acting(patches)))
    words += "".join(f" It is not on the {name} that ran." for name in away)
    words += _not_run_since(run, stage)
    if NOISY in arrives:
        return _as_arrived(f"{words} {arrives[NOISY]}", arrives)
    words += f" {units.counted(confirmed, 'weight')} in use confirmed it." if confirmed else ""
    return _as_arrived(words, arrives)


def _as_arrived(says: str, arrives: Collection[str]) -> LoraStanding:
    """What is said of LoRAs that act, with the findings on what of them arrived in coarse weights."""
    words = "arrives weak" if WEAK in arrives else "arrives noisy" if NOISY in arrives else ACTS
    return LoraStanding(words, says, is_well=words == ACTS)


def _called(run: Run, name: str, change: Stage) -> str:
    """What a side is called whose figures a change left: one of several text encoders by its name, if they are its alone."""
    stages = [*run.walk()]
    changed = [
        stage.facts.get(ONLY_ON) for stage in stages[: stages.index(change) + 1] if FACT in stage.facts
    ]
    encoders = [only_on for only_on in changed if only_on is None or str(only_on).startswith("text_encoder")]
    is_alone = bool(encoders) and encoders[-1] is not None and len({*encoders} - {None}) > 1
    return str(encoders[-1]) if name == OF_ENCODERS and is_alone else f"the {name}"


def _in_weights(names: Sequence[str]) -> str:
    return f"The LoRA acts in the {' and the '.join(names)}: it is merged into the weights."


def _on_before(run: Run) -> str | None:
    """That LoRAs act in the last call which were on the models when the watch began, if they do."""
    if idle_lora(run) is not None:
        return None
    changes = [stage for stage in run.walk() if FACT in stage.facts]
    if not any(is_change(mapping(stage.facts[FACT])) for stage in changes):
        acts = _in_last_call(run)
        return acts and f"{acts} ‖ΔW‖ / ‖W‖ is known only of what is loaded inside the watch."
    is_open = mapping(changes[-1].facts[FACT]).get("effective") is None
    return None if is_open else _in_last_call(run, changes[-1])


def _acts_beside(run: Run, change: Stage) -> bool:
    """Whether a LoRA acts on another component than a change was about, in the last call since."""
    stages = [*run.walk()]
    calls = [stage for stage in stages[stages.index(change) + 1 :] if RECIPE in stage.facts]
    return bool(calls) and bool(active_beside(change.facts.get(ONLY_ON), calls[-1]))


def _is_off_since(run: Run, change: Stage) -> bool:
    """Whether all that a change left was off in the last call since that had it, as PEFT unmerges what is disabled."""
    stages = [*run.walk()]
    only_on = change.facts.get(ONLY_ON)
    calls = (
        [lora for name, lora in loras_in_call(call).items() if only_on in (None, name.partition(".")[0])]
        for call in reversed(stages[stages.index(change) + 1 :])
    )
    own = next(filter(None, calls), [])
    return bool(own) and not any(lora.get("active") for lora in own)


def _is_on_none_since(run: Run, change: Stage, side: str, patches: Mapping[str, Any]) -> bool:
    """Whether what a change put beside one side's weights was on none of its models in the calls since, but on the other's:
    models that were put in afterwards ran. Of calls in which no encoder ran it is not known what the embeddings hold.
    """
    acting = acting_in(patches)
    if any(mapping(lora.get("states")).keys() - {LAZY} for lora in acting.values()):
        return False
    calls = _calls_since(run, change, acting.keys())
    on = {
        _is_encoder(call, lora.partition(".")[0])
        for call in calls
        for lora in loras_in_call(call)
        if lora.partition(".")[2] in acting
    }
    ran = all(any(_is_encoder(call, stage.facts.get("component")) for stage in call.walk()) for call in calls)
    return ran and on == {side != OF_ENCODERS}


def _is_encoder(call: Stage, component: object) -> bool:
    components = mapping(mapping(call.facts.get("pipeline")).get("components"))
    return mapping(components.get(str(component))).get("role") == "text_encoder"


def _is_idle_since(run: Run, change: Stage) -> bool:
    """Whether the last call since a change has no LoRA that acts beside the weights, for one as its scale is 0."""
    stages = [*run.walk()]
    calls = [stage for stage in stages[stages.index(change) + 1 :] if RECIPE in stage.facts]
    return bool(calls) and bool(idle_in_call(calls[-1]))


def _in_last_call(run: Run, change: Stage | None = None) -> str | None:
    """That LoRAs act in the last call, if they do; of several, that one does.

    Args:
        run: The record.
        change: The last change, if it left none on what it changed: asked are other components, in a call since.
    """
    stages = [*run.walk()]
    calls = [stage for stage in stages if RECIPE in stage.facts]
    only_on = None if change is None else change.facts.get(ONLY_ON)
    if not calls or (change is not None and stages.index(change) > stages.index(calls[-1])):
        return None
    last = calls[-1]
    loras = active_beside(only_on, last)
    if _is_open_what_is_in_weights(run):
        loras = {name: lora for name, lora in loras.items() if lora["active"] != lora.get("merged", 0)}
    loras = {
        name: lora
        for name, lora in loras.items()
        if lora["active"] != lora.get("merged", 0) or not seen_merged_at_zero(run, name)
    }
    # The look at them is there, and found none that does nothing; it may have failed, or not be over.
    if not loras or last.error is not None or IDLE_LORAS not in last.facts or idle_in_call(last):
        return None
    if made_nan(last):
        return None  # their factors may hold NaN, which the look does not search for
    by_adapter: dict[str, list[str]] = {}
    for name, lora in loras.items():
        component, _, adapter = name.partition(".")
        on = f"{units.counted(int(lora['active']), 'layer')} of {component}{_strength_in_call(lora)}"
        by_adapter.setdefault(adapter, []).append(on)
    names = [f"{adapter} on {' and '.join(parts)}" for adapter, parts in sorted(by_adapter.items())]
    acts = "The LoRA acts" if len(names) == 1 else "At least one of the LoRAs acts"
    where = "in the call" if len(calls) == 1 else "in the last call"
    listed = units.first_few(names, between="; ")
    return f"{acts} {where}: {listed}."


def _strength_in_call(lora: Mapping[str, Any]) -> str:
    strengths = sorted({float(one) for one in lora.get("strength") or ()})
    words = " to ".join(f"{one:g}" for one in strengths)
    scale = lora.get("call_scale")
    scaled = f", which the call scales by {scale:g}" if isinstance(scale, int | float) and scale != 1 else ""
    if lora.get("merged"):  # PEFT does not keep with which strength
        return f", merged{f' (its strength is set to {words} now)' if words else ''}{scaled}"
    return f"{f' at strength {words}' if words else ''}{scaled}"


ON_ARRIVING: Final = frozenset({WEAK, NOISY})


def _on_arriving(run: Run, change: Stage) -> list[Mapping[str, Any]]:
    """The findings on what arrived in the weights, as the last change left the LoRAs that are on the models."""
    stages = [*run.walk()]
    for stage in reversed(stages[stages.index(change) :]):
        analysis = mapping(stage.facts.get(FACT))
        sides = sides_of(analysis)
        if any(side.get("total_patched_keys") for side in sides):
            told = map(mapping, analysis.get("findings") or ())
            return [finding for finding in told if finding.get("id") in ON_ARRIVING]
    return []


def _scaled_in_call(run: Run, change: Stage, sides: list[Mapping[str, Any]]) -> str:
    """By how much the last call since a change scaled the LoRAs that act beside the weights, as a sentence; "" if by nothing."""
    names = {
        name
        for patches in sides
        for name, lora in acting_in(patches).items()
        if LAZY in mapping(lora.get("states"))
    }
    calls = _calls_since(run, change, names)
    loras = loras_in_call(calls[-1]) if calls else {}
    scales = {
        name.partition(".")[0]: scale
        for name, lora in loras.items()
        if name.partition(".")[2] in names and isinstance(scale := lora.get("call_scale"), int | float)
    }
    if not scales or all(scale == 1.0 for scale in scales.values()):
        return ""
    parts = " and ".join(f"by {scale:.4g} in the {name}" for name, scale in scales.items())
    return f" The last call scaled this {parts}."


def as_set_last(run: Run, change: Stage) -> tuple[Stage, list[Mapping[str, Any]]]:
    """The last stage that set LoRAs, from a change on, with the changes on each model: later ones may leave all as it was."""
    stages = [*run.walk()]
    found = change, patches_in(change)
    for stage in stages[stages.index(change) + 1 :]:
        later = patches_in(stage)
        if any(map(acting_in, later)) and not stage.facts.get(AFTER_STEP):
            found = stage, later
    return found


def _changed_since(run: Run, change: Stage, sides: list[Mapping[str, Any]]) -> str | None:
    """What other code made of the LoRAs that act beside the weights, by the last call; "" if it took them off, None if nothing.

    Args:
        run: The record.
        change: The stage of the last change that was heard.
        sides: The changes that it left on each model.
    """
    acting = [pair for patches in sides for pair in acting_in(patches).items()]
    calls = _calls_since(run, change, {name for name, _ in acting})
    if not calls or not all(mapping(lora.get("states")).keys() <= {"lazy"} for _, lora in acting):
        return None
    last: dict[str, list[Mapping[str, Any]]] = {}
    for name, lora in loras_in_call(calls[-1]).items():
        last.setdefault(name.partition(".")[2], []).append(lora)
    if not any(lora.get("active") for name, _ in acting for lora in last.get(name, ())):
        return ""
    for name, lora in acting:
        set_to = range_of(lora.get("strengths"))
        found = [known for one in last.get(name, ()) if (known := range_of(one.get("strength")))]
        found += [(min(least for least, _ in found), max(most for _, most in found))] if found else []
        if set_to and found and not any(all(map(is_same, set_to, one)) for one in found):
            words = f"at strength {_in_words(found[-1])} in the last call, not at {_in_words(set_to)}"
            return f"The LoRA acts {words}: other code set it."
    first, now = (loras_in_call(call) for call in (calls[0], calls[-1]))
    for name in first.keys() & now.keys():
        both = first[name].get("content"), now[name].get("content")
        if name.partition(".")[2] in dict(acting) and None not in both and both[0] != both[1]:
            return (
                "The LoRA acts with other factors in the last call than in the first: other code wrote them."
            )
    return None


def _calls_since(run: Run, change: Stage, names: Collection[str]) -> list[Stage]:
    """The calls after a change of LoRAs of which it is known what was on; of other pipelines than had these, none."""
    stages = [*run.walk()]
    calls = [stage for stage in stages[stages.index(change) + 1 :] if _are_loras_told(stage)]
    kinds = {
        _kind(call) for call in calls if any(name.partition(".")[2] in names for name in loras_in_call(call))
    }
    return [call for call in calls if not kinds or _kind(call) in kinds]


def _kind(call: Stage) -> object:
    return mapping(call.facts.get("pipeline")).get("class_name")


def _are_loras_told(stage: Stage) -> bool:
    return isinstance(mapping(stage.facts.get(RECIPE)).get("loras"), Mapping)


def _in_words(strengths: tuple[float, float]) -> str:
    least, most = (f"{strength:.4g}" for strength in strengths)
    return least if least == most else f"{least} to {most}"


def last_change(run: Run) -> Stage | None:
    """The stage of the last change of LoRAs, if what it left computes something else than before."""
    found = ((stage, stage.facts.get(FACT)) for stage in run.walk())
    changes = [
        (stage, analysis)
        for stage, analysis in found
        if isinstance(analysis, Mapping) and (is_change(analysis) or is_idle(analysis))
    ]
    if not changes or changes[-1][1].get("effective") is not True or idle_lora(run) is not None:
        return None
    return changes[-1][0]


def _beside_acting(patches: Mapping[str, Any]) -> Iterator[str]:
    """Of a model on which some LoRAs act, what the others do, as sentences."""
    acting = acting_in(patches)
    is_merged = all(mapping(lora.get("states")).keys() == {"merged"} for lora in acting.values())
    off = "off, at strength 0, or left out beside what is merged" if is_merged else "off or at strength 0"
    for name, lora in mapping(patches.get("loras")).items() if acting else ():
        if name in acting:
            if len(acting) > 1 and gives_back(acting[name]):
                yield f" LoRA {name} began with a part of the weights (init_lora_weights): how much it changes is unknown."
            continue
        states = mapping(lora).get("states")
        if mapping(states).keys() == {"inactive"}:
            yield f" LoRA {name} is {off}."
        elif mapping(lora).get("delta_norm") == 0.0:
            yield f" LoRA {name} changes nothing: all its changes are zero."


def _calls_after(run: Run, change: Stage) -> tuple[list[Stage], bool]:
    """The calls that began after a change, and whether there was one before it."""
    stages = [*run.walk()]
    place = stages.index(change)
    calls = [stage for stage in stages[place + 1 :] if stage.name == GENERATION]
    return calls, any(stage.name == GENERATION for stage in stages[:place])


def _not_run_since(run: Run, change: Stage) -> str:
    """That the last change came after all calls, as a sentence; "" if not, or if there are none."""
    calls, is_later = _calls_after(run, change)
    return (
        " No call has run since this change."
        if is_later and not calls and not _has_steps_left(run, change)
        else ""
    )


def _has_steps_left(run: Run, change: Stage) -> bool:
    """Whether a call that LoRAs were changed in took a step after that."""
    over = change.facts.get(AFTER_STEP)
    around = (
        call for call in run.walk() if call.name == GENERATION and any(one is change for one in call.walk())
    )
    steps = sum(len(stage.steps) for call in around for stage in call.walk())
    return isinstance(over, int) and over < steps


def _taken_off(run: Run, change: Stage) -> LoraStanding | None:
    """That calls ran after the last change took LoRAs off, if any did."""
    calls, _ = _calls_after(run, change)
    method = change.facts.get("method")
    if not calls or method not in TAKE_OFF or fused_before(run) is not None:
        return None
    says = f"No LoRA acts: {method} took off what was on, before the last call."
    return LoraStanding("taken off", says, is_well=None)


def _taken_off_idle(run: Run) -> LoraStanding | None:
    """The same where what was taken off did nothing, as LoRAs that were fused with strength 0."""
    changes = [stage for stage in run.walk() if FACT in stage.facts]
    if len(changes) < 2 or mapping(changes[-1].facts[FACT]).get("effective") is not False:
        return None
    before, last = changes[-2:]
    return _taken_off(run, last) if _have_loras(before) and not _have_loras(last) else None


def _have_loras(change: Stage) -> bool:
    """Whether a change left LoRAs on the models that it changed."""
    analysis = mapping(change.facts[FACT])
    return any(mapping(analysis.get(f"{side}_lora_patches")).get("loras") for side in ("unet", "clip"))


def _acted_until(run: Run) -> LoraStanding | None:
    """How LoRAs acted in the last call, if all that was on was taken off or switched off after it."""
    cut = taken_off_after(run)
    told = None if cut is None else acting_standing(cut.before)
    if cut is None or told is None or told.is_well is None:
        return None
    return told._replace(says=told.says + cut.says)


def _left_beside(run: Run, stage: Stage, *, in_weights: bool) -> str:
    """That what was fused before stays in the weights, beside LoRAs that act, as a sentence; "" if nothing does.

    Args:
        run: The record.
        stage: The change by which these act.
        in_weights: Whether they are in the weights too.
    """
    left = left_in_weights(run, until=stage if in_weights else None)
    last, patches = as_set_last(run, stage)
    bare = {
        name for (name, _), side in zip(names_of_sides(last), patches, strict=True) if not acting_in(side)
    }
    within, beside = ([name for name in left if (name in bare) is is_bare] for is_bare in (True, False))
    words = f" What acts in the {' and the '.join(within)} is merged into the weights." if within else ""
    where = " and the ".join(beside)
    return (
        f"{words} What was fused before stays in the weights of the {where}, and acts too."
        if beside
        else words
    )


def _size(changes: Mapping[str, Any], patches: Mapping[str, Any], *, is_new: bool) -> str | None:
    """‖ΔW‖ of what is on a model now beside ‖W‖, in words: of each LoRA, or of what is in the weights.

    Factors do not tell how strong a DoRA is. One that was just loaded or made (`is_new`) and is alone made all of the change.
    """
    acting = acting_in(patches)
    if not acting:  # what changed was put into the weights, unless it is a LoRA's that was beside them
        return None if changes.get("predicted") else _estimated(changes)
    shares = {name: _percent(lora.get("relative_change")) for name, lora in acting.items()}
    if len(shares) == 1:
        is_whole = {"delta_norm", "relative_change"}.isdisjoint(mapping(changes.get("unavailable")))
        made = _estimated(changes) if is_whole else None
        is_alone = is_new and len(mapping(patches.get("loras"))) == 1
        return next(iter(shares.values())) or (made if is_alone else None)
    return ", ".join(f"{share} ({name})" for name, share in shares.items() if share) or None


def _estimated(changes: Mapping[str, Any]) -> str | None:
    """‖ΔW‖ / ‖W‖ of a model, with its spread where it is estimated."""
    share, estimate = _percent(changes.get("relative_change")), estimate_in(changes)
    return share if share is None or estimate is None else f"about {share} (estimated {estimate})"


def _percent(share: object) -> str | None:
    return units.rough_percent(share) if isinstance(share, float) and 0.0 < share < float("inf") else None


def _checks(changes: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    checks = changes.get("checked")
    yield from (
        check
        for check in (checks.values() if isinstance(checks, Mapping) else ())
        if isinstance(check, Mapping)
    )
