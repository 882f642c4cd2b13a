"""Tell the tensors of one conditioning apart: embeddings, pooled output, mask, and others.

Those with a name are known by it, those without by their shape: embeddings are (batch, tokens, width), a pooled
output (batch, width), a mask is not floating.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sigmascope.stages.text.nesting import Leaf

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


@dataclass(frozen=True, slots=True)
class Entry:
    """One conditioning: embeddings with what belongs to them. `metadata` has the plain values."""

    tensor: Tensor | None
    pooled: Tensor | None = None
    attention_mask: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def entry_of(leaves: list[Leaf], metadata: Mapping[str, Any], *, named_only: bool = False) -> Entry:
    """Sort tensors by what they are, names first, then shapes.

    Args:
        leaves: All tensors of the conditioning.
        metadata: Its plain values.
        named_only: Whether tensors without a telling name are others, whatever their shape.
    """
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
    return Entry(_tensor_of(main), _tensor_of(pooled), _tensor_of(mask), others, metadata)


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


def _tensor_of(leaf: Leaf | None) -> Tensor | None:
    return None if leaf is None else leaf.tensor


def _unique(name: str, index: int) -> str:
    return name or f"tensor_{index}"
