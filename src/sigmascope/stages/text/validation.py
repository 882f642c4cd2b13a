"""Whether the inputs and outputs of a text encoding are sound and fit what will use them."""

from collections.abc import Iterator, Mapping

from sigmascope.records.snapshot import MemoryImpact
from sigmascope.stages.text.conditioning_facts import tensors_of
from sigmascope.stages.text.encoders import UNKNOWN_FAMILY, EncoderFacts
from sigmascope.stages.text.memory_checks import check_memory
from sigmascope.stages.text.thresholds import TextEncodingThresholds
from sigmascope.stages.text.typed import ConditioningDict, PromptFacts, TextProcessing, Validation
from sigmascope.stages.typed import Check, ModelStateDict

Conditionings = Mapping[str, ConditioningDict]


def validate(
    prompts: TextProcessing,
    conditionings: Conditionings,
    clip: ModelStateDict,
    encoders: list[EncoderFacts],
    memory: MemoryImpact | None,
    seconds: float | None,
    limits: TextEncodingThresholds,
) -> Validation:
    """All checks of SPEC section 4.

    Args:
        prompts: Facts of both prompts.
        conditionings: Facts of `positive` and `negative`.
        clip: The encoder's state after the encoding.
        encoders: What is known of it by class.
        memory: Before and after; None if there is no baseline.
        seconds: What the step took.
        limits: What the caller allows.
    """
    given = {"positive": prompts["positive"], "negative": prompts["negative"]}
    checks = {
        "input": check_of(_input(given, limits), known=given["positive"]["character_length"] is not None),
        "output": check_of(_output(conditionings, limits), known=True),
        "performance": check_of(_time(seconds, limits), known=seconds is not None),
    }
    compatibility = {
        "clip_model": _clip_model(clip, encoders),
        "tensor_dimensions": _dimensions(conditionings, encoders, limits),
        "device_placement": _placement(conditionings, clip, limits),
        "memory_threshold": check_memory(memory, limits),
    }
    all_checks = (*checks.values(), *compatibility.values())
    return {
        "success": all(check["passed"] is not False for check in all_checks),
        "input": checks["input"],
        "output": checks["output"],
        "performance": checks["performance"],
        "compatibility": {
            "clip_model": compatibility["clip_model"],
            "tensor_dimensions": compatibility["tensor_dimensions"],
            "device_placement": compatibility["device_placement"],
            "memory_threshold": compatibility["memory_threshold"],
        },
        "notes": [*_prompt_notes(given), *_conditioning_notes(conditionings)],
    }


def check_of(problems: Iterator[str], *, known: bool) -> Check:
    """A check: passed if there is no problem, None if nothing is known that could be one."""
    messages = list(problems)
    return {"passed": False if messages else True if known else None, "messages": messages}


def _input(prompts: Mapping[str, PromptFacts], limits: TextEncodingThresholds) -> Iterator[str]:
    for which, facts in prompts.items():
        length = facts["character_length"]
        if length is None:
            reason = facts["unavailable"]["character_length"]
            if reason != "no prompt was given" or which == "positive":
                yield f"{which}: {reason}"
            continue
        if limits.max_prompt_characters is not None and length > limits.max_prompt_characters:
            yield f"{which}: {length} characters, allowed are {limits.max_prompt_characters}"
        cut, allowed = facts["truncated_tokens"], limits.max_truncated_tokens
        if cut is not None and allowed is not None and cut > allowed:
            yield f"{which}: {cut} of {facts['token_count']} tokens were cut off, allowed are {allowed}"
        if which == "positive" and length == 0 and not limits.allow_empty_prompt:
            yield f"{which}: the prompt is empty"


def _output(conditionings: Conditionings, limits: TextEncodingThresholds) -> Iterator[str]:
    for which, facts in conditionings.items():
        if facts["status"] != "success":
            if which == "positive" or facts["status"] != "missing":
                yield f"{which}: {facts['unavailable']['shape']}"
            continue
        if facts["num_elements"] == 0:
            yield f"{which}: the conditioning has no elements"
        for tensor in (part for entry in facts["entries"] for part in tensors_of(entry)):
            numbers = tensor["statistics"]
            for name, count in (("NaN", numbers["nan_count"]), ("Inf", numbers["inf_count"])):
                if count:
                    yield f"{which}: {count} of {tensor['num_elements']} elements are {name}"
        numbers_or_none = facts["statistics"]
        largest = (
            None if numbers_or_none is None else _largest(numbers_or_none["min"], numbers_or_none["max"])
        )
        if largest is None:
            continue
        if largest == 0:
            yield f"{which}: every element is 0"
        if limits.max_absolute_value is not None and largest > limits.max_absolute_value:
            yield f"{which}: the largest element is {largest:.4g}, allowed is {limits.max_absolute_value:.4g}"


def _largest(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else max(abs(low), abs(high))


def _time(seconds: float | None, limits: TextEncodingThresholds) -> Iterator[str]:
    if seconds is not None and limits.max_seconds is not None and seconds > limits.max_seconds:
        yield f"it took {seconds:.3f} s, allowed are {limits.max_seconds:.3f} s"


def _clip_model(clip: ModelStateDict, encoders: list[EncoderFacts]) -> Check:
    if clip["model_id"] is None:
        return {"passed": None, "messages": []}
    problems = [
        f"{name} is different from before the encoding"
        for name in clip["changed"] or ()
        if name not in ("device", "model_id")
    ]
    if not any(encoder.family != UNKNOWN_FAMILY for encoder in encoders):
        return {"passed": False if problems else None, "messages": problems}
    return check_of(iter(problems), known=True)


def _dimensions(
    conditionings: Conditionings, encoders: list[EncoderFacts], limits: TextEncodingThresholds
) -> Check:
    known = {which: facts for which, facts in conditionings.items() if facts["shape"]}
    return check_of(_shape_problems(known, encoders, limits), known=bool(known))


def _shape_problems(
    known: Conditionings, encoders: list[EncoderFacts], limits: TextEncodingThresholds
) -> Iterator[str]:
    possible = _possible_widths(encoders)
    for which, facts in known.items():
        width, tokens = (facts["shape"] or [0])[-1], facts["sequence_length"]
        if limits.expected_width is not None and width != limits.expected_width:
            yield f"{which}: width {width}, expected is {limits.expected_width}"
        if limits.expected_tokens is not None and tokens != limits.expected_tokens:
            yield f"{which}: {tokens} tokens, expected are {limits.expected_tokens}"
        if limits.expected_dtype is not None and facts["dtype"] != limits.expected_dtype:
            yield f"{which}: dtype {facts['dtype']}, expected is {limits.expected_dtype}"
        if possible and width not in possible:
            yield f"{which}: width {width}, but the encoder gives {' or '.join(map(str, sorted(possible)))}"
    widths = {(facts["shape"] or [0])[-1] for facts in known.values()}
    if len(widths) > 1:
        yield f"positive and negative are of different widths: {', '.join(map(str, sorted(widths)))}"


def _possible_widths(encoders: list[EncoderFacts]) -> set[int]:
    """The widths of the encoders and that of all CLIPs joined; empty if one is unknown."""
    if not encoders or any(encoder.width is None for encoder in encoders):
        return set()
    widths = {encoder.width or 0 for encoder in encoders}
    return widths | {sum(encoder.width or 0 for encoder in encoders if encoder.is_clip)} - {0}


def _placement(conditionings: Conditionings, clip: ModelStateDict, limits: TextEncodingThresholds) -> Check:
    devices = {which: facts["device"] for which, facts in conditionings.items() if facts["device"]}

    def problems() -> Iterator[str]:
        expected = limits.expected_device
        for which, device in devices.items():
            if expected is not None and device != expected and device.partition(":")[0] != expected:
                yield f"{which}: on {device}, expected is {expected}"
        if len(set(devices.values())) > 1:
            yield "positive and negative are on different devices: " + ", ".join(devices.values())
        if clip["device"] == "meta":
            yield "the encoder has no weights: it is on the meta device"

    return check_of(problems(), known=bool(devices))


def _prompt_notes(prompts: Mapping[str, PromptFacts]) -> Iterator[str]:
    for which, facts in prompts.items():
        if facts["character_length"] is None:
            continue
        if not facts["word_count"]:
            yield f"{which}: the prompt has no words"
        if facts["control_characters"]:
            yield f"{which}: {facts['control_characters']} invisible control characters in the prompt"
        literal = any(count["chunks"] is None for count in facts["tokenizers"].values())
        if facts["prompt_weights"] and literal:
            yield f"{which}: weights such as (red:1.3) are plain text to this tokenizer"
        for name, count in facts["tokenizers"].items():
            if count["truncated_tokens"] and count["truncated_tokens"] != facts["truncated_tokens"]:
                yield f"{which}: {name} cut off {count['truncated_tokens']} of {count['token_count']} tokens"


def _conditioning_notes(conditionings: Conditionings) -> Iterator[str]:
    for which, facts in conditionings.items():
        unread = facts["unavailable"].get("nan_count")
        if facts["status"] == "success" and unread is not None:
            yield f"{which}: not looked at for NaN and Inf ({unread})"
        if facts["encoder"] is not None and facts["encoder"]["conflict"]:
            yield f"{which}: {facts['encoder']['conflict']}"
    lengths = {facts["sequence_length"] for facts in conditionings.values() if facts["sequence_length"]}
    if len(lengths) > 1:
        yield f"positive and negative have different lengths: {', '.join(map(str, sorted(lengths)))} tokens"
