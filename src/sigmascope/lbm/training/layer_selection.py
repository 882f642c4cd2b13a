"""Partial names of layers, as `trainable_lora_modules` takes them: which layers each one means."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from sigmascope.errors import ConfigError

KEY = "trainable_lora_modules"


def select_layers(
    layers: Sequence[str], patterns: Sequence[str] | None, *, others: Collection[str] = (), where: str
) -> tuple[str, ...]:
    """Give the layers that any of the partial names is a part of, in the layers' order.

    A partial name may be any run of characters of a full name (`attn1`, `ff.net`, `up_blocks.1`, or a whole line
    of `lora_layer_names.txt`). A number at its end or start is a whole number: `transformer_blocks.1` is not
    `transformer_blocks.10`.

    Args:
        layers: Full names that can be chosen, such as `denoiser.conv_in`.
        patterns: Partial names; None chooses all.
        others: Full names that are known but cannot be chosen, to say so.
        where: What has the layers, for messages.

    Raises:
        ConfigError: Names each partial name that means no layer, with names that are near.
    """
    if patterns is None:
        return tuple(layers)
    chosen: set[str] = set()
    wrong = []
    for pattern in patterns:
        found = [layer for layer in layers if matches(pattern, layer)]
        chosen.update(found)
        if not found:
            wrong.append(_not_found(pattern, layers, others))
    if wrong:
        raise ConfigError(
            f"{KEY}: {'; '.join(wrong)}.",
            hint=f"{where} has {len(layers)} modules, such as {', '.join(list(layers)[:2])}.",
        )
    return tuple(layer for layer in layers if layer in chosen)


def matches(pattern: str, layer: str) -> bool:
    """Whether a partial name is a part of a full one."""
    if not pattern.strip():
        return False
    before = r"(?<!\d)" if pattern[0].isdigit() else ""
    after = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(f"{before}{re.escape(pattern)}{after}", layer) is not None


def matched_counts(layers: Iterable[str], patterns: Sequence[str]) -> Mapping[str, int]:
    """How many layers each partial name means."""
    layers = list(layers)
    return {pattern: sum(matches(pattern, layer) for layer in layers) for pattern in patterns}


def _not_found(pattern: str, layers: Sequence[str], others: Collection[str]) -> str:
    elsewhere = sum(matches(pattern, layer) for layer in others)
    if elsewhere:
        return f"{pattern!r} means {elsewhere} layers of the model, none of which the LoRA file has"
    near = difflib.get_close_matches(pattern, sorted(_runs(layers, pattern.count(".") + 1)), n=2, cutoff=0.5)
    guess = f" (near: {', '.join(near)})" if near else ""
    return f"{pattern!r} is part of no layer's name{guess}"


def _runs(layers: Iterable[str], length: int) -> set[str]:
    """Every run of so many parts between dots."""
    parts = [layer.split(".") for layer in layers]
    return {".".join(one[i : i + length]) for one in parts for i in range(len(one) - length + 1)}
