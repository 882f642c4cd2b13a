"""Whether every tensor of the conditionings has the sizes that its encoder gives and the caller expects."""

from collections.abc import Iterator, Mapping, Sequence

from sigmascope.stages.text.encoders import EncoderFacts
from sigmascope.stages.text.thresholds import TextEncodingThresholds
from sigmascope.stages.text.typed import ConditioningDict, TensorDict
from sigmascope.stages.typed import Check

Conditionings = Mapping[str, ConditioningDict]


def check_of(problems: Iterator[str], *, known: bool) -> Check:
    """A check: passed if there is no problem, None if nothing is known that could be one."""
    messages = list(dict.fromkeys(problems))
    return {"passed": False if messages else True if known else None, "messages": messages}


def embeddings_of(facts: ConditioningDict) -> list[TensorDict]:
    """The embeddings of every entry: those of regional and scheduled prompts too."""
    return [entry["tensor"] for entry in facts["entries"] if entry["tensor"] is not None]


def devices_of(facts: ConditioningDict) -> list[str]:
    """Where embeddings and pooled outputs are. Masks of regions may be elsewhere."""
    pooled = [entry["pooled"] for entry in facts["entries"] if entry["pooled"] is not None]
    return list(dict.fromkeys(tensor["device"] for tensor in (*embeddings_of(facts), *pooled)))


def largest_value(facts: ConditioningDict) -> float | None:
    """The largest |element| of all embeddings; None if one was not looked at or has none that is finite."""
    bounds = [(one["statistics"]["min"], one["statistics"]["max"]) for one in embeddings_of(facts)]
    known = [max(abs(low), abs(high)) for low, high in bounds if low is not None and high is not None]
    return max(known) if known and len(known) == len(bounds) else None


def check_dimensions(
    conditionings: Conditionings, encoders: Sequence[EncoderFacts], limits: TextEncodingThresholds
) -> Check:
    """Width, tokens and dtype of every embedding."""
    known = {which: facts for which, facts in conditionings.items() if facts["shape"]}
    return check_of(_dimension_problems(known, encoders, limits), known=bool(known))


def width_notes(conditionings: Conditionings, encoders: Sequence[EncoderFacts]) -> Iterator[str]:
    """What explains a width that no encoder has by itself."""
    for which, width in _widths(conditionings):
        words = _explained(width, encoders)
        if words:
            yield f"{which}: {words}"


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
        yield f"width {width}, expected is {limits.expected_width}"
    if limits.expected_tokens is not None and tokens != limits.expected_tokens:
        yield f"{tokens} tokens, expected are {limits.expected_tokens}"
    if limits.expected_dtype is not None and tensor["dtype"] != limits.expected_dtype:
        yield f"dtype {tensor['dtype']}, expected is {limits.expected_dtype}"


def _widths(conditionings: Conditionings) -> list[tuple[str, int]]:
    """The different widths of each conditioning."""
    pairs = (
        (which, tensor["shape"][-1])
        for which, facts in conditionings.items()
        for tensor in embeddings_of(facts)
        if tensor["shape"]
    )
    return list(dict.fromkeys(pairs))


def _possible_widths(encoders: Sequence[EncoderFacts]) -> set[int]:
    """The widths of the encoders and that of all CLIPs joined; empty if one is unknown."""
    if not encoders or any(encoder.width is None for encoder in encoders):
        return set()
    widths = {encoder.width or 0 for encoder in encoders}
    return (widths | {_joint_width(encoders)}) - {0}


def _joint_width(encoders: Sequence[EncoderFacts]) -> int:
    return sum(encoder.width or 0 for encoder in encoders if encoder.is_clip)


def _explained(width: int, encoders: Sequence[EncoderFacts]) -> str | None:
    """How encoders of other widths come to this one, if pipelines do that."""
    possible = _possible_widths(encoders)
    if not possible or width in possible:
        return None
    joint = _joint_width(encoders)
    if sum(encoder.is_clip for encoder in encoders) > 1 and width > joint:
        return f"width {width} is the CLIPs' {joint} filled up, as SD 3 does without its T5"
    for encoder in encoders:
        if not encoder.is_clip and encoder.width and width % encoder.width == 0:
            return f"width {width} is {width // encoder.width} layers of {encoder.family} joined"
    return None
