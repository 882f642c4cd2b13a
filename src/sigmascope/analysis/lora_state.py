"""Whether the LoRAs of a run acted at its end, in a sentence."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sigmascope import units
from sigmascope.analysis.lora_facts import (
    FACT,
    IDLE,
    LAZY,
    MERGED_BEFORE,
    MERGING,
    OF_ENCODERS,
    OF_SETTING,
    TAKE_OFF,
    ZEROS,
    acting_in,
    estimate_in,
    is_same,
    loras_in_call,
    mapping,
    names_of_sides,
    patches_in,
    range_of,
    sides_of,
)
from sigmascope.analysis.lora_in_weights import (
    acting_in_weights,
    are_all_back,
    are_other_weights,
    is_in_weights,
    left_in_weights,
    may_be_left,
    may_cancel,
    saw_merging,
    with_known_shares,
)
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.records.run import IDLE_LORAS, ONLY_ON, RECIPE, Run, Stage

_VERDICTS: Final = "lora_verdicts"
"""The fact of a node of ComfyUI that has a verdict for each of its LoRAs."""
_AFTER_STEP: Final = "after_step"
"""The fact of a change between the steps of a call: how many were over."""
_REASONS: Final = frozenset({"lora_unreadable", "lora_matches_nothing"})
"""Findings on a file that say why a loader refuses it; so does one with a `cause` in its evidence."""
_SPOILS: Final = frozenset({"lora_not_finite", "lora_without_values", "weights_not_finite"})
"""The findings on changes and weights of which everything that they touch becomes NaN."""
MERGED_AT_ZERO: Final = "lora_merged_at_zero"
"""What is open for who sees a call alone: a change that was watched tells what was merged."""
_FUSED_BEFORE: Final = "lora_fused_before"
"""A remark of a call: most who fuse a LoRA before the watch do so on purpose."""
NOT_SEEN: Final = "lora_not_seen"
"""What is open for who sees a change alone: that a LoRA stays in the weights tells that one acts."""
_CHANGED_IN_CALL: Final = "lora_changed_in_call"
OPEN_VERDICTS: Final = frozenset(
    {
        "lora_encoder_not_run",
        "lora_in_embeddings",
        _FUSED_BEFORE,
        "lora_in_base",
        "lora_magnitudes_unknown",
        "lora_of_base",
        "lora_may_be_lost",
        MERGED_AT_ZERO,
        NOT_SEEN,
        "lora_on_late_layers",
    }
)
"""Findings that nobody knows whether a LoRA acts."""
_BESIDE: Final = frozenset({"lora_off_in_base", "lora_beside_merged"})
"""Findings on the model beside the LoRAs that act: no reason why one does not."""
AS_BEFORE: Final = "lora_as_before"
"""The finding that something acts as it did before: then others say nothing of LoRAs that do nothing."""


_MAKES: Final = frozenset({"add_adapter", "inject_adapter"})
"""Methods that make an adapter anew."""
ACTS: Final = "acts"
_IDLE: Final = "does nothing"
UNTRAINED, IS_ZERO = "lora_untrained", "lora_is_zero"
"""The finding on an adapter that was made anew, and on one that may have been loaded so."""


class LoraStanding(NamedTuple):
    """What a run says of its LoRAs: in two words, in sentences, and whether that is well; None of an open question."""

    words: str
    says: str
    is_well: bool | None


def standing(run: Run) -> LoraStanding | None:
    """What becomes of the LoRAs of a run; None if it says nothing of any."""
    idle, spoils = idle_lora(run), _spoiling(run)
    if idle is not None:
        is_open = not _of_prompt(run) and _idle_finding(run).get("id") in OPEN_VERDICTS
        return LoraStanding("unknown", idle, None) if is_open else LoraStanding(_IDLE, idle, False)
    if spoils:
        is_empty = spoils.get("id") == "lora_without_values"
        return LoraStanding(
            "without values" if is_empty else "NaN or Inf", str(spoils["message"]), is_well=False
        )
    unknown = _open_change(run) or _fused_before(run) or (_MAY_BE_LEFT if may_be_left(run) else None)
    acts = _acting_standing(run)
    if acts is not None and acts.words != "taken off" and are_other_weights(run):
        unknown, acts = unknown or _OTHER_WEIGHTS, None
    if acts is not None and _may_cancel(run):
        unknown, acts = unknown or _MAY_CANCEL, None
    unknown = unknown or (_not_told(run) if acts is None else None)
    return acts or (None if unknown is None else LoraStanding("unknown", unknown, None))


def _not_told(run: Run) -> str | None:
    """Why nothing is known of LoRAs that were on the models of the last call; None if none was."""
    last = next((stage for stage in reversed([*run.walk()]) if RECIPE in stage.facts), None)
    if last is None or not loras_in_call(last):
        return None
    changed = next((one for one in idle_in_call(last) if one.get("id") == _CHANGED_IN_CALL), None)
    if changed is not None:
        return f"{_IS_OPEN}. {changed['message']}"
    if last.error is not None:
        why = "the last call failed"
    elif _made_nan(last):
        why = "the last call made NaN or Inf, which may come from it"
    elif IDLE_LORAS in last.facts:
        why = "no call has run since the last change"
    else:
        why = "what it did in the last call was not measured"
    return f"{_IS_OPEN}: {why}."


def _made_nan(call: Stage) -> bool:
    return any(
        facts.nan_count or facts.inf_count for stage in call.walk() for facts in stage.tensors.values()
    )


_IS_OPEN: Final = "Whether the LoRA acts is unknown"
_OTHER_WEIGHTS: Final = f"{_IS_OPEN}: the last call ran with other weights than those that it was merged into, and nobody knows what they hold."
_MAY_BE_LEFT: Final = (
    f"{_IS_OPEN}: it was merged before the watch and taken off with strength 0, "
    "which leaves it in the weights if that was set after merging."
)


_MAY_CANCEL: Final = f"{_IS_OPEN}: it may take away all that was fused before and stays in the weights, since both have the same ‖ΔW‖ and opposite signs."


def _may_cancel(run: Run) -> bool:
    """Whether all that acts as the last change left it may cancel what stays in the weights."""
    change = _last_change(run)
    if change is None:
        return False
    last, patches = _as_set_last(run, change)
    sides = [
        (name, side) for (name, _), side in zip(names_of_sides(last), patches, strict=True) if acting_in(side)
    ]
    left = left_in_weights(run) if sides else []
    return (
        bool(left)
        and {name for name, _ in sides} >= {*left}
        and all(may_cancel(run, *side) for side in sides)
    )


def _open_change(run: Run) -> str | None:
    """That nobody knows whether LoRAs act as the last change left them."""
    found = [mapping(stage.facts[FACT]) for stage in run.walk() if FACT in stage.facts]
    changes = [analysis for analysis in found if _is_change(analysis)]
    if not changes or changes[-1].get("effective") is not None:
        return None
    told = map(mapping, changes[-1].get("findings") or ())
    return next((str(one["message"]) for one in told if one.get("id") in OPEN_VERDICTS), None)


def _fused_before(run: Run) -> str | None:
    """That nobody knows whether a LoRA acts which was fused before the watch."""
    listed = (one.get("message") for stage in run.walk() if (one := _lists_fused(stage)))
    said = (stage.facts.get(MERGED_BEFORE) for stage in run.walk())
    return next((str(one) for one in (*listed, *said) if one is not None), None)


def _is_open_what_is_in_weights(run: Run) -> bool:
    """Whether nobody knows what is in the weights: it was fused before the watch, and nothing inside it."""
    return _fused_before(run) is not None and not saw_merging(run)


def _lists_fused(call: Stage) -> Mapping[str, Any] | None:
    return next((one for one in idle_in_call(call) if one.get("id") == _FUSED_BEFORE), None)


def idle_lora(run: Run) -> str | None:
    """Why the LoRAs do nothing, if that is how the last change or the last call left them, or none of a prompt's acts."""
    of_prompt = _of_prompt(run)
    if of_prompt:
        return _said(of_prompt) if all(one.get("effective") is False for one in of_prompt) else None
    idle = _idle_finding(run)
    if idle:
        return str(idle["message"])
    if _fused_before(run) is not None:
        return None
    if (lost := _lost_in_merging(run)) is not None:
        return lost[1]
    if (elsewhere := next((seen.message for seen in lora_elsewhere(run)), None)) is not None:
        return elsewhere
    cut = _taken_off_after(run)
    told = None if cut is None else standing(cut.before)
    return None if cut is None or told is None or told.words != _IDLE else told.says + cut.says


def acted_before(run: Run) -> str:
    """In how many of the calls of a run that ended with idle LoRAs one acted, as a sentence; "" if in none."""
    stages = [*run.walk()] if run.folded is None else []
    calls = [stage for stage in stages if RECIPE in stage.facts]
    lost = _lost_in_merging(run)
    ends = [place for place, stage in enumerate(stages) if lost is not None and stage is lost[0]]
    acted, is_open = 0, False  # as the last change before a call left it
    for stage in stages[: ends[0] if ends else None]:
        if FACT in stage.facts:
            is_open = mapping(stage.facts[FACT]).get("effective", False) is None
        is_told = RECIPE in stage.facts and IDLE_LORAS in stage.facts and not is_open
        has_active = is_told and any(lora.get("active") for lora in loras_in_call(stage).values())
        acted += has_active and not idle_in_call(stage)
    every = "the call" if len(calls) == 1 else f"all {len(calls)} calls"
    where = every if acted == len(calls) else f"{acted} of the {len(calls)} calls"
    return f" In {where} a LoRA acted." if acted else ""


_NEXT_TO_NOTHING: Final = 0.01


def _lost_in_merging(run: Run) -> tuple[Stage, str] | None:
    """That next to nothing arrived of LoRAs that are in the weights alone, if that is so, and the stage that merged them."""
    for stage in reversed([*run.walk()]):
        analysis = mapping(stage.facts.get(FACT))
        sides = sides_of(analysis)
        if not any(side.get("total_patched_keys") for side in sides):
            continue
        states = {
            state
            for side in sides
            for one in acting_in(side).values()
            for state in mapping(one.get("states"))
        }
        for told in map(mapping, analysis.get("findings") or ()):
            share = mapping(told.get("evidence")).get("share")
            is_lost = told.get("id") == _WEAK and isinstance(share, float) and abs(share) < _NEXT_TO_NOTHING
            if is_lost and states <= {"merged", *IDLE}:
                return stage, str(told["message"])
        return None
    return None


def _idle_finding(run: Run) -> Mapping[str, Any]:
    """The finding by which LoRAs do nothing as the last change or call left them; empty if there is none."""
    idle: Mapping[str, Any] = {}
    new: Mapping[str, Any] = {}  # that the last change made an adapter anew
    is_over = False  # once a call's LoRAs act
    only_on: object = None  # once those on other components do
    merged: list[bool] = []
    if left_in_weights(run) or may_be_left(run) or _spoilt_for_good(run):
        return idle  # whatever the others do
    for stage in run.walk():
        analysis = stage.facts.get(FACT)
        if stage.facts.get(_AFTER_STEP):
            continue  # of the steps before it says nothing
        if MERGED_BEFORE in stage.facts and not _stands_whatever_was_merged(stage):
            why = _cause(idle_in_call(stage))
            idle, is_over = (why if why.get("id") in OPEN_VERDICTS else {}), True
        elif isinstance(analysis, Mapping):
            found = analysis.get("findings")
            told = map(mapping, found if isinstance(found, list | tuple) else ())
            new = next((finding for finding in told if finding.get("id") == UNTRAINED), {})
            if _is_idle(analysis) and _on_other_side(run, stage):
                idle = {}
            elif _is_idle(analysis):
                idle = _cause(analysis.get("findings"))
                totals = {side.get("total_patched_keys") for side in sides_of(analysis)}
                is_over = totals - {None} == {0} or idle.get("id") in OF_SETTING
                only_on = stage.facts.get(ONLY_ON)
            elif _is_change(analysis):
                idle = {}
            if str(stage.facts.get("method")).startswith(MERGING):
                merged = acting_in_weights(analysis, by_kind=False)
        elif merged and _cause(idle_in_call(stage)).get("id") == MERGED_AT_ZERO:
            if not any(merged):
                idle, is_over = _at_zero(_cause(idle_in_call(stage))), True
        elif _lists_fused(stage):
            idle, is_over = {}, True  # another one, whose layers are gone, may act
        elif idle_in_call(stage):
            idle, is_over = _cause(idle_in_call(stage)), True
            idle = new if new and idle.get("id") == IS_ZERO else idle
        elif (is_over and _active_beside(None, stage)) or (only_on and _active_beside(only_on, stage)):
            idle = {}
    return idle


def _stands_whatever_was_merged(stage: Stage) -> bool:
    """Whether a call says of LoRAs by their names that they hold nothing but zeros."""
    told = idle_in_call(stage)
    return bool(told) and all(one.get("id") in ZEROS for one in told)


def merged_at_zero(run: Run) -> Mapping[str, Any]:
    """The finding that LoRAs do nothing which the watch saw merged with strength 0; empty if that is not how they ended."""
    idle = _idle_finding(run)
    return (
        idle if _IF_MERGED_AT_ZERO in mapping(idle.get("evidence")) and idle["id"] != MERGED_AT_ZERO else {}
    )


def _at_zero(finding: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is left of the open question once it was seen that the LoRA was merged with strength 0: the watch wrote it down."""
    says = mapping(finding.get("evidence")).get(_IF_MERGED_AT_ZERO)
    return {**finding, "id": "lora_strength_zero", "message": says} if says else finding


_IF_MERGED_AT_ZERO: Final = "if_merged_at_0"


@rule("model.lora_elsewhere", "warning", about="the model", looks_at="run")
def lora_elsewhere(run: Run) -> Iterator[Seen]:
    """A LoRA is on another model than those that ran in the calls since, or in weights that did not run in the last."""
    calls = _calls_beside_it(run)
    if run.folded is None and are_all_back(run):
        yield Seen(
            message="The LoRA changes nothing in the last call: the weights that ran are the same as before it was merged.",
            evidence={"calls": 1},
            advice="Fuse it into the model that you call, once all components are in place and their weights are loaded.",
        )
        return
    if calls:
        since = "the call" if calls == 1 else f"the {calls} calls"
        yield Seen(
            message=f"The LoRA changes nothing in {since} since it was put on: it is not on the models that ran.",
            evidence={"calls": calls},
            advice="Load it into the pipeline that you call, once all components are in place.",
        )


@rule("model.lora_replaced", "warning", about="the model", looks_at="run")
def lora_replaced(run: Run) -> Iterator[Seen]:
    """A LoRA that acted was switched off by loading another, and is still off in a call."""
    acting: set[str] = set()
    off: list[str] = []
    by: list[str] = []
    for stage in run.walk() if run.folded is None else ():
        analysis = stage.facts.get(FACT)
        if isinstance(analysis, Mapping):
            sides = patches_in(stage)
            now = {name for side in sides for name in acting_in(side)}
            there = {name for side in sides for name in mapping(side.get("loras"))}
            loads = str(stage.facts.get("method")).startswith("load_")
            gone = sorted((acting & there) - now) if loads else []
            off, by = (gone, sorted(now - acting)) if loads and gone and now else ([], [])
            acting = now
        elif stage.name == GENERATION and off and _is_off(stage, off):
            names, others = " and ".join(off), " and ".join(by) or "another"
            yield Seen(
                message=f"Loading the LoRA {others} switched {names} off, which changes nothing in the call since.",
                evidence={"switched_off": len(off)},
                advice="Make all active that are to act: pipe.set_adapters([...]) with the names of both.",
            )
            return


def _is_off(call: Stage, names: Collection[str]) -> bool:
    """Whether none of these LoRAs acts in a call that has one of them."""
    own = [lora for name, lora in loras_in_call(call).items() if name.partition(".")[2] in names]
    return bool(own) and not any(lora.get("active") for lora in own)


def _calls_beside_it(run: Run) -> int:
    """How many calls ran since a LoRA was put on beside the weights, if none of them had any LoRA on its models."""
    calls, is_on = 0, False
    for stage in run.walk() if run.folded is None else ():
        analysis = stage.facts.get(FACT)
        if isinstance(analysis, Mapping):
            if _is_change(analysis):
                calls, is_on = 0, analysis.get("effective") is True
            is_on = is_on and _is_beside_weights(analysis)  # fusing changes nothing, and takes it there
            calls = calls if is_on else 0
        elif stage.name == GENERATION:
            is_without = mapping(stage.facts.get(RECIPE)).get("loras") == {} and not idle_in_call(stage)
            calls, is_on = (calls + is_on, is_on) if is_without else (0, False)
    return calls


def _is_beside_weights(analysis: Mapping[str, Any]) -> bool:
    """Whether LoRAs act that are layers of their own, and none that is in the weights."""
    states = {
        state
        for side in sides_of(analysis)
        for lora in acting_in(side).values()
        for state in mapping(lora.get("states"))
    }
    return LAZY in states and states <= {LAZY, *IDLE}


def _of_prompt(run: Run) -> list[Mapping[str, Any]]:
    """What is said of each LoRA that a node of ComfyUI put on, now or where its output was kept."""
    told = [
        *(stage.facts.get(_VERDICTS) for stage in run.walk()),
        mapping(run.facts.get("comfyui")).get("loras_kept"),
    ]
    return [mapping(one) for each in told if isinstance(each, list | tuple) for one in each]


def _said(verdicts: list[Mapping[str, Any]]) -> str:
    """What verdicts of one kind say, each as a sentence."""
    return " ".join(f"LoRA {str(one.get('says')).rstrip('.')}." for one in verdicts)


def _is_idle(analysis: Mapping[str, Any]) -> bool:
    findings = analysis.get("findings")
    if analysis.get("effective") is not False or _spoilt(findings):
        return False
    is_as_before = any(mapping(finding).get("id") == AS_BEFORE for finding in findings or ())
    return not is_as_before and _cause(findings).get("id") not in (None, MERGED_AT_ZERO)


def _is_change(analysis: Mapping[str, Any]) -> bool:
    """Whether it may have changed what acts: nothing changes where the same is set again."""
    return analysis.get("effective") is not False


def _cause(findings: object) -> Mapping[str, Any]:
    """The first finding that is more than a remark; empty if there is none."""
    told = map(mapping, findings if isinstance(findings, list) else ())
    why = (finding for finding in told if finding.get("id") not in _BESIDE)
    return next((finding for finding in why if finding and finding.get("severity") != "info"), {})


def idle_in_call(stage: Stage) -> list[Mapping[str, Any]]:
    """Why the LoRAs of a call do nothing in it, or why that is not known."""
    told = stage.facts.get(IDLE_LORAS)
    findings = [mapping(finding) for finding in told] if isinstance(told, list | tuple) else []
    return [finding for finding in findings if finding.get("id") not in _BESIDE | _SPOILS]


def lacks_values(stage: Stage) -> bool:
    """Whether a call ran with LoRAs of which some tensors have no values: what it computed is chance."""
    return bool(_spoilt(stage.facts.get(IDLE_LORAS)))


def refused_lora(failed: Stage) -> str | None:
    """What the file of a LoRA whose loading failed shows of the reason: the error that was raised is about the host's tensors."""
    analysis = mapping(failed.facts.get(FACT)) if failed.name == FACT else {}
    for finding in analysis.get("findings") or ():
        told = mapping(finding)
        is_reason = told.get("id") in _REASONS or "cause" in mapping(told.get("evidence"))
        if is_reason and told.get("severity") in ("critical", "error"):
            return str(told["message"])
    return None


def spoiling_lora(run: Run) -> str | None:
    """Where the LoRAs hold NaN or Inf, or have no values, if these act as the last change left them, or in the last call."""
    spoils = _spoiling(run)
    return str(spoils["message"]) if spoils else None


def _spoiling(run: Run) -> Mapping[str, Any]:
    last = _last_change(run)
    told = {} if last is None else _spoilt(mapping(last.facts.get(FACT)).get("findings"))
    calls = [stage.facts.get(IDLE_LORAS) for stage in run.walk() if RECIPE in stage.facts]
    return told or (_spoilt(calls[-1]) if calls else {}) or _spoilt_for_good(run)


def _spoilt_for_good(run: Run) -> Mapping[str, Any]:
    """The finding that NaN or Inf was merged into weights: taking it out again leaves NaN."""
    merging = (stage for stage in run.walk() if str(stage.facts.get("method")).startswith(MERGING))
    merged = (one for stage in merging if acting_in_weights(one := mapping(stage.facts.get(FACT))))
    told = (_spoilt(one.get("findings")) for one in merged)
    return next((one for one in told if one.get("id") == "lora_not_finite"), {})


def _spoilt(findings: object) -> Mapping[str, Any]:
    """The first finding by which all that LoRAs touch becomes NaN or chance, if these act; empty if there is none."""
    told = map(mapping, findings if isinstance(findings, list | tuple) else ())
    return next(
        (one for one in told if one.get("id") in _SPOILS and mapping(one.get("evidence")).get("acting")), {}
    )


def acting_lora(run: Run) -> str | None:
    """How strongly the LoRAs act, if they do as the last change left them and do not spoil all that they make.

    Of a prompt of which some LoRAs act, all are named, these first.
    """
    found = None if _spoiling(run) else _acting_standing(run)
    return None if found is None else found.says


def _acting_standing(run: Run) -> LoraStanding | None:
    """What becomes of LoRAs that act, or that a change took off before the last call."""
    stage = _last_change(run)
    arrives = {} if stage is None else {told["id"]: str(told["message"]) for told in _on_arriving(run, stage)}
    of_prompt = _of_prompt(run)
    if any(one.get("effective") is True for one in of_prompt):
        return _as_arrived(
            _said(sorted(of_prompt, key=lambda one: one.get("effective") is not True)), arrives
        )
    may_be_in_weights = not _is_open_what_is_in_weights(run)
    if stage is None:
        left = left_in_weights(run) if may_be_in_weights else []
        says = _in_weights(left) if left else _on_before(run)
        return None if says is None else _as_arrived(says, arrives)
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
    others = _on_other_side(run, stage)
    left = left_in_weights(run) if may_be_in_weights else []
    if left and changed and (not is_on or _is_idle_since(run, stage)):
        return _as_arrived(_in_weights(left), arrives)
    if not is_on and changed:
        if not others:
            says = _in_last_call(run, stage)
            off = _taken_off(run, stage) or _acted_until(run)
            return off if says is None else _as_arrived(says, ())
        if not _acts_beside(run, stage):
            return None  # what takes the others off is not heard of each model: a call tells
        sides = []
    sides = sorted([*sides, *others], key=lambda side: side[0] == OF_ENCODERS)
    is_new = method.startswith("load_") or method in _MAKES
    sizes = [
        f"{size} in the {name}"
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
    since = _changed_since(run, *_as_set_last(run, stage)) if is_on and not in_weights else None
    if since is not None:
        before = f" ‖ΔW‖ / ‖W‖ was {' and '.join(sizes)} before." if sizes else ""
        says = since + before if since else _in_last_call(run)
        return None if says is None else _as_arrived(says, arrives if since else ())
    if _WEAK in arrives:
        return _as_arrived(arrives[_WEAK], arrives)
    confirmed = sum(
        check.get("result") == "confirmed" for _, changes, _ in sides for check in _checks(changes)
    )
    acting = {name for _, _, patches in sides for name in acting_in(patches)}
    words = "The LoRAs act" if len(acting) > 1 else "The LoRA acts"
    words += f": ‖ΔW‖ / ‖W‖ is {' and '.join(sizes)}." if sizes else "."
    merged = "They are" if len(acting) > 1 else "It is"
    words += f" {merged} merged into the weights." if in_weights else ""
    words += _left_beside(run, stage if in_weights else None)
    words += _scaled_in_call(run, stage, [patches for _, _, patches in sides]) if sizes else ""
    now = [*_as_set_last(run, stage)[1], *(patches for _, _, patches in others)]
    words += "".join(dict.fromkeys(said for patches in now for said in _beside_acting(patches)))
    words += _not_run_since(run, stage)
    if _NOISY in arrives:
        return _as_arrived(f"{words} {arrives[_NOISY]}", arrives)
    words += f" {units.counted(confirmed, 'weight')} in use confirmed it." if confirmed else ""
    return _as_arrived(words, arrives)


def _as_arrived(says: str, arrives: Collection[str]) -> LoraStanding:
    """What is said of LoRAs that act, with the findings on what of them arrived in coarse weights."""
    words = "arrives weak" if _WEAK in arrives else "arrives noisy" if _NOISY in arrives else ACTS
    return LoraStanding(words, says, is_well=words == ACTS)


def _on_other_side(run: Run, change: Stage) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Of a change of one model: what acts on the other side of the pipeline, as the change before it left that."""
    if change.facts.get(ONLY_ON) is None:
        return []
    stages = [*run.walk()]
    other = "unet" if _is_of_encoder(change) else "clip"
    for stage in reversed(stages[: stages.index(change)]):
        if FACT not in stage.facts:
            continue
        if stage.facts.get(ONLY_ON) is None or _is_of_encoder(stage) is (other == "clip"):
            analysis = mapping(stage.facts[FACT])
            patches = mapping(analysis.get(f"{other}_lora_patches"))
            name = next(name for name, side in names_of_sides(stage) if side == other)
            changes = mapping(analysis.get(f"{other}_weight_changes"))
            return [(name, changes, patches)] if acting_in(patches) else []
    return []


def _is_of_encoder(change: Stage) -> bool:
    return str(change.facts.get(ONLY_ON)).startswith("text_encoder")


def _in_weights(names: Sequence[str]) -> str:
    return f"The LoRA acts in the {' and the '.join(names)}: it is merged into the weights."


def _on_before(run: Run) -> str | None:
    """That LoRAs act in the last call which were on the models when the watch began, if they do."""
    if idle_lora(run) is not None:
        return None
    changes = [stage for stage in run.walk() if FACT in stage.facts]
    if not any(_is_change(mapping(stage.facts[FACT])) for stage in changes):
        acts = _in_last_call(run)
        return acts and f"{acts} ‖ΔW‖ / ‖W‖ is known only of what is loaded inside the watch."
    is_open = mapping(changes[-1].facts[FACT]).get("effective") is None
    return None if is_open else _in_last_call(run, changes[-1])


def _active_beside(only_on: object, call: Stage) -> dict[str, Mapping[str, Any]]:
    """The LoRAs of a call that are active, but for those on one component."""
    loras = {name: lora for name, lora in loras_in_call(call).items() if lora.get("active")}
    return {name: lora for name, lora in loras.items() if name.partition(".")[0] != only_on}


def _acts_beside(run: Run, change: Stage) -> bool:
    """Whether a LoRA acts on another component than a change was about, in the last call since."""
    stages = [*run.walk()]
    calls = [stage for stage in stages[stages.index(change) + 1 :] if RECIPE in stage.facts]
    return bool(calls) and bool(_active_beside(change.facts.get(ONLY_ON), calls[-1]))


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
    loras = _active_beside(only_on, last)
    if _is_open_what_is_in_weights(run):
        loras = {name: lora for name, lora in loras.items() if lora["active"] != lora.get("merged", 0)}
    # The look at them is there, and found none that does nothing; it may have failed, or not be over.
    if not loras or last.error is not None or IDLE_LORAS not in last.facts or idle_in_call(last):
        return None
    if _made_nan(last):
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


_WEAK, _NOISY = "lora_arrives_weak", "lora_arrives_noisy"
ON_ARRIVING: Final = frozenset({_WEAK, _NOISY})


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


def _as_set_last(run: Run, change: Stage) -> tuple[Stage, list[Mapping[str, Any]]]:
    """The last stage that set LoRAs, from a change on, with the changes on each model: later ones may leave all as it was."""
    stages = [*run.walk()]
    found = change, patches_in(change)
    for stage in stages[stages.index(change) + 1 :]:
        later = patches_in(stage)
        if any(map(acting_in, later)) and not stage.facts.get(_AFTER_STEP):
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


def _last_change(run: Run) -> Stage | None:
    """The stage of the last change of LoRAs, if what it left computes something else than before."""
    found = ((stage, stage.facts.get(FACT)) for stage in run.walk())
    changes = [
        (stage, analysis)
        for stage, analysis in found
        if isinstance(analysis, Mapping) and (_is_change(analysis) or _is_idle(analysis))
    ]
    if not changes or changes[-1][1].get("effective") is not True or idle_lora(run) is not None:
        return None
    return changes[-1][0]


def _beside_acting(patches: Mapping[str, Any]) -> Iterator[str]:
    """Of a model on which some LoRAs act, what the others do, as sentences."""
    acting = acting_in(patches)
    for name, lora in mapping(patches.get("loras")).items() if acting else ():
        if name in acting:
            continue
        states = mapping(lora).get("states")
        if mapping(states).keys() == {"inactive"}:
            yield f" LoRA {name} is off or has strength 0."
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
    over = change.facts.get(_AFTER_STEP)
    around = (
        call for call in run.walk() if call.name == GENERATION and any(one is change for one in call.walk())
    )
    steps = sum(len(stage.steps) for call in around for stage in call.walk())
    return isinstance(over, int) and over < steps


def _taken_off(run: Run, change: Stage) -> LoraStanding | None:
    """That calls ran after the last change took LoRAs off, if any did."""
    calls, _ = _calls_after(run, change)
    method = change.facts.get("method")
    if not calls or method not in TAKE_OFF or _fused_before(run) is not None:
        return None
    says = f"No LoRA acts: {method} took off what was on, before the last call."
    return LoraStanding("taken off", says, is_well=None)


def _acted_until(run: Run) -> LoraStanding | None:
    """How LoRAs acted in the last call, if all that was on was taken off or switched off after it."""
    cut = _taken_off_after(run)
    told = None if cut is None else _acting_standing(cut.before)
    if cut is None or told is None or told.is_well is None:
        return None
    return told._replace(says=told.says + cut.says)


class _Cut(NamedTuple):
    """A run up to its last call, and in a sentence what took off or switched off after it all that was on."""

    before: Run
    says: str


def _taken_off_after(run: Run) -> _Cut | None:
    """Where a run is cut if a change after its last call left nothing that acts beside the weights; None if not so."""
    calls = [
        (place, part)
        for place, stage in enumerate(run.stages)
        for part in stage.walk()
        if RECIPE in part.facts
    ]
    if not calls:
        return None
    place, last = calls[-1]
    later = (part for stage in run.stages[place + 1 :] for part in stage.walk())
    changes = [part for part in later if FACT in part.facts and _is_change(mapping(part.facts[FACT]))]
    if not changes or mapping(changes[-1].facts[FACT]).get("effective") is not True:
        return None
    only_on = changes[-1].facts.get(ONLY_ON)
    if any(map(acting_in, patches_in(changes[-1]))) or (only_on and _active_beside(only_on, last)):
        return None
    method = str(changes[-1].facts.get("method"))
    off = "switched off" if method.startswith(("set_", "disable_")) else "took off"
    before = replace(run, stages=run.stages[: place + 1])
    return _Cut(before, f" After the last call, {method} {off} what was on.")


def _left_beside(run: Run, change: Stage | None) -> str:
    """That what was fused before stays in the weights, beside LoRAs that act, as a sentence; "" if nothing does.

    Args:
        run: The record.
        change: By which these act, if they are in the weights too.
    """
    left = left_in_weights(run, until=change)
    where = " and the ".join(left)
    return f" What was fused before stays in the weights of the {where}, and acts too." if left else ""


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
