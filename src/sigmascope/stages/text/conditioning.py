"""Find the tensors of a conditioning, whatever they are nested in.

Known forms: a bare tensor or array; ComfyUI's `[[tensor, {…}], …]`, where regional and scheduled prompts
are several entries; what diffusers' `encode_prompt` gives, whole or in part; transformers' outputs; any
mapping, dataclass, named tuple or list of these. Tensors with a name are known by it, those without by
their shape: embeddings are (batch, tokens, width), a pooled output (batch, width), a mask is not floating.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sigmascope.stages.text.nesting import Leaf, as_tensor, leaves_of, plain_values

MAIN_NAMES = (
    "prompt_embeds",
    "last_hidden_state",
    "encoder_hidden_states",
    "cond",
    "c_crossattn",
    "crossattn",
    "context",
    "conditioning",
    "embeddings",
    "embeds",
    "hidden_states",
)
POOLED_NAMES = (
    "pooled_output",
    "pooled_prompt_embeds",
    "pooled_projections",
    "text_embeds",
    "pooler_output",
    "pooled",
    "vector",
    "y",
)
MASK_NAMES = (
    "attention_mask",
    "prompt_embeds_mask",
    "prompt_attention_mask",
    "encoder_attention_mask",
    "encoder_hidden_states_mask",
)
_OTHER_TEXT = "negative_"
_WIDEST_POSITION = 4
_MOST_LISTS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One conditioning: embeddings with what belongs to them. `metadata` has the plain values."""

    tensor: Tensor | None
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
    return Found(structure, (_entry(leaves, plain_values(conditioning)),))


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
    beside = _entry(list(leaves_of(options)), plain_values(options), named_only=True)
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


def _entry(leaves: list[Leaf], metadata: Mapping[str, Any], *, named_only: bool = False) -> Entry:
    """Sort tensors by what they are, names first, then shapes."""
    rest = list(leaves)
    main = _take_named(rest, MAIN_NAMES)
    pooled = _take_named(rest, POOLED_NAMES)
    mask = _take_named(rest, MASK_NAMES)
    if not named_only:
        main = main or _take(rest, _is_embedding) or _take(rest, _is_floating_matrix)
        if main is not None:
            pooled = pooled or _take(rest, lambda leaf: _is_pooled(leaf, main.tensor))
            mask = mask or _take(rest, lambda leaf: _is_mask(leaf, main.tensor))
    others = {_unique(".".join(leaf.path), index): leaf.tensor for index, leaf in enumerate(rest)}
    return Entry(_tensor(main), _tensor(pooled), _tensor(mask), others, metadata)


def _take_named(rest: list[Leaf], names: tuple[str, ...]) -> Leaf | None:
    """Take the tensor with the first of these names; of several (all layers), the last one."""
    for name in names:
        named = [leaf for leaf in rest if leaf.name == name]
        if named:
            rest.remove(named[-1])
            return named[-1]
    return None


def _take(rest: list[Leaf], is_it: Callable[[Leaf], bool]) -> Leaf | None:
    candidates = [leaf for leaf in rest if is_it(leaf)]
    chosen = next((leaf for leaf in candidates if not leaf.name.startswith(_OTHER_TEXT)), None)
    chosen = chosen or next(iter(candidates), None)
    if chosen is not None:
        rest.remove(chosen)
    return chosen


def _is_embedding(leaf: Leaf) -> bool:
    return leaf.tensor.ndim >= 3 and leaf.tensor.is_floating_point()


def _is_floating_matrix(leaf: Leaf) -> bool:
    shape = leaf.tensor.shape
    return len(shape) in (1, 2) and leaf.tensor.is_floating_point() and shape[-1] > _WIDEST_POSITION


def _is_pooled(leaf: Leaf, main: Tensor) -> bool:
    """(batch, width) beside (batch, tokens, width); FLUX's text ids (tokens, 3) and masks (batch, tokens) are none."""
    shape = leaf.tensor.shape
    if not _is_floating_matrix(leaf) or main.ndim < 3 or _is_mask(leaf, main):
        return False
    return len(shape) == 1 or shape[0] == main.shape[0]


def _is_mask(leaf: Leaf, main: Tensor) -> bool:
    """(batch, tokens); one of floating numbers only where it cannot be as wide as the embeddings."""
    shape = leaf.tensor.shape
    if main.ndim < 2 or shape[-1:] != main.shape[-2:-1]:
        return False
    return not leaf.tensor.is_floating_point() or (len(shape) == 2 and shape[-1] != main.shape[-1])


def _tensor(leaf: Leaf | None) -> Tensor | None:
    return None if leaf is None else leaf.tensor


def _unique(name: str, index: int) -> str:
    return name or f"tensor_{index}"
