"""Text encoding: what the prompt became, and what it cost.

    baseline = capture_text_encoding_baseline(unet, clip)
    positive, negative = encode(...)
    analysis = analyze_text_encoding_results(baseline, positive, negative, prompt, negative_prompt, seconds)
    print_text_encoding_analysis_summary(analysis)

The functions change nothing, move nothing, and keep no model and no tensor alive. What cannot be read is
None, with the reason in the `unavailable` beside it; so is what needs an unknown figure, or a division by
nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator, memory_snapshot, read_nvml
from sigmascope.probes.reading import error_text, keeping_words, keeps_words, read_host
from sigmascope.records.memory import MemoryImpact, MemorySnapshot, PeakMemory, PeakMemoryDict
from sigmascope.records.prompts import HIDDEN, PromptPrivacy, check_privacy, quoting
from sigmascope.stages.baseline import (
    TEXT_NOT_KEPT,
    changes,
    checked_seconds,
    cleanup_effectiveness,
    exception_dict,
    memory_now,
    model_state,
    reference_to,
)
from sigmascope.stages.conditioning import (
    DumpFolder,
    conditioning_facts,
    dump_conditioning,
    read_conditioning,
)
from sigmascope.stages.prompt_facts import as_text, prompt_facts, texts_of
from sigmascope.stages.schema import (
    ConditioningDict,
    Efficiency,
    ModelStateDict,
    Performance,
    PromptFacts,
    TextEncodingAnalysis,
    TextEncodingBaseline,
    TextProcessing,
    Validation,
)
from sigmascope.stages.summary import print_analysis
from sigmascope.stages.text_encoders import EncoderFacts, find_encoders, find_tokenizers, named_tokenizers
from sigmascope.stages.text_summary import TITLE, sections
from sigmascope.stages.text_validation import TextEncodingThresholds, validate
from sigmascope.stages.tokens import TokenCount, count_tokens

__all__ = [
    "TextEncodingAnalysis",
    "TextEncodingBaseline",
    "TextEncodingThresholds",
    "analyze_text_encoding_results",
    "capture_text_encoding_baseline",
    "print_text_encoding_analysis_summary",
]

TokensSeen = Callable[[Sequence[str]], tuple[list[TokenCount], str | None]]
"""Given the texts of a batch, what each tokenizer made of them when it was watched, and why there is nothing."""
NO_BASELINE = "there is no baseline"
NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"
_NOT_APART = "the prompts' times were not measured apart"


def capture_text_encoding_baseline(
    unet_model: object,
    clip_model: object,
    *,
    tokenizer: object = None,
    accelerator: Accelerator | None = None,
) -> TextEncodingBaseline:
    """Memory and models as they are before the encoding. Never raises.

    Args:
        unet_model: The denoiser, of any architecture; None if it is not loaded yet.
        clip_model: What encodes the text: a transformers model, a mapping of several, a diffusers pipeline or
            a ComfyUI CLIP.
        tokenizer: Where `clip_model` holds none: one, a list, a mapping, or a pipeline that has some.
        accelerator: What to ask about devices; None finds out.
    """
    return capture(unet_model, clip_model, tokenizer, accelerator)


def analyze_text_encoding_results(
    baseline: Mapping[str, Any] | None,
    positive_cond: object,
    negative_cond: object,
    positive_prompt: object,
    negative_prompt: object,
    elapsed_time: object,
    *,
    positive_seconds: float | None = None,
    negative_seconds: float | None = None,
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
    thresholds: TextEncodingThresholds | None = None,
    token_limit: int | None = None,
    statistics: bool | None = None,
    prompt_privacy: PromptPrivacy = "full",
    dumps: DumpFolder | None = None,
    tokens_seen: TokensSeen | None = None,
) -> TextEncodingAnalysis:
    """What the prompts became and what encoding them cost, from the baseline and the conditionings.

    Args:
        baseline: What `capture_text_encoding_baseline` gave; None: no comparison with before.
        positive_cond: The conditioning, in any nesting of ComfyUI, diffusers or transformers.
        negative_cond: That of the negative prompt; None without guidance.
        positive_prompt: The text, or a list of texts that were encoded together.
        negative_prompt: The negative text; None if there is none.
        elapsed_time: Seconds that the step took.
        positive_seconds: Of them, those for the positive prompt, if measured apart.
        negative_seconds: The same for the negative prompt.
        peak_memory: The peak of the stage that watched the encoding.
        error: What the encoder raised, if it did.
        thresholds: Limits for the validation.
        token_limit: The pipeline's own limit (`max_sequence_length`), special tokens included; None: each
            tokenizer's.
        statistics: True reads the values of an accelerator's tensors too, which waits for it; None those of
            CPU tensors; False none.
        prompt_privacy: Whether the analysis holds the prompts, their SHA-256 or neither.
        dumps: Where to save the conditionings: a `sigmascope.TensorDumps`, whose own privacy holds for them.
        tokens_seen: Gives what the tokenizers made of the texts when they were watched; None: they are asked now.

    Raises:
        ConfigError: `prompt_privacy` does not exist. Nothing that is looked at can raise.
    """
    return analyze(
        baseline,
        Side("positive", positive_prompt, positive_cond, positive_seconds),
        Side("negative", negative_prompt, negative_cond, negative_seconds),
        Outcome(elapsed_time, peak_memory, error),
        Choices(
            thresholds or TextEncodingThresholds(),
            token_limit,
            statistics,
            prompt_privacy,
            dumps,
            tokens_seen,
        ),
    )


def print_text_encoding_analysis_summary(
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_text_encoding_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(TITLE, analysis, sections, console)


@dataclass(frozen=True, slots=True)
class Side:
    """One prompt and what the encoder made of it. `seconds` is None where it was not measured apart."""

    name: str
    prompt: object
    conditioning: object
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the whole step gave beside its conditionings."""

    elapsed_time: object
    peak_memory: PeakMemory | PeakMemoryDict | None = None
    error: BaseException | str | None = None


@dataclass(frozen=True, slots=True)
class Choices:
    """How to look at the results; see `analyze_text_encoding_results`."""

    thresholds: TextEncodingThresholds
    token_limit: int | None = None
    statistics: bool | None = None
    prompt_privacy: PromptPrivacy = "full"
    dumps: DumpFolder | None = None
    tokens_seen: TokensSeen | None = None


def analyze(
    baseline: Mapping[str, Any] | None, positive: Side, negative: Side, outcome: Outcome, choices: Choices
) -> TextEncodingAnalysis:
    """The analysis that `analyze_text_encoding_results` gives."""
    check_privacy(choices.prompt_privacy)
    with keeping_words(choices.prompt_privacy == "full"):
        return _analysis(baseline, positive, negative, outcome, choices)


def _analysis(
    baseline: Mapping[str, Any] | None, positive: Side, negative: Side, outcome: Outcome, choices: Choices
) -> TextEncodingAnalysis:
    known = references_of(baseline)
    snapshot = memory_snapshot(None if known is None else known.accelerator)  # before we take any ourselves
    encoders = [] if known is None else list(known.encoders)
    quotes = quoting(private_texts(positive.prompt, negative.prompt), choices.prompt_privacy)
    prompts: TextProcessing = {
        "positive": _prompt_of_side(positive, known, choices),
        "negative": _prompt_of_side(negative, known, choices),
    }
    conditionings = {
        side.name: _conditioning_of_side(side, known, quotes, choices) for side in (positive, negative)
    }
    seconds, why_no_time = checked_seconds(outcome.elapsed_time)
    impact = None if known is None else MemoryImpact(known.snapshot, snapshot)
    clip, unet = state_now(baseline, known, "clip"), state_now(baseline, known, "unet")
    validation = validate(prompts, conditionings, clip, encoders, impact, seconds, choices.thresholds)
    success = outcome.error is None and validation["output"]["passed"] is True
    return {
        "encoding_success": success,
        "success": success,
        **_failure(outcome, validation),  # type: ignore[typeddict-item]
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


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis. Models are referred to weakly; tokenizers are held."""

    snapshot: MemorySnapshot
    clip: Any
    unet: Any
    tokenizers: Mapping[str, Any]
    encoders: tuple[EncoderFacts, ...]
    accelerator: Accelerator | None

    def __repr__(self) -> str:
        return "References(…)"


def _prompt_of_side(side: Side, known: References | None, choices: Choices) -> PromptFacts:
    texts = texts_of(side.prompt)
    if texts and choices.tokens_seen is not None:
        counts, reason = choices.tokens_seen(texts)
    else:
        tokenizers = {} if known is None else known.tokenizers
        counts, reason = count_tokens(texts, tokenizers, choices.token_limit) if texts else ([], None)
    return prompt_facts(side.prompt, counts, reason, choices.prompt_privacy)


def _conditioning_of_side(
    side: Side, known: References | None, quotes: Callable[[str], bool], choices: Choices
) -> ConditioningDict:
    found, reason = read_conditioning(side.conditioning)
    encoders = () if known is None else known.encoders
    facts = conditioning_facts(found, encoders, choices.statistics, reason)
    if choices.prompt_privacy != "full":
        for entry in (facts, *facts["entries"]):
            entry["metadata"] = _without_texts(entry["metadata"], quotes)
        for entry in facts["entries"]:
            entry["others"] = dict(_named(entry["others"], quotes))
    if choices.dumps is None:
        facts["unavailable"]["tensor_dump"] = "not asked for"
    else:
        dump_conditioning(choices.dumps, f"{side.name}_conditioning", found, facts, side.prompt)
    return facts


def _without_texts(value: Any, quotes: Callable[[str], bool]) -> Any:
    """What the host put beside a private prompt's tensors: numbers stay, texts and lists of token ids do not."""
    if isinstance(value, str):
        return HIDDEN
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if "token" in name.lower() else _without_texts(item, quotes)
            for name, item in _named(value, quotes)
        }
    return [_without_texts(item, quotes) for item in value] if isinstance(value, list | tuple) else value


def _named(items: Mapping[str, Any], quotes: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """The items by name; one whose name may quote the prompt, or is no plain name, is numbered."""
    for number, (name, item) in enumerate(items.items()):
        is_plain = name.replace(".", "_").isidentifier() and not quotes(name)
        yield name if is_plain else f"item_{number}", item


def _failure(outcome: Outcome, validation: Validation) -> dict[str, object]:
    error, problems = outcome.error, validation["output"]["messages"]
    if error is None:
        return {"error": "; ".join(problems) or None, "exception_details": None}
    if isinstance(error, str):
        return {"error": error if keeps_words() else TEXT_NOT_KEPT, "exception_details": None}
    return {"error": error_text(error), "exception_details": exception_dict(error)}


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


def performance(
    elapsed: object, positive_seconds: object, negative_seconds: object, prompts: TextProcessing
) -> Performance:
    """Seconds in all, for each prompt, and by character and token of both prompts together."""
    total, why = checked_seconds(elapsed)
    positive, negative = checked_seconds(positive_seconds)[0], checked_seconds(negative_seconds)[0]
    characters, tokens = _sum_of_prompts(prompts, "character_length"), _sum_of_prompts(prompts, "token_count")
    unavailable: dict[str, str] = {}
    if total is None:
        names = ("total_execution_time", "time_per_character", "time_per_token")
        unavailable |= dict.fromkeys(names, why or "unknown")
    if positive is None:
        unavailable["positive_encoding_time"] = _NOT_APART
    if negative is None:
        unavailable["negative_encoding_time"] = _NOT_APART
    per_character, per_token = _ratio(total, characters), _ratio(total, tokens)
    if total is not None and per_character is None:
        unavailable["time_per_character"] = _why_no_rate("characters", characters)
    if total is not None and per_token is None:
        unavailable["time_per_token"] = _why_no_rate("tokens", tokens)
    return {
        "total_execution_time": total,
        "positive_encoding_time": positive,
        "negative_encoding_time": negative,
        "time_per_character": per_character,
        "time_per_token": per_token,
        "unavailable": unavailable,
    }


def _sum_of_prompts(prompts: TextProcessing, name: str) -> int | None:
    """The figure of both prompts together; of one, where only one was given; None if one is unknown."""
    given = [facts for facts in (prompts["positive"], prompts["negative"]) if _is_given(facts)]
    values = [facts[name] for facts in given]  # type: ignore[literal-required]
    return None if not values or None in values else sum(values)


def _is_given(facts: object) -> bool:
    return isinstance(facts, dict) and facts["character_length"] is not None


def _ratio(amount: float | None, count: int | None) -> float | None:
    return None if amount is None or not count else amount / count


def _why_no_rate(what: str, count: int | None) -> str:
    return f"the number of {what} is unknown" if count is None else f"there are no {what}"


def efficiency(
    elapsed: object,
    prompts: TextProcessing,
    conditionings: tuple[ConditioningDict, ...],
    cleanup: tuple[float | None, str | None],
) -> Efficiency:
    """Rates, memory by character, how busy the device is now, and the share of memory given back (`cleanup`).

    `gpu_utilization` is NVML's mean over its last sample period (1/6 to 1 s) for the device of the
    conditioning.
    """
    total, why = checked_seconds(elapsed)
    if total == 0:
        total, why = None, "it took no measurable time"
    characters, tokens = _sum_of_prompts(prompts, "character_length"), _sum_of_prompts(prompts, "token_count")
    sizes = [one["total_size_mb"] for one in conditionings if one["total_size_mb"] is not None]
    by_second = None if total is None or characters is None else characters / total
    tokens_by_second = None if total is None or tokens is None else tokens / total
    by_character = _ratio(sum(sizes), characters) if sizes else None
    device = next((one["device"] for one in conditionings if one["device"]), None)
    utilization, why_no_gpu = _gpu_utilization(device)
    values = {
        "characters_per_second": (by_second, why or _why_no_rate("characters", characters)),
        "tokens_per_second": (tokens_by_second, why or _why_no_rate("tokens", tokens)),
        "memory_per_character_mb": (
            by_character,
            _why_no_rate("characters", characters) if sizes else "there is no conditioning",
        ),
        "gpu_utilization": (utilization, why_no_gpu),
        "cleanup_effectiveness": cleanup,
    }
    return {
        "characters_per_second": by_second,
        "tokens_per_second": tokens_by_second,
        "memory_per_character_mb": by_character,
        "gpu_utilization": utilization,
        "cleanup_effectiveness": cleanup[0],
        "unavailable": {
            name: reason or "unknown" for name, (value, reason) in values.items() if value is None
        },
    }


def _gpu_utilization(device: str | None) -> tuple[float | None, str | None]:
    if device is None or not device.startswith("cuda"):
        return None, "the conditioning is on no NVIDIA device"
    facts = read_nvml(device)
    return facts.utilization_percent, facts.unavailable.get("utilization_percent")


def state_now(
    baseline: Mapping[str, Any] | None, references: References | None, which: str
) -> ModelStateDict:
    """The state of `clip` or `unet` now, with what changed since the baseline."""
    reference = getattr(references, which, None)
    model = None if reference is None else reference()
    state = model_state(model)
    if baseline is None or references is None:
        state["unavailable"] = dict.fromkeys(state["unavailable"], NO_BASELINE)
        return state
    before: ModelStateDict = baseline[which]
    if model is None:
        gone = before["model_id"] is not None
        reason = "the model is gone, or takes no weak reference" if gone else "no model was given"
        state["unavailable"] = dict.fromkeys(state["unavailable"], reason)
    else:
        state["changed"] = changes(before, state)
    return state


def private_texts(*prompts: object) -> list[str]:
    """All texts that quote a prompt: each of a batch, and all of them in one."""
    return [text for prompt in prompts for text in (*texts_of(prompt), as_text(prompt)) if text]


def capture(
    unet: object, clip: object, tokenizer: object, accelerator: Accelerator | None
) -> TextEncodingBaseline:
    """The baseline that `capture_text_encoding_baseline` gives."""
    encoders = tuple(read_host(lambda: find_encoders(clip)).value or ())
    tokenizers = read_host(lambda: _tokenizers(clip, tokenizer)).value or {}
    clip_state, unet_state = model_state(clip), model_state(unet)
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": time.time(),
        "memory": memory_now(snapshot),
        "clip": clip_state,
        "unet": unet_state,
        "tokenizers": {name: type(one).__name__ for name, one in tokenizers.items()},
        "encoders": [asdict(encoder) for encoder in encoders],
        "references": References(
            snapshot, reference_to(clip), reference_to(unet), tokenizers, encoders, accelerator
        ),
    }


def _tokenizers(clip: object, given: object) -> dict[str, Any]:
    if given is not None:
        return named_tokenizers(given)
    return find_tokenizers(clip) or named_tokenizers(getattr(clip, "tokenizer", None))


def references_of(baseline: Mapping[str, Any] | None) -> References | None:
    """What `capture` kept; None for a baseline that is not ours or was read from a file."""
    references = None if baseline is None else baseline.get("references")
    return references if isinstance(references, References) else None
