"""Put together the analysis of a text encoding from its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmascope.probes import memory_snapshot
from sigmascope.records.peak import PeakMemory
from sigmascope.records.prompts import PromptPrivacy, redactor
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.failures import Redact, error_text, exception_dict
from sigmascope.stages.memory_now import checked_seconds, cleanup_effectiveness, memory_now
from sigmascope.stages.text.baseline import NO_BASELINE, References, references_of, state_now
from sigmascope.stages.text.conditioning_facts import conditioning_facts, read_conditioning
from sigmascope.stages.text.dumping import DumpFolder, dump_conditioning
from sigmascope.stages.text.performance import efficiency, performance
from sigmascope.stages.text.prompt_facts import as_text, prompt_facts, texts_of
from sigmascope.stages.text.thresholds import TextEncodingThresholds
from sigmascope.stages.text.tokens import TokenCount, count_tokens
from sigmascope.stages.text.typed import (
    ConditioningDict,
    PromptFacts,
    TextEncodingAnalysis,
    TextProcessing,
    Validation,
)
from sigmascope.stages.text.validation import validate

NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"


TokensSeen = Callable[[Sequence[str]], tuple[list[TokenCount], str | None]]
"""Given the texts of a batch, what each tokenizer made of them when it was watched, and why there is nothing."""


@dataclass(frozen=True, slots=True)
class Side:
    """One prompt and what the encoder made of it. `seconds` is None where it was not measured apart."""

    name: str
    prompt: object
    conditioning: object
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Choices:
    """How to look at the results; see `analyze_text_encoding_results`."""

    thresholds: TextEncodingThresholds
    token_limit: int | None = None
    statistics: bool | None = None
    prompt_privacy: PromptPrivacy = "full"
    dumps: DumpFolder | None = None
    tokens_seen: TokensSeen | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the whole step gave beside its conditionings."""

    elapsed_time: object
    peak_memory: PeakMemory | PeakMemoryDict | None = None
    error: BaseException | str | None = None


def analyze(
    baseline: Mapping[str, Any] | None, positive: Side, negative: Side, outcome: Outcome, choices: Choices
) -> TextEncodingAnalysis:
    """See `sigmascope.stages.text_encoding.analyze_text_encoding_results`."""
    known = references_of(baseline)
    snapshot = memory_snapshot(None if known is None else known.accelerator)  # before we take any ourselves
    encoders = [] if known is None else list(known.encoders)
    redact = _redactor(positive, negative, choices)
    prompts: TextProcessing = {
        "positive": _prompt(positive, known, redact, choices),
        "negative": _prompt(negative, known, redact, choices),
    }
    conditionings = {side.name: _conditioning(side, known, redact, choices) for side in (positive, negative)}
    seconds, why_no_time = checked_seconds(outcome.elapsed_time)
    impact = None if known is None else MemoryImpact(known.snapshot, snapshot)
    clip, unet = state_now(baseline, known, "clip"), state_now(baseline, known, "unet")
    validation = validate(prompts, conditionings, clip, encoders, impact, seconds, choices.thresholds)
    success = outcome.error is None and validation["output"]["passed"] is True
    return {
        "encoding_success": success,
        "success": success,
        **_failure(outcome, validation, redact),  # type: ignore[typeddict-item]
        "elapsed_time": seconds,
        "positive_conditioning": conditionings["positive"],
        "negative_conditioning": conditionings["negative"],
        "text_processing": prompts,
        "performance": performance(seconds, positive.seconds, negative.seconds, prompts),
        "efficiency": efficiency(
            seconds,
            prompts,
            tuple(conditionings.values()),
            cleanup_effectiveness(outcome.peak_memory, impact),
        ),
        "model_state": {"clip": clip, "unet": unet},
        "memory_impact": None if impact is None else impact.as_dict(),
        "peak_memory": _peak(outcome.peak_memory),
        "baseline": _plain_baseline(baseline),
        "current_memory": memory_now(snapshot),
        "validation": validation,
        "unavailable": _unavailable(known, outcome, why_no_time),
    }


def _redactor(positive: Side, negative: Side, choices: Choices) -> Redact:
    return redactor(private_texts(positive.prompt, negative.prompt), choices.prompt_privacy)


def private_texts(*prompts: object) -> list[str]:
    """All texts that quote a prompt: each of a batch, and all of them in one."""
    return [text for prompt in prompts for text in (*texts_of(prompt), as_text(prompt)) if text]


def _prompt(side: Side, known: References | None, redact: Redact, choices: Choices) -> PromptFacts:
    texts = texts_of(side.prompt)
    if texts and choices.tokens_seen is not None:
        counts, reason = choices.tokens_seen(texts)
        return prompt_facts(side.prompt, counts, reason, choices.prompt_privacy)
    tokenizers = {} if known is None else known.tokenizers
    counts, reason = count_tokens(texts, tokenizers, choices.token_limit) if texts else ([], None)
    return prompt_facts(side.prompt, counts, reason and redact(reason), choices.prompt_privacy)


def _conditioning(side: Side, known: References | None, redact: Redact, choices: Choices) -> ConditioningDict:
    found, reason = read_conditioning(side.conditioning)
    encoders = () if known is None else known.encoders
    facts = conditioning_facts(found, encoders, choices.statistics, reason and redact(reason))
    facts["metadata"] = _redacted(facts["metadata"], redact)
    for entry in facts["entries"]:
        entry["metadata"] = _redacted(entry["metadata"], redact)
        entry["others"] = {redact(name): tensor for name, tensor in entry["others"].items()}
    if choices.dumps is None:
        facts["unavailable"]["tensor_dump"] = "not asked for"
    else:
        dump_conditioning(choices.dumps, f"{side.name}_conditioning", found, facts, side.prompt)
        reasons = facts["unavailable"]
        reasons |= {name: redact(why) for name, why in reasons.items() if name == "tensor_dump"}
    return facts


def _redacted(value: Any, redact: Redact) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(name): _redacted(item, redact) for name, item in value.items()}
    return [_redacted(item, redact) for item in value] if isinstance(value, list | tuple) else value


def _failure(outcome: Outcome, validation: Validation, redact: Redact) -> dict[str, object]:
    error, problems = outcome.error, validation["output"]["messages"]
    if error is None:
        return {"error": "; ".join(problems) or None, "exception_details": None}
    details = exception_dict(error, redact) if isinstance(error, BaseException) else None
    return {"error": error_text(error, redact), "exception_details": details}


def _peak(peak: PeakMemory | PeakMemoryDict | None) -> PeakMemoryDict | None:
    return peak.as_dict() if isinstance(peak, PeakMemory) else peak


def _plain_baseline(baseline: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    return {name: value for name, value in baseline.items() if name != "references"}


def _unavailable(known: References | None, outcome: Outcome, why_no_time: str | None) -> dict[str, str]:
    reasons = {} if known is not None else {"memory_impact": NO_BASELINE}
    if outcome.peak_memory is None:
        reasons["peak_memory"] = NO_PEAKS
    if why_no_time is not None:
        reasons["elapsed_time"] = why_no_time
    return reasons
