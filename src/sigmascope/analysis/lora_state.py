"""Whether the LoRAs of a run acted at its end, in a sentence."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sigmascope import units
from sigmascope.records.run import IDLE_LORAS, Run, Stage

_FACT = "lora_application"
_VERDICTS: Final = "lora_verdicts"
"""The fact of a node of ComfyUI that has a verdict for each of its LoRAs."""
_IDLE = frozenset({"inactive", "failed"})
"""States of changes that do nothing."""
_REASONS: Final = frozenset({"lora_unreadable", "lora_matches_nothing"})
"""Findings on a file that say why a loader refuses it; so does one with a `cause` in its evidence."""
_SPOILS: Final = frozenset({"lora_not_finite", "weights_not_finite"})
"""The findings on changes and weights of which everything that they touch becomes NaN."""
_AS_BEFORE: Final = "lora_as_before"
"""The finding that something acts as it did before: then others say nothing of LoRAs that do nothing."""


def idle_lora(run: Run) -> str | None:
    """Why the LoRAs do nothing, if that is how the last change or the last call left them, or none of a prompt's acts."""
    idle: str | None = None
    of_prompt = _of_prompt(run)
    if of_prompt:
        return _said(of_prompt) if all(one.get("effective") is False for one in of_prompt) else None
    for stage in run.walk():
        analysis = stage.facts.get(_FACT)
        if isinstance(analysis, Mapping):
            idle = (
                _cause(analysis.get("findings"))
                if _is_idle(analysis)
                else None
                if _is_change(analysis)
                else idle
            )
        elif IDLE_LORAS in stage.facts:
            idle = _cause(stage.facts[IDLE_LORAS])
    return idle


def _of_prompt(run: Run) -> list[Mapping[str, Any]]:
    """What is said of each LoRA that a node of ComfyUI put on, now or where its output was kept."""
    told = [
        *(stage.facts.get(_VERDICTS) for stage in run.walk()),
        _mapping(run.facts.get("comfyui")).get("loras_kept"),
    ]
    return [_mapping(one) for each in told if isinstance(each, list | tuple) for one in each]


def _said(verdicts: list[Mapping[str, Any]]) -> str:
    """What verdicts of one kind say, each as a sentence."""
    return " ".join(f"LoRA {str(one.get('says')).rstrip('.')}." for one in verdicts)


def _is_idle(analysis: Mapping[str, Any]) -> bool:
    findings = analysis.get("findings")
    if analysis.get("effective") is not False or _spoilt(analysis) is not None:
        return False
    is_as_before = any(_mapping(finding).get("id") == _AS_BEFORE for finding in findings or ())
    return not is_as_before and _cause(findings) is not None


def _is_change(analysis: Mapping[str, Any]) -> bool:
    """Whether it may have changed what acts: nothing changes where the same is set again."""
    return analysis.get("effective") is not False


def _cause(findings: object) -> str | None:
    """What the first finding says that is more than a remark."""
    told = (
        (finding for finding in findings if isinstance(finding, Mapping))
        if isinstance(findings, list)
        else ()
    )
    return next((str(finding["message"]) for finding in told if finding.get("severity") != "info"), None)


def refused_lora(failed: Stage) -> str | None:
    """What the file of a LoRA whose loading failed shows of the reason: the error that was raised is about the host's tensors."""
    analysis = _mapping(failed.facts.get(_FACT)) if failed.name == _FACT else {}
    for finding in analysis.get("findings") or ():
        told = _mapping(finding)
        is_reason = told.get("id") in _REASONS or "cause" in _mapping(told.get("evidence"))
        if is_reason and told.get("severity") in ("critical", "error"):
            return str(told["message"])
    return None


def spoiling_lora(run: Run) -> str | None:
    """Where the LoRAs hold NaN or Inf, if these act as the last change left them: all that they make is spoilt."""
    last = _last_change(run)
    return None if last is None else _spoilt(_mapping(last.facts.get(_FACT)))


def _spoilt(analysis: Mapping[str, Any]) -> str | None:
    for finding in map(_mapping, analysis.get("findings") or ()):
        if finding.get("id") in _SPOILS and _mapping(finding.get("evidence")).get("acting"):
            return str(finding["message"])
    return None


def acting_lora(run: Run) -> str | None:
    """How strongly the LoRAs act, if they do as the last change left them and do not spoil all that they make."""
    stage = _last_change(run)
    if spoiling_lora(run) is not None:
        return None
    if of_prompt := [one for one in _of_prompt(run) if one.get("effective") is True]:
        return _said(of_prompt)
    if stage is None:
        return None
    last, component = _mapping(stage.facts.get(_FACT)), stage.facts.get("component")
    denoiser = component if isinstance(component, str) else "denoiser"
    sides = [
        (name, changes, _mapping(last.get(f"{side}_lora_patches")))
        for name, side in ((denoiser, "unet"), ("text encoders", "clip"))
        if (changes := _mapping(last.get(f"{side}_weight_changes")))
    ]
    is_on = any(_acting(patches) for _, _, patches in sides)
    if not is_on and any(changes.get("predicted") for _, changes, _ in sides):
        return None  # the last change took it off
    sizes = [f"{size} in the {name}" for name, *side in sides if (size := _size(*side))]
    confirmed = sum(
        check.get("result") == "confirmed" for _, changes, _ in sides for check in _checks(changes)
    )
    words = f"The LoRA acts: ‖ΔW‖ / ‖W‖ is {' and '.join(sizes)}." if sizes else "The LoRA acts."
    return f"{words} {units.counted(confirmed, 'weight')} in use confirmed it." if confirmed else words


def _last_change(run: Run) -> Stage | None:
    """The stage of the last change of LoRAs, if what it left computes something else than before."""
    found = ((stage, stage.facts.get(_FACT)) for stage in run.walk())
    changes = [
        (stage, analysis)
        for stage, analysis in found
        if isinstance(analysis, Mapping) and (_is_change(analysis) or _is_idle(analysis))
    ]
    if not changes or changes[-1][1].get("effective") is not True or idle_lora(run) is not None:
        return None
    return changes[-1][0]


def _acting(patches: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The LoRAs of which some change acts, by name."""
    loras = {name: _mapping(lora) for name, lora in _mapping(patches.get("loras")).items()}
    return {
        name: lora
        for name, lora in loras.items()
        if not _IDLE.issuperset(_mapping(lora.get("states"))) and lora.get("delta_norm") != 0.0
    }


def _size(changes: Mapping[str, Any], patches: Mapping[str, Any]) -> str | None:
    """‖ΔW‖ of what is on a model now beside ‖W‖, in words: of each LoRA, or of what is in the weights."""
    acting = _acting(patches)
    if not acting:
        return _percent(changes.get("relative_change"))
    shares = {name: _percent(lora.get("relative_change")) for name, lora in acting.items()}
    if len(shares) == 1:
        return next(iter(shares.values()))
    return ", ".join(f"{share} ({name})" for name, share in shares.items() if share) or None


def _percent(share: object) -> str | None:
    return units.rough_percent(share) if isinstance(share, float) and 0.0 < share < float("inf") else None


def _mapping(held: object) -> Mapping[str, Any]:
    return held if isinstance(held, Mapping) else {}


def _checks(changes: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    checks = changes.get("checked")
    yield from (
        check
        for check in (checks.values() if isinstance(checks, Mapping) else ())
        if isinstance(check, Mapping)
    )
