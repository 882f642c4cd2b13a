"""Which figures of a result are None without a reason in `unavailable`, and which reasons are about nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

THERE_IS_NONE = {
    "error": "nothing was raised, and nothing is wrong",
    "exception_details": "nothing was raised",
    "error_type": "nothing was raised",
    "reason": "of an attempt: it did not fail",
    "changed": "a baseline is compared with nothing",
    "wrapper_class": "nothing wraps the model",
    "pooled": "the conditioning has no pooled output",
    "attention_mask": "the conditioning has no mask",
    "conflict": "all evidence agrees",
    "chunks": "the tokenizer cuts, and spreads nothing",
    "tile": "nothing was cut into tiles",
    "pictures": "a decoding's baseline has a latent",
    "latent": "an encoding's baseline has pictures",
    "passed": "there was nothing to check",
    "largest_relative_change": "nothing drifted",
    "rank": "of a change without rank",
    "alpha": "of a change without alpha",
    "cause": "nothing that is known keeps the change from acting",
    "source": "ComfyUI names no LoRA",
    "file_family": "the file's names are of no family that is known",
    "model_family": "the model is of no family that is known",
    "family_doubt": "the family is certain, or of no family that is known",
    "path": "a verdict on tensors that are in no file",
    "why_nothing": "of changes that do not cancel each other",
    "format": "a verdict on a file that cannot be read, which its error says",
    "strength_patch": "its reason is with the first of the weight's `patches`",
    "psnr_db": "the images are identical, which would be infinite",
    "frames": "a picture has no frames",
    "current_device": "work goes to no accelerator",
    "wrapper_class_name": "nothing wraps the model",
    "module": "the component has no weights",
    **dict.fromkeys(("callback", "num_frames", "seed"), "the call was given none"),
    **dict.fromkeys(("component", "component_bytes"), "no component was at work"),
    **dict.fromkeys(("colour", "replaced"), "no picture is of one colour, or was replaced"),
    **dict.fromkeys(
        ("channels_last", "compiled", "layerwise_casting", "offload", "slicing", "tiling"),
        "the component has no such switch",
    ),
}
ABOUT_A_PART = {
    "accelerators": "the tuple is empty",
    "keys_compared": "some weights could not be looked at",
    "keys": "some weights were left out of a comparison",
    **dict.fromkeys(("delta_norm", "relative_change"), "some weights are not in the sum"),
    **dict.fromkeys(("patch", "tensors", "diff", "adapter_type"), "the change itself could not be read"),
    **dict.fromkeys(
        ("function", "offset", "dora_scale", "weight_shape"), "parts that the dict does not hold"
    ),
}


def told(value: object, place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every dict with `unavailable`, and where it is."""
    if isinstance(value, Mapping):
        if isinstance(value.get("unavailable"), Mapping):
            yield place, value
        for name, inner in value.items():
            if name not in ("unavailable", "references", "captured", "config"):
                yield from told(inner, f"{place}.{name}")
    for inner in value if isinstance(value, list) else ():
        yield from told(inner, place)


def gaps(value: object, path: str = "") -> Iterator[str]:
    """Paths to what is None in a dict, and in the dicts in it that have no `unavailable` of their own."""
    if value is None:
        yield path
    if isinstance(value, Mapping) and not (path and isinstance(value.get("unavailable"), Mapping)):
        for name, inner in value.items():
            if name not in ("unavailable", "references", "captured", "config"):
                yield from gaps(inner, f"{path}.{name}".lstrip("."))


def explains(name: str, gap: str) -> bool:
    """Whether a reason of that name is about a gap: by its path, by a dict around it, or by its last name."""
    return f"{gap}.".startswith(f"{name}.") or gap.rpartition(".")[2] == name


def without_reason(result: object) -> set[str]:
    return {
        f"{place}: {gap}"
        for place, facts in told(result)
        for gap in gaps(facts)
        if gap.rpartition(".")[2] not in THERE_IS_NONE
        and not any(explains(name, gap) for name in facts["unavailable"])
    }


def about_nothing(result: object) -> set[str]:
    return {
        f"{place}: {name}"
        for place, facts in told(result)
        for name in facts["unavailable"]
        if name not in ABOUT_A_PART and not any(explains(name, gap) for gap in gaps(facts))
    }
