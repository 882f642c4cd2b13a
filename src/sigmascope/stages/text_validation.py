"""Whether a text encoding is sound and fits what will use it, by limits that the caller may set.

`TextEncodingThresholds` has the limits; what is None there is not checked. Every tensor of the conditionings
must have the sizes that its encoder gives and the caller expects, and memory afterwards must keep to the
limits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmascope.records.memory import MemoryImpact, change, mib
from sigmascope.stages.baseline import check_of, device_before_and_after
from sigmascope.stages.conditioning import (
    UNKNOWN_FAMILY,
    EncoderFacts,
    is_one_of_several,
    joined_layers,
    tensors_of,
)
from sigmascope.stages.schema import (
    Check,
    ConditioningDict,
    ModelStateDict,
    PromptFacts,
    TensorDict,
    Validation,
)

Conditionings = Mapping[str, ConditioningDict]


@dataclass(frozen=True, slots=True)
class TextEncodingThresholds:
    """Limits that the validation holds a text encoding to; each of them is the caller's to set.

    Args:
        max_seconds: For the whole step.
        max_prompt_characters: For each of both prompts; those of a batch together.
        max_truncated_tokens: How many tokens of a prompt, or of all in a batch, may be cut off.
        max_ram_percent: Use of the machine's RAM after the step, 0-100.
        max_gpu_percent: Use of the device's memory after the step, by everybody, 0-100.
        max_rss_growth_mb: How much the process may have grown, in MiB.
        max_gpu_growth_mb: How much PyTorch's allocator may have grown on the device in use, in MiB.
        max_absolute_value: For every element of a conditioning.
        expected_width: Of the conditioning: what the denoiser's cross attention takes.
        expected_tokens: Length of the sequence.
        expected_device: Such as "cuda:0", or "cuda" for any of them.
        expected_dtype: Such as "bfloat16".
        allow_empty_prompt: Whether the positive prompt may be empty.
    """

    max_seconds: float | None = None
    max_prompt_characters: int | None = None
    max_truncated_tokens: int | None = 0
    max_ram_percent: float | None = 95.0
    max_gpu_percent: float | None = 95.0
    max_rss_growth_mb: float | None = None
    max_gpu_growth_mb: float | None = None
    max_absolute_value: float | None = None
    expected_width: int | None = None
    expected_tokens: int | None = None
    expected_device: str | None = None
    expected_dtype: str | None = None
    allow_empty_prompt: bool = True


def validate(
    prompts: Mapping[str, PromptFacts],
    conditionings: Conditionings,
    clip: ModelStateDict,
    encoders: list[EncoderFacts],
    memory: MemoryImpact | None,
    seconds: float | None,
    limits: TextEncodingThresholds,
) -> Validation:
    """All checks: of the prompts, the conditionings, the time, and of what fits together."""
    known = prompts["positive"]["character_length"] is not None
    ram_known = memory is not None and memory.current.ram_percent_used() is not None
    shaped = {which: facts for which, facts in conditionings.items() if facts["shape"]}
    validation: Validation = {
        "success": True,
        "input": check_of(_prompt_problems(prompts, limits), known=known),
        "output": check_of(_conditioning_problems(conditionings, limits), known=True),
        "performance": check_of(_time_problems(seconds, limits), known=seconds is not None),
        "compatibility": {
            "clip_model": _check_clip_model(clip, encoders),
            "tensor_dimensions": check_of(_dimension_problems(shaped, encoders, limits), known=bool(shaped)),
            "device_placement": _check_placement(conditionings, clip, limits),
            "memory_threshold": check_of(_memory_problems(memory, limits), known=ram_known),
        },
        "notes": [
            *_prompt_notes(prompts),
            *_conditioning_notes(conditionings),
            *width_notes(conditionings, encoders),
        ],
    }
    checks: list[Any] = [validation[name] for name in ("input", "output", "performance")]
    checks += validation["compatibility"].values()
    validation["success"] = all(check["passed"] is not False for check in checks)
    return validation


def _prompt_problems(prompts: Mapping[str, PromptFacts], limits: TextEncodingThresholds) -> Iterator[str]:
    for which, facts in prompts.items():
        length = facts["character_length"]
        if length is None:
            reason = facts["unavailable"]["character_length"]
            if reason != "no prompt was given" or which == "positive":
                yield f"{which}: {reason}"
            continue
        if limits.max_prompt_characters is not None and length > limits.max_prompt_characters:
            yield f"{which}: {length} characters, more than the limit of {limits.max_prompt_characters}"
        cut, allowed = facts["truncated_tokens"], limits.max_truncated_tokens
        if cut is not None and allowed is not None and cut > allowed:
            yield f"{which}: {cut} of {facts['token_count']} tokens were cut off, more than the limit of {allowed}"
        if which == "positive" and length == 0 and not limits.allow_empty_prompt:
            yield f"{which}: the prompt is empty"


def _conditioning_problems(conditionings: Conditionings, limits: TextEncodingThresholds) -> Iterator[str]:
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
            yield f"{which}: the largest element is {largest:.4g}, above the limit of {allowed:.4g}"


def _time_problems(seconds: float | None, limits: TextEncodingThresholds) -> Iterator[str]:
    if seconds is not None and limits.max_seconds is not None and seconds > limits.max_seconds:
        yield f"it took {seconds:.3f} s, more than the limit of {limits.max_seconds:.3f} s"


def _check_clip_model(clip: ModelStateDict, encoders: list[EncoderFacts]) -> Check:
    if clip["model_id"] is None:
        return {"passed": None, "messages": []}
    problems = [
        f"{name} changed during the encoding"
        for name in clip["changed"] or ()
        if name not in ("device", "model_id")
    ]
    return check_of(problems, known=any(encoder.family != UNKNOWN_FAMILY for encoder in encoders))


def _check_placement(
    conditionings: Conditionings, clip: ModelStateDict, limits: TextEncodingThresholds
) -> Check:
    devices = {which: devices_of(facts) for which, facts in conditionings.items() if facts["entries"]}
    every = dict.fromkeys(device for used in devices.values() for device in used)

    def problems() -> Iterator[str]:
        expected = limits.expected_device
        for which, device in ((which, device) for which, used in devices.items() for device in used):
            if expected is not None and device != expected and device.partition(":")[0] != expected:
                yield f"{which}: on {device}, expected {expected}"
        for which, used in devices.items():
            if len(used) > 1:
                yield f"{which}: its tensors are on different devices: {', '.join(used)}"
        if len(every) > 1 and all(len(used) == 1 for used in devices.values()):
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
            yield f"{which}: not checked for NaN and Inf ({unread})"
        if which == "negative" and largest_value(facts) == 0:
            yield f"{which}: every element is 0, as in pipelines without a prompt"
        if facts["encoder"] is not None and facts["encoder"]["conflict"]:
            yield f"{which}: {facts['encoder']['conflict']}"
    lengths = {facts["sequence_length"] for facts in conditionings.values() if facts["sequence_length"]}
    if len(lengths) > 1:
        yield f"positive and negative have different lengths: {', '.join(map(str, sorted(lengths)))} tokens"


def _dimension_problems(
    known: Conditionings, encoders: Sequence[EncoderFacts], limits: TextEncodingThresholds
) -> Iterator[str]:
    for which, facts in known.items():
        for tensor in embeddings_of(facts):
            yield from (f"{which}: {problem}" for problem in _unexpected(tensor, limits))
    possible = _possible_widths(encoders)
    for which, width in _widths(known):
        if possible and width not in possible and not _explained(width, encoders):
            yield f"{which}: width {width}, but the encoder gives {' or '.join(map(str, sorted(possible)))}"
    widths = {width for _, width in _widths(known)}
    if len(widths) > 1:
        yield f"the conditionings are of different widths: {', '.join(map(str, sorted(widths)))}"


def _unexpected(tensor: TensorDict, limits: TextEncodingThresholds) -> Iterator[str]:
    shape = tensor["shape"]
    width, tokens = (shape or [0])[-1], shape[-2] if len(shape) >= 2 else None
    if limits.expected_width is not None and width != limits.expected_width:
        yield f"width {width}, expected {limits.expected_width}"
    if limits.expected_tokens is not None and tokens != limits.expected_tokens:
        yield f"{tokens} tokens, expected {limits.expected_tokens}"
    if limits.expected_dtype is not None and tensor["dtype"] != limits.expected_dtype:
        yield f"dtype {tensor['dtype']}, expected {limits.expected_dtype}"


def _possible_widths(encoders: Sequence[EncoderFacts]) -> set[int]:
    """The widths of the encoders and that of all CLIPs joined; empty if one is unknown."""
    if not encoders or any(encoder.width is None for encoder in encoders):
        return set()
    widths = {encoder.width or 0 for encoder in encoders}
    return (widths | {_joint_width(encoders)}) - {0}


def _joint_width(encoders: Sequence[EncoderFacts]) -> int:
    return sum(encoder.width or 0 for encoder in encoders if encoder.is_clip)


def _widths(conditionings: Conditionings) -> list[tuple[str, int]]:
    """The different widths of each conditioning."""
    pairs = (
        (which, tensor["shape"][-1])
        for which, facts in conditionings.items()
        for tensor in embeddings_of(facts)
        if tensor["shape"]
    )
    return list(dict.fromkeys(pairs))


def _explained(width: int, encoders: Sequence[EncoderFacts]) -> str | None:
    """How encoders of other widths come to this one, if pipelines do that."""
    possible = _possible_widths(encoders)
    if not possible or width in possible:
        return None
    joint = _joint_width(encoders)
    if sum(encoder.is_clip for encoder in encoders) > 1 and width > joint:
        return f"width {width} is the CLIPs' {joint}, zero-padded as in SD 3 without T5"
    for encoder in encoders:
        layers = joined_layers(width, encoder)
        if layers is not None:
            return f"width {width} is {layers} layers of {encoder.family} joined"
    if is_one_of_several(width, encoders):
        (encoder,) = encoders
        return f"width {width} takes more than the {encoder.family} ({encoder.width}) that was given: it is one of several"
    return None


def width_notes(conditionings: Conditionings, encoders: Sequence[EncoderFacts]) -> Iterator[str]:
    """What explains a width that no encoder has by itself."""
    for which, width in _widths(conditionings):
        words = _explained(width, encoders)
        if words:
            yield f"{which}: {words}"


def _memory_problems(memory: MemoryImpact | None, limits: TextEncodingThresholds) -> Iterator[str]:
    """Use of RAM and device now, and growth since the baseline, against the limits."""
    if memory is None:
        return
    before, after = memory.baseline, memory.current
    device, gpu_before, gpu_after = device_before_and_after(memory)
    rss_growth = mib(change(before.process_rss_bytes, after.process_rss_bytes))
    gpu_growth = mib(change(gpu_before.allocated_bytes, gpu_after.allocated_bytes))
    figures = (
        ("RAM in use", after.ram_percent_used(), limits.max_ram_percent, "%"),
        (f"memory of {device} in use", gpu_after.used_percent(), limits.max_gpu_percent, "%"),
        ("growth of the process", rss_growth, limits.max_rss_growth_mb, "MB"),
        (f"growth on {device}", gpu_growth, limits.max_gpu_growth_mb, "MB"),
    )
    for what, amount, allowed, unit in figures:
        if amount is not None and allowed is not None and amount > allowed:
            yield f"{what}: {amount:.1f} {unit}, more than the limit of {allowed:.1f} {unit}"


def embeddings_of(facts: ConditioningDict) -> list[TensorDict]:
    """The embeddings of every entry: those of regional and scheduled prompts too."""
    return [entry["tensor"] for entry in facts["entries"] if entry["tensor"] is not None]


def devices_of(facts: ConditioningDict) -> list[str]:
    """Where embeddings and pooled outputs are. Masks of regions may be elsewhere."""
    pooled = [entry["pooled"] for entry in facts["entries"] if entry["pooled"] is not None]
    return list(dict.fromkeys(tensor["device"] for tensor in (*embeddings_of(facts), *pooled)))


def largest_value(facts: ConditioningDict) -> float | None:
    """The largest |element| of all embeddings; None if one was not looked at or has none that is finite."""
    bounds = [(tensor["statistics"]["min"], tensor["statistics"]["max"]) for tensor in embeddings_of(facts)]
    known = [max(abs(low), abs(high)) for low, high in bounds if low is not None and high is not None]
    return max(known) if known and len(known) == len(bounds) else None
