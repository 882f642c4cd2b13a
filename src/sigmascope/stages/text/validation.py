"""Whether the inputs and outputs of a text encoding are sound and fit what will use them."""

from collections.abc import Iterator, Mapping

from sigmascope.records.snapshot import MemoryImpact
from sigmascope.stages.text.conditioning_facts import tensors_of
from sigmascope.stages.text.dimension_checks import (
    check_dimensions,
    check_of,
    devices_of,
    embeddings_of,
    largest_value,
    width_notes,
)
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
        "tensor_dimensions": check_dimensions(conditionings, encoders, limits),
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
        "notes": [
            *_prompt_notes(given),
            *_conditioning_notes(conditionings),
            *width_notes(conditionings, encoders),
        ],
    }


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
        if any(tensor["num_elements"] == 0 for tensor in embeddings_of(facts)):
            yield f"{which}: the conditioning has no elements"
        for tensor in (part for entry in facts["entries"] for part in tensors_of(entry)):
            numbers = tensor["statistics"]
            for name, count in (("NaN", numbers["nan_count"]), ("Inf", numbers["inf_count"])):
                if count:
                    yield f"{which}: {count} of {tensor['num_elements']} elements are {name}"
        largest = largest_value(facts)
        if largest == 0 and which == "positive":
            yield f"{which}: every element is 0"
        allowed = limits.max_absolute_value
        if largest is not None and allowed is not None and largest > allowed:
            yield f"{which}: the largest element is {largest:.4g}, allowed is {allowed:.4g}"


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


def _placement(conditionings: Conditionings, clip: ModelStateDict, limits: TextEncodingThresholds) -> Check:
    devices = {which: devices_of(facts) for which, facts in conditionings.items() if facts["entries"]}
    every = dict.fromkeys(device for found in devices.values() for device in found)

    def problems() -> Iterator[str]:
        expected = limits.expected_device
        for which, device in ((which, device) for which, found in devices.items() for device in found):
            if expected is not None and device != expected and device.partition(":")[0] != expected:
                yield f"{which}: on {device}, expected is {expected}"
        for which, found in devices.items():
            if len(found) > 1:
                yield f"{which}: its tensors are on different devices: {', '.join(found)}"
        if len(every) > 1 and all(len(found) == 1 for found in devices.values()):
            yield "positive and negative are on different devices: " + ", ".join(every)
        if clip["device"] == "meta":
            yield "the encoder has no weights: it is on the meta device"

    return check_of(problems(), known=bool(every))


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
        if which == "negative" and largest_value(facts) == 0:
            yield f"{which}: every element is 0, as pipelines make it of no prompt"
        if facts["encoder"] is not None and facts["encoder"]["conflict"]:
            yield f"{which}: {facts['encoder']['conflict']}"
    lengths = {facts["sequence_length"] for facts in conditionings.values() if facts["sequence_length"]}
    if len(lengths) > 1:
        yield f"positive and negative have different lengths: {', '.join(map(str, sorted(lengths)))} tokens"
