"""Why the LoRAs of a run do nothing, as its last change or call left them, in a sentence (`idle_lora`)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sigmascope.analysis.lora_facts import (
    AFTER_STEP,
    FACT,
    IDLE,
    LAZY,
    MERGED_BEFORE,
    MERGING,
    OF_SETTING,
    WEAK,
    ZEROS,
    acting_in,
    active_beside,
    loras_in_call,
    mapping,
    on_other_side,
    patches_in,
    sides_of,
)
from sigmascope.analysis.lora_in_weights import acting_in_weights, are_all_back, left_in_weights, may_be_left
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.records.run import IDLE_LORAS, ONLY_ON, RECIPE, Run, Stage

_VERDICTS: Final = "lora_verdicts"
"""The fact of a node of ComfyUI that has a verdict for each of its LoRAs."""
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
UNTRAINED, IS_ZERO = "lora_untrained", "lora_is_zero"
"""The finding on an adapter that was made anew, and on one that may have been loaded so."""


_OF_A_MOMENT: Final = frozenset({"lora_disabled", "lora_not_active", "lora_strength_zero", AS_BEFORE})
"""Findings on how a change left its LoRAs, which the next one may undo."""
_LEFT_OUT: Final = frozenset({"lora_part_left_out"})
"""Findings on a change of one model that it left out what is for others, to which the next ones may apply it."""


def undone_before_a_call(run: Run) -> dict[int, frozenset[str]]:
    """Findings on changes that later ones undid before any call saw them, by the identity of the change's stage.

    PEFT's `add_adapter` makes one: the adapter that it adds is not active until `set_adapter`. A pipeline that shares the
    models of the watched one is heard through them alone: it applies a file to one model after another.
    """
    told = [stage for stage in run.walk() if FACT in stage.facts or stage.name == GENERATION]
    undone = {}
    for place, stage in enumerate(told):
        if FACT in stage.facts:
            later = [*takewhile(lambda one: FACT in one.facts, told[place + 1 :])]
            is_on = bool(later) and _are_on_now(stage, later[0])
            is_elsewhere = any(_are_elsewhere(stage, one) for one in later)
            undone[id(stage)] = (_OF_A_MOMENT if is_on else frozenset()) | (
                _LEFT_OUT if is_elsewhere else frozenset()
            )
    return undone


def _are_on_now(change: Stage, later: Stage) -> bool:
    """Whether LoRAs that a change left without effect all act as the next one left them."""
    sides = [*zip(*map(patches_in, (change, later)), strict=True)]
    return any(_idle_in(was) for was, _ in sides) and all(
        _idle_in(was) <= acting_in(now).keys() for was, now in sides
    )


def _idle_in(patches: Mapping[str, Any]) -> set[str]:
    """The LoRAs on one side of which no change acts, by name."""
    return mapping(patches.get("loras")).keys() - acting_in(patches).keys()


def _are_elsewhere(change: Stage, later: Stage) -> bool:
    """Whether a change of one model is of a LoRA that a later one put on a model of the other side."""
    if change.facts.get(ONLY_ON) is None:
        return False
    names = [[acting_in(side).keys() for side in patches_in(stage)] for stage in (change, later)]
    return bool(names[0][0] & names[1][1] or names[0][1] & names[1][0])


def fused_before(run: Run) -> str | None:
    """That nobody knows whether a LoRA acts which was fused before the watch."""
    listed = (one.get("message") for stage in run.walk() if (one := _lists_fused(stage)))
    said = (stage.facts.get(MERGED_BEFORE) for stage in run.walk())
    return next((str(one) for one in (*listed, *said) if one is not None), None)


def _lists_fused(call: Stage) -> Mapping[str, Any] | None:
    return next((one for one in idle_in_call(call) if one.get("id") == _FUSED_BEFORE), None)


def idle_lora(run: Run) -> str | None:
    """Why the LoRAs do nothing, if that is how the last change or the last call left them, or none of a prompt's acts."""
    of_prompt = verdicts_of_prompt(run)
    if of_prompt:
        return in_sentences(of_prompt) if all(one.get("effective") is False for one in of_prompt) else None
    idle = idle_finding(run)
    if idle:
        return str(idle["message"])
    if fused_before(run) is not None:
        return None
    if (lost := _lost_in_merging(run)) is not None:
        return lost[1]
    if (elsewhere := next((seen.message for seen in lora_elsewhere(run)), None)) is not None:
        return elsewhere
    cut = taken_off_after(run)
    before = None if cut is None or idle_is_open(cut.before) else idle_lora(cut.before)
    return None if cut is None or before is None else before + cut.says


def idle_is_open(run: Run) -> bool:
    """Whether what `idle_lora` says is that nobody knows."""
    return not verdicts_of_prompt(run) and idle_finding(run).get("id") in OPEN_VERDICTS


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
            is_lost = told.get("id") == WEAK and isinstance(share, float) and abs(share) < _NEXT_TO_NOTHING
            if is_lost and states <= {"merged", *IDLE}:
                return stage, str(told["message"])
        return None
    return None


class _Idle(NamedTuple):
    """How the LoRAs stand after some stages of a run.

    Attributes:
        why: The finding by which they do nothing; empty if there is none.
        new: The finding that the last change made an adapter anew.
        is_over: Whether it ends once a call's LoRAs act.
        only_on: The component that it is about, if it ends once those on others act.
        merged: Whether each that the last merging put into the weights acts there.
    """

    why: Mapping[str, Any] = MappingProxyType({})
    new: Mapping[str, Any] = MappingProxyType({})
    is_over: bool = False
    only_on: object = None
    merged: Sequence[bool] = ()


def idle_finding(run: Run) -> Mapping[str, Any]:
    """The finding by which LoRAs do nothing as the last change or call left them; empty if there is none."""
    idle = _Idle()
    if left_in_weights(run) or may_be_left(run) or spoilt_for_good(run):
        return idle.why  # whatever the others do
    for stage in run.walk():
        if stage.facts.get(AFTER_STEP):
            continue  # of the steps before it says nothing
        if MERGED_BEFORE in stage.facts and not _stands_whatever_was_merged(stage):
            why = _cause(idle_in_call(stage))
            idle = idle._replace(why=why if why.get("id") in OPEN_VERDICTS else {}, is_over=True)
        elif isinstance(stage.facts.get(FACT), Mapping):
            idle = _after_change(run, stage, idle)
        else:
            idle = _after_call(stage, idle)
    return idle.why


def _after_change(run: Run, change: Stage, idle: _Idle) -> _Idle:
    analysis = mapping(change.facts[FACT])
    found = analysis.get("findings")
    told = map(mapping, found if isinstance(found, list | tuple) else ())
    idle = idle._replace(new=next((finding for finding in told if finding.get("id") == UNTRAINED), {}))
    if str(change.facts.get("method")).startswith(MERGING):
        idle = idle._replace(merged=acting_in_weights(analysis, by_kind=False))
    if not is_idle(analysis):
        return idle._replace(why={}) if is_change(analysis) else idle
    if on_other_side(run, change):
        return idle._replace(why={})
    why = _cause(found)
    are_off = {side.get("total_patched_keys") for side in sides_of(analysis)} - {None} == {0}
    is_over = are_off or why.get("id") in OF_SETTING
    return idle._replace(why=why, is_over=is_over, only_on=change.facts.get(ONLY_ON))


def _after_call(call: Stage, idle: _Idle) -> _Idle:
    told = idle_in_call(call)
    why = _cause(told)
    if idle.merged and why.get("id") == MERGED_AT_ZERO:
        return idle if any(idle.merged) else idle._replace(why=_at_zero(why), is_over=True)
    if _lists_fused(call):
        return idle._replace(why={}, is_over=True)  # another one, whose layers are gone, may act
    if told:
        is_new = bool(idle.new) and why.get("id") == IS_ZERO
        return idle._replace(why=idle.new if is_new else why, is_over=True)
    ends = idle.is_over and active_beside(None, call)
    return idle._replace(why={}) if ends or (idle.only_on and active_beside(idle.only_on, call)) else idle


def _stands_whatever_was_merged(stage: Stage) -> bool:
    """Whether a call says of LoRAs by their names that they hold nothing but zeros."""
    told = idle_in_call(stage)
    return bool(told) and all(one.get("id") in ZEROS for one in told)


def merged_at_zero(run: Run) -> Mapping[str, Any]:
    """The finding that LoRAs do nothing which the watch saw merged with strength 0; empty if that is not how they ended."""
    idle = idle_finding(run)
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
            if is_change(analysis):
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


def verdicts_of_prompt(run: Run) -> list[Mapping[str, Any]]:
    """What is said of each LoRA that a node of ComfyUI put on, now or where its output was kept."""
    told = [
        *(stage.facts.get(_VERDICTS) for stage in run.walk()),
        mapping(run.facts.get("comfyui")).get("loras_kept"),
    ]
    return [mapping(one) for each in told if isinstance(each, list | tuple) for one in each]


def in_sentences(verdicts: list[Mapping[str, Any]]) -> str:
    """What verdicts of one kind say, each as a sentence."""
    return " ".join(f"LoRA {str(one.get('says')).rstrip('.')}." for one in verdicts)


def is_idle(analysis: Mapping[str, Any]) -> bool:
    """Whether an analysis found why LoRAs do nothing, which is not that they act as before."""
    findings = analysis.get("findings")
    if analysis.get("effective") is not False or spoilt(findings):
        return False
    is_as_before = any(mapping(finding).get("id") == AS_BEFORE for finding in findings or ())
    return not is_as_before and _cause(findings).get("id") not in (None, MERGED_AT_ZERO)


def is_change(analysis: Mapping[str, Any]) -> bool:
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
    return bool(spoilt(stage.facts.get(IDLE_LORAS)))


def refused_lora(failed: Stage) -> str | None:
    """What the file of a LoRA whose loading failed shows of the reason: the error that was raised is about the host's tensors."""
    analysis = mapping(failed.facts.get(FACT)) if failed.name == FACT else {}
    for finding in analysis.get("findings") or ():
        told = mapping(finding)
        is_reason = told.get("id") in _REASONS or "cause" in mapping(told.get("evidence"))
        if is_reason and told.get("severity") in ("critical", "error"):
            return str(told["message"])
    return None


def spoilt_for_good(run: Run) -> Mapping[str, Any]:
    """The finding that NaN or Inf was merged into weights: taking it out again leaves NaN."""
    merging = (stage for stage in run.walk() if str(stage.facts.get("method")).startswith(MERGING))
    merged = (one for stage in merging if acting_in_weights(one := mapping(stage.facts.get(FACT))))
    told = (spoilt(one.get("findings")) for one in merged)
    return next((one for one in told if one.get("id") == "lora_not_finite"), {})


def spoilt(findings: object) -> Mapping[str, Any]:
    """The first finding by which all that LoRAs touch becomes NaN or chance, if these act; empty if there is none."""
    told = map(mapping, findings if isinstance(findings, list | tuple) else ())
    return next(
        (one for one in told if one.get("id") in _SPOILS and mapping(one.get("evidence")).get("acting")), {}
    )


class _Cut(NamedTuple):
    """A run up to its last call, and in a sentence what took off or switched off after it all that was on."""

    before: Run
    says: str


def taken_off_after(run: Run) -> _Cut | None:
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
    changes = [part for part in later if FACT in part.facts and is_change(mapping(part.facts[FACT]))]
    if not changes or mapping(changes[-1].facts[FACT]).get("effective") is not True:
        return None
    only_on = changes[-1].facts.get(ONLY_ON)
    if any(map(acting_in, patches_in(changes[-1]))) or (only_on and active_beside(only_on, last)):
        return None
    method = str(changes[-1].facts.get("method"))
    off = "switched off" if method.startswith(("set_", "disable_")) else "took off"
    before = replace(run, stages=run.stages[: place + 1])
    return _Cut(before, f" After the last call, {method} {off} what was on.")
