"""Text encoding: what the prompt became, and what it cost.

    baseline = capture_text_encoding_baseline(unet, clip)
    positive, negative = encode(...)
    analysis = analyze_text_encoding_results(baseline, positive, negative, prompt, negative_prompt, seconds)
    print_text_encoding_analysis_summary(analysis)

The functions change nothing, move nothing, and keep no model and no tensor alive. What cannot be read is
None, with the reason in the `unavailable` beside it; so is what needs an unknown figure, or a division by
nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator, read_nvml
from sigmascope.probes.reading import Reading, attempt, keeping_words, keeps_words
from sigmascope.records.memory import PeakMemory, PeakMemoryDict
from sigmascope.records.prompts import HIDDEN, PromptPrivacy, privacy_of, quoting
from sigmascope.stages.baseline import (
    TEXT_NOT_KEPT,
    Measurement,
    References,
    baseline_of,
    checked_seconds,
    cleanup_effectiveness,
    measure,
    model_state,
    references_of,
    state_now,
)
from sigmascope.stages.conditioning import (
    DumpFolder,
    EncoderFacts,
    conditioning_facts,
    dump_conditioning,
    find_encoders,
    find_tokenizers,
    named_tokenizers,
    read_conditioning,
)
from sigmascope.stages.prompt_facts import TokenCount, as_text, count_tokens, prompt_facts, texts_of
from sigmascope.stages.schema import (
    ConditioningDict,
    Efficiency,
    Performance,
    PromptFacts,
    TextEncodingAnalysis,
    TextEncodingBaseline,
    as_dict,
)
from sigmascope.stages.summary import (
    BAD,
    GOOD,
    Facts,
    Row,
    Section,
    check_row,
    error_rows,
    figure,
    mb,
    memory_rows,
    number,
    part,
    peak_rows,
    print_analysis,
    printable,
    reason_for,
    seconds,
    shape,
    shown,
    statistics_row,
    unknown,
)
from sigmascope.stages.text_validation import TextEncodingThresholds, validate

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
TEXT_TITLE = "TEXT ENCODING ANALYSIS SUMMARY"
_Counts = Mapping[str, int | None]
"""Of both prompts together: "character" and "token"."""
_NOT_APART = "the prompts were not timed separately"


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
    encoders = tuple(attempt(lambda: find_encoders(clip_model)).value or ())
    tokenizers = attempt(lambda: _tokenizers(clip_model, tokenizer)).value or {}
    clip_state, unet_state = model_state(clip_model), model_state(unet_model)
    models = {"clip": clip_model, "unet": unet_model}
    return {
        **baseline_of(TextReferences, accelerator, models, tokenizers=tokenizers, encoders=encoders),
        "clip": clip_state,
        "unet": unet_state,
        "tokenizers": {name: type(held).__name__ for name, held in tokenizers.items()},
        "encoders": [asdict(encoder) for encoder in encoders],
    }


@dataclass(frozen=True, slots=True, repr=False)
class TextReferences(References):
    """What a text encoding's baseline keeps. Models are referred to weakly; tokenizers are held."""

    tokenizers: Mapping[str, Any] = field(default_factory=dict)
    encoders: tuple[EncoderFacts, ...] = ()


def _tokenizers(clip: object, given: object) -> dict[str, Any]:
    if given is not None:
        return named_tokenizers(given)
    return find_tokenizers(clip) or named_tokenizers(getattr(clip, "tokenizer", None))


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
        positive_seconds: The part spent on the positive prompt, if measured separately.
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
    privacy = privacy_of(prompt_privacy)
    options = _Options(token_limit, statistics, prompt_privacy, dumps, tokens_seen)
    with keeping_words(privacy.keeps_words):
        if isinstance(error, str) and not keeps_words():
            error = TEXT_NOT_KEPT
        measured = measure(baseline, elapsed_time, peak_memory, error)
        known = references_of(baseline, TextReferences) or TextReferences(measured.snapshot, None)
        quotes = quoting(private_texts(positive_prompt, negative_prompt), prompt_privacy)
        prompts: dict[str, PromptFacts] = {
            "positive": _prompt_facts(positive_prompt, known, options),
            "negative": _prompt_facts(negative_prompt, known, options),
        }
        positive = _conditioning_facts("positive", positive_cond, positive_prompt, known, quotes, options)
        negative = _conditioning_facts("negative", negative_cond, negative_prompt, known, quotes, options)
        clip = state_now(baseline, "clip")
        validation = validate(
            prompts,
            {"positive": positive, "negative": negative},
            clip,
            list(known.encoders),
            measured.impact,
            measured.seconds.value,
            thresholds or TextEncodingThresholds(),
        )
        counts = _count_both(prompts)
        success = error is None and validation["output"]["passed"] is True
        return {
            **measured.as_dict(success, "; ".join(validation["output"]["messages"])),
            "encoding_success": success,
            "positive_conditioning": positive,
            "negative_conditioning": negative,
            "text_processing": prompts,
            "performance": performance(measured, positive_seconds, negative_seconds, counts),
            "efficiency": efficiency(measured, counts, (positive, negative)),
            "model_state": {"clip": clip, "unet": state_now(baseline, "unet")},
            "memory_impact": measured.impact_dict(),
            "validation": validation,
        }


@dataclass(frozen=True, slots=True)
class _Options:
    """How to look at the results; see `analyze_text_encoding_results`."""

    token_limit: int | None
    statistics: bool | None
    prompt_privacy: PromptPrivacy
    dumps: DumpFolder | None
    tokens_seen: TokensSeen | None


def private_texts(*prompts: object) -> list[str]:
    """All texts that quote a prompt: each of a batch, and all of them in one."""
    return [text for prompt in prompts for text in (*texts_of(prompt), as_text(prompt)) if text]


def _prompt_facts(prompt: object, known: TextReferences, options: _Options) -> PromptFacts:
    texts = texts_of(prompt)
    if texts and options.tokens_seen is not None:
        counts, reason = options.tokens_seen(texts)
    else:
        counts, reason = count_tokens(texts, known.tokenizers, options.token_limit) if texts else ([], None)
    return prompt_facts(prompt, counts, reason, options.prompt_privacy)


def _conditioning_facts(
    which: str,
    conditioning: object,
    prompt: object,
    known: TextReferences,
    quotes: Callable[[str], bool],
    options: _Options,
) -> ConditioningDict:
    tensors, reason = read_conditioning(conditioning)
    facts = conditioning_facts(tensors, known.encoders, options.statistics, reason)
    if not privacy_of(options.prompt_privacy).keeps_words:
        for entry in (facts, *facts["entries"]):
            entry["metadata"] = _without_texts(entry["metadata"], quotes)
        for entry in facts["entries"]:
            entry["others"] = dict(_named(entry["others"], quotes))
    if options.dumps is None:
        facts["unavailable"]["tensor_dump"] = "not asked for"
    else:
        dump_conditioning(options.dumps, f"{which}_conditioning", tensors, facts, prompt)
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
    for index, (name, item) in enumerate(items.items()):
        is_plain = name.replace(".", "_").isidentifier() and not quotes(name)
        yield name if is_plain else f"item_{index}", item


def performance(
    measured: Measurement, positive_seconds: object, negative_seconds: object, counts: _Counts
) -> Performance:
    """Seconds in all, for each prompt, and by character and token of both prompts together."""
    total, why = measured.seconds.value, measured.seconds.reason
    by_count = {
        f"time_per_{what}": Reading(_ratio(total, count), why or _why_no_rate(what, count))
        for what, count in counts.items()
    }
    return as_dict(
        Performance,
        by_count,
        total_execution_time=measured.seconds,
        positive_encoding_time=Reading(checked_seconds(positive_seconds).value, _NOT_APART),
        negative_encoding_time=Reading(checked_seconds(negative_seconds).value, _NOT_APART),
    )


def _count_both(prompts: Mapping[str, PromptFacts]) -> _Counts:
    """Characters and tokens of both prompts together; of one, where only one was given; None if one is unknown."""
    given = [facts for facts in prompts.values() if facts["character_length"] is not None]
    characters = [facts["character_length"] for facts in given]
    tokens = [facts["token_count"] for facts in given]
    return {"character": _sum_of(characters), "token": _sum_of(tokens)}


def _sum_of(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _ratio(amount: int | float | None, by: int | float | None) -> float | None:
    return None if amount is None or not by else amount / by


def _why_no_rate(what: str, count: int | None) -> str:
    return f"the number of {what}s is unknown" if count is None else f"there are no {what}s"


def efficiency(
    measured: Measurement, counts: _Counts, conditionings: tuple[ConditioningDict, ...]
) -> Efficiency:
    """Rates, memory by character, how busy the device is now, and the share of memory given back.

    `gpu_utilization` is NVML's mean over its last sample period (1/6 to 1 s) for the device of the
    conditioning.
    """
    total = measured.seconds.value
    why = "it took no measurable time" if total == 0 else measured.seconds.reason
    sizes = [facts["total_size_mb"] for facts in conditionings if facts["total_size_mb"] is not None]
    device = next((facts["device"] for facts in conditionings if facts["device"]), None)
    characters = counts["character"]
    rates = {
        f"{what}s_per_second": Reading(_ratio(count, total), why or _why_no_rate(what, count))
        for what, count in counts.items()
    }
    return as_dict(
        Efficiency,
        rates,
        memory_per_character_mb=Reading(
            _ratio(sum(sizes), characters) if sizes else None,
            _why_no_rate("character", characters) if sizes else "there is no conditioning",
        ),
        gpu_utilization=_gpu_utilization(device),
        cleanup_effectiveness=cleanup_effectiveness(measured.peak, measured.impact),
    )


def _gpu_utilization(device: str | None) -> Reading[float]:
    if device is None or not device.startswith("cuda"):
        return Reading(None, "the conditioning is not on an NVIDIA device")
    facts = read_nvml(device)
    return Reading(facts.utilization_percent, facts.unavailable.get("utilization_percent"))


def print_text_encoding_analysis_summary(
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_text_encoding_results` gave, or the same read from a file; None prints an error line.
        console: Where to print; standard output by default, without colour if it is not a terminal.
    """
    print_analysis(TEXT_TITLE, analysis, text_sections, console)


def text_sections(analysis: Facts) -> Iterator[Section]:
    """Every section of the summary; an analysis that lacks a part lacks its section."""
    yield Section("📋", "BASIC INFORMATION", list(_basics(analysis)))
    prompts = part(analysis, "text_processing")
    for which in ("positive", "negative"):
        yield Section("📝", f"TEXT PROCESSING, {which.upper()}", list(_prompt(part(prompts, which))))
    for which in ("positive", "negative"):
        facts = part(analysis, f"{which}_conditioning")
        yield Section("📐", f"{which.upper()} CONDITIONING", list(_conditioning(facts)))
    yield Section("⚡", "PERFORMANCE", list(_performance(analysis)))
    yield Section("🔧", "MODEL STATE", list(_models(part(analysis, "model_state"))))
    yield Section("💾", "MEMORY IMPACT", list(memory_rows(analysis)))
    yield Section("📊", "PEAK MEMORY", list(peak_rows(analysis)))
    yield Section("🔒", "VALIDATION", list(_validation(part(analysis, "validation"))))
    yield Section("🚨", "ERRORS", list(error_rows(analysis)))


def _basics(analysis: Facts) -> Iterator[Row]:
    success = analysis.get("encoding_success")
    yield Row("Text encoding success", "YES" if success else "NO", GOOD if success else BAD)
    yield Row("Total execution time", figure(analysis, "elapsed_time", seconds))


def _prompt(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    if facts.get("character_length") is None:
        yield Row("Prompt", unknown(reason_for(facts, "character_length")))
        return
    text = facts.get("text_content")
    sha256 = facts.get("text_sha256")
    if text is not None:
        yield Row("Text", f"“{printable(text, 240)}”")
    else:
        hidden = f"kept as SHA-256 {sha256}" if sha256 else unknown(reason_for(facts, "text_content"))
        yield Row("Text", hidden)
    yield Row("Characters", number(facts["character_length"]))
    yield Row("Words", number(facts.get("word_count")))
    yield Row("Special characters", number(facts.get("special_characters")))
    yield Row("Tokens", figure(facts, "token_count", number))
    cut = facts.get("truncated_tokens")
    if cut:
        words = facts.get("truncated_words")
        named = f": {printable(' '.join(words), 160)}" if words else ""
        yield Row("Cut off", f"{number(cut)} tokens{named}", BAD)
    elif cut == 0:
        yield Row("Cut off", "nothing")
    weights = [
        f"{printable(w['text'] or '…', 40)} × {w['weight']:.4g}" for w in facts.get("prompt_weights") or ()
    ]
    if weights:
        yield Row("Weights", shown(weights))


def _conditioning(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    success = facts.get("status") == "success"
    yield Row("Status", str(facts.get("status", "")).upper(), GOOD if success else "")
    if not success:
        yield Row("Reason", unknown(reason_for(facts, "shape")))
        return
    yield Row("Shape", shape(facts.get("shape")))
    yield Row("Data type", printable(facts.get("dtype")))
    yield Row("Device", printable(facts.get("device")))
    yield Row("Size", mb(facts.get("size_mb")))
    yield Row("Elements", number(facts.get("num_elements")))
    yield Row("CLIP variant", printable(facts.get("clip_variant")))
    encoder = part(facts, "encoder")
    yield Row("Encoder", f"{printable(facts.get('encoder_family'))} ({printable(encoder.get('reason', ''))})")
    pooled = part(facts, "pooled")
    if pooled:
        yield Row("Pooled", f"{shape(pooled.get('shape'))} {printable(pooled.get('dtype'))}")
    entries = facts.get("entries") or ()
    if len(entries) > 1:
        yield Row("Entries", f"{len(entries)}, {mb(facts.get('total_size_mb'))} in all")
    if facts.get("metadata"):
        pairs = (f"{printable(k, 40)} {shown(v)}" for k, v in facts["metadata"].items())
        yield Row("Metadata", printable(", ".join(pairs)))
    yield from _statistics(facts)
    if facts.get("tensor_dump"):
        yield Row("Saved as", printable(facts["tensor_dump"]))


def _statistics(facts: Facts) -> Iterator[Row]:
    yield statistics_row(facts)
    numbers = part(facts, "statistics")
    broken = {name: numbers.get(key) for name, key in (("NaN", "nan_count"), ("Inf", "inf_count"))}
    if any(broken.values()):
        yield Row("Not finite", ", ".join(f"{count} {name}" for name, count in broken.items()), BAD)


def _performance(analysis: Facts) -> Iterator[Row]:
    times, rates = part(analysis, "performance"), part(analysis, "efficiency")
    labels = {
        "positive_encoding_time": "Positive prompt",
        "negative_encoding_time": "Negative prompt",
        "time_per_character": "By character",
        "time_per_token": "By token",
    }
    for name, label in labels.items() if times else ():
        yield Row(label, figure(times, name, seconds))
    if not rates:
        return
    yield Row("Characters per second", figure(rates, "characters_per_second", number))
    yield Row("Memory per character", figure(rates, "memory_per_character_mb", mb))
    yield Row("GPU utilization", figure(rates, "gpu_utilization", lambda busy: f"{busy:.0f} %"))
    given_back = figure(rates, "cleanup_effectiveness", lambda share: f"{100 * share:.0f} % of the growth")
    yield Row("Memory given back", given_back)


def _models(states: Facts) -> Iterator[Row]:
    for name, state in states.items():
        if not isinstance(state, Mapping):
            continue
        if state.get("class_type") is None:
            yield Row(name.upper(), unknown(reason_for(state, "class_type")))
            continue
        patches = state.get("patches_count")
        parts = [printable(state["class_type"]), f"on {printable(state.get('device'))}"]
        if patches is not None:
            parts.append(f"{patches} patches")
        changed = state.get("changed")
        parts.append(f"changed: {', '.join(changed)}" if changed else "unchanged" if changed == [] else "")
        yield Row(name.upper(), ", ".join(filter(None, parts)), BAD if changed else "")


def _validation(validation: Facts) -> Iterator[Row]:
    checks = {name: validation[name] for name in ("input", "output", "performance") if name in validation}
    checks |= part(validation, "compatibility")
    for name, check in checks.items():
        yield check_row(name.replace("_", " ").capitalize(), check)
        for message in check.get("messages", ()):
            yield Row("  ✗", printable(message), BAD)
    for note in validation.get("notes", ()):
        yield Row("Note", printable(note))
