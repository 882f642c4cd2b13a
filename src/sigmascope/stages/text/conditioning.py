"""Find the tensors of a conditioning, whatever they are nested in.

Known forms: a bare tensor or array; ComfyUI's `[[tensor, {…}], …]`, where regional and scheduled prompts
are several entries; what diffusers' `encode_prompt` gives, whole or in part; transformers' outputs; any
mapping, dataclass, named tuple or list of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sigmascope.stages.text.conditioning_entry import Entry, entry_of
from sigmascope.stages.text.nesting import Leaf, as_tensor, leaves_of, plain_values

_MOST_LISTS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """All entries, and in what they were: "tensor", "comfyui", "mapping", "sequence", "none" or a class."""

    structure: str
    entries: tuple[Entry, ...] = ()

    @property
    def first(self) -> Entry:
        """The first entry with embeddings; an empty one if there is none."""
        return next((entry for entry in self.entries if entry.tensor is not None), Entry(None))


def find_conditioning(conditioning: object) -> Found:
    """The tensors of a conditioning, by entry. Nothing is copied or moved.

    Raises:
        RecursionError, RuntimeError, TypeError, ValueError, AttributeError: Its own code fails when read.
    """
    if conditioning is None:
        return Found("none")
    pairs = _comfyui_pairs(conditioning)
    if pairs is not None:
        return Found("comfyui", tuple(_comfyui_entry(*pair) for pair in pairs))
    leaves = list(leaves_of(conditioning))
    structure = _structure(conditioning)
    if not leaves:
        return Found(structure)
    if structure == "sequence" and len(leaves) > 1 and _is_one_text_an_item(leaves, conditioning):
        return Found(structure, tuple(Entry(leaf.tensor) for leaf in leaves))
    return Found(structure, (entry_of(leaves, plain_values(conditioning)),))


def _structure(conditioning: object) -> str:
    if isinstance(conditioning, Tensor | np.ndarray):
        return "tensor"
    if isinstance(conditioning, Mapping):
        return "mapping"
    return "sequence" if isinstance(conditioning, list | tuple) else type(conditioning).__name__


def _comfyui_pairs(conditioning: object, depth: int = 0) -> list[tuple[Any, Mapping[Any, Any]]] | None:
    """The `[tensor, {…}]` pairs of ComfyUI's list, of a single such pair, or of lists of these; None if it is other."""
    if depth > _MOST_LISTS or not isinstance(conditioning, list | tuple) or not conditioning:
        return None
    if _is_pair(conditioning):
        return [(conditioning[0], conditioning[1])]
    pairs: list[tuple[Any, Mapping[Any, Any]]] = []
    for item in conditioning:
        inner = _comfyui_pairs(item, depth + 1)
        if inner is None:
            return None
        pairs += inner
    return pairs


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], Tensor | np.ndarray | None)
        and isinstance(item[1], Mapping)
    )


def _comfyui_entry(tensor: object, options: Mapping[Any, Any]) -> Entry:
    beside = entry_of(list(leaves_of(options)), plain_values(options), named_only=True)
    others = dict(beside.others)
    if beside.tensor is not None:  # in ComfyUI's options nothing is the conditioning itself
        others["embeddings"] = beside.tensor
    return Entry(as_tensor(tensor), beside.pooled, beside.attention_mask, others, beside.metadata)


def _is_one_text_an_item(leaves: list[Leaf], conditioning: object) -> bool:
    """A list with a (tokens, width) tensor for every prompt, as pipelines without padding give.

    In a tuple two of one shape are the prompt and the negative prompt.
    """
    tensors = [leaf.tensor for leaf in leaves]
    widths = {tensor.shape[-1] for tensor in tensors if tensor.ndim == 2}
    return (
        all(leaf.name == "" and leaf.tensor.ndim == 2 and leaf.tensor.is_floating_point() for leaf in leaves)
        and len(widths) == 1
        and (isinstance(conditioning, list) or len({tensor.shape[0] for tensor in tensors}) > 1)
    )
