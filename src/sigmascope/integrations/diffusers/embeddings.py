"""What `encode_prompt` gives: which of its tensors is what, by the names under which pipelines take them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def embeddings(result: object, accepts_negative: bool) -> dict[str, Tensor]:
    """The tensors that `encode_prompt` gives, by the names under which pipelines take them.

    Args:
        result: What it gave: the prompt's first; of each kind the negative prompt's comes after the prompt's.
        accepts_negative: Whether it takes a negative prompt.
    """
    if isinstance(result, Mapping):
        return {str(name): tensor for name, tensor in result.items() if isinstance(tensor, Tensor)}
    returned: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    prompt, *rest = returned
    named: dict[str, object] = {"prompt_embeds": prompt}
    for other in rest:
        kind = _kind_of_embedding(other, prompt, accepts_negative=accepts_negative)
        if kind is not None:
            named[kind if kind not in named else f"negative_{kind}"] = other
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def _kind_of_embedding(other: object, prompt: object, *, accepts_negative: bool) -> str | None:
    """What a tensor beside the prompt's embeddings is, by its shape: pipelines order them in several ways.

    Embeddings of the negative prompt are as wide; a mask has a number for each token, and a pooled output one row for
    each prompt; the rest are positions and the like.
    """
    if not isinstance(other, Tensor):
        return None
    if not isinstance(prompt, Tensor):
        return "text_ids"
    is_floating = other.is_floating_point()
    if accepts_negative and is_floating and other.dim() == prompt.dim() and _width(other) == _width(prompt):
        return "prompt_embeds"
    if other.dim() != 2:
        return "text_ids"
    if not is_floating or (prompt.dim() == 3 and other.shape == prompt.shape[:2]):
        return "prompt_embeds_mask"
    return "pooled_prompt_embeds" if other.shape[0] == prompt.shape[0] else "text_ids"


def _width(embeddings: Tensor) -> int:
    return embeddings.shape[-1] if embeddings.dim() else 0


def conditioning(named: Mapping[str, object], which: str) -> object:
    """The embeddings and the pooled ones of one prompt; None without any."""
    tensors = [named.get(f"{which}{name}") for name in ("prompt_embeds", "pooled_prompt_embeds")]
    known = tuple(tensor for tensor in tensors if tensor is not None)
    return known or None
