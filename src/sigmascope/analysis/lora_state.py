"""What a run says of its LoRAs in two words and in sentences (`standing`): they act, do nothing, or nobody knows."""

from typing import Final

from sigmascope.analysis.lora_acting import LoraStanding, acting_standing, as_set_last, last_change, spoiling
from sigmascope.analysis.lora_facts import (
    FACT,
    MERGED_BEFORE,
    acting_in,
    loras_in_call,
    made_nan,
    mapping,
    names_of_sides,
)
from sigmascope.analysis.lora_idle import (
    OPEN_VERDICTS,
    fused_before,
    idle_in_call,
    idle_is_open,
    idle_lora,
    is_change,
)
from sigmascope.analysis.lora_in_weights import are_other_weights, left_in_weights, may_be_left, may_cancel
from sigmascope.records.run import IDLE_LORAS, RECIPE, Run

_CHANGED_IN_CALL: Final = "lora_changed_in_call"
_IDLE: Final = "does nothing"


def standing(run: Run) -> LoraStanding | None:
    """What becomes of the LoRAs of a run; None if it says nothing of any."""
    idle, spoils = idle_lora(run), spoiling(run)
    if idle is not None:
        return LoraStanding("unknown", idle, None) if idle_is_open(run) else LoraStanding(_IDLE, idle, False)
    if spoils:
        is_empty = spoils.get("id") == "lora_without_values"
        return LoraStanding(
            "without values" if is_empty else "NaN or Inf", str(spoils["message"]), is_well=False
        )
    unknown = _open_change(run) or fused_before(run) or (_MAY_BE_LEFT if may_be_left(run) else None)
    acts = acting_standing(run)
    if acts is not None and acts.words != "taken off" and are_other_weights(run):
        unknown, acts = unknown or _OTHER_WEIGHTS, None
    if acts is not None and (_may_cancel(run) or _is_idle_beside_fused(run)):
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
    elif made_nan(last):
        why = "the last call made NaN or Inf, which may come from it"
    elif IDLE_LORAS in last.facts:
        why = "no call has run since the last change"
    else:
        why = "what it did in the last call was not measured"
    return f"{_IS_OPEN}: {why}."


_IS_OPEN: Final = "Whether the LoRA acts is unknown"
_OTHER_WEIGHTS: Final = f"{_IS_OPEN}: the last call ran with other weights than those that it was merged into, and nobody knows what they hold."
_MAY_BE_LEFT: Final = (
    f"{_IS_OPEN}: it was merged before the watch and taken off with strength 0, "
    "which leaves it in the weights if that was set after merging."
)
_MAY_CANCEL: Final = f"{_IS_OPEN}: it may take away all that was fused before and stays in the weights, since both have the same ‖ΔW‖ and opposite signs."


def _may_cancel(run: Run) -> bool:
    """Whether all that acts as the last change left it may cancel what stays in the weights, or may stay there."""
    changes = [stage for stage in run.walk() if FACT in stage.facts]
    left = left_in_weights(run)
    if not changes or not (left or fused_before(run)):
        return False
    last, patches = as_set_last(run, last_change(run) or changes[-1])
    sides = [
        (name, side) for (name, _), side in zip(names_of_sides(last), patches, strict=True) if acting_in(side)
    ]
    return (
        bool(sides) and {name for name, _ in sides} >= {*left} and all(may_cancel(run, *one) for one in sides)
    )


def _is_idle_beside_fused(run: Run) -> bool:
    """Whether no LoRA acts in the last call but one that may have been in the weights before the watch, and none was changed since."""
    told = [stage for stage in run.walk() if RECIPE in stage.facts or FACT in stage.facts]
    is_open = bool(told) and RECIPE in told[-1].facts and MERGED_BEFORE in told[-1].facts
    return is_open and bool(idle_in_call(told[-1])) and not left_in_weights(run)


def _open_change(run: Run) -> str | None:
    """That nobody knows whether LoRAs act as the last change left them."""
    found = [mapping(stage.facts[FACT]) for stage in run.walk() if FACT in stage.facts]
    changes = [analysis for analysis in found if is_change(analysis)]
    if not changes or changes[-1].get("effective") is not None:
        return None
    told = map(mapping, changes[-1].get("findings") or ())
    return next((str(one["message"]) for one in told if one.get("id") in OPEN_VERDICTS), None)
