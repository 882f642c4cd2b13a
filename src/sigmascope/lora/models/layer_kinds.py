"""Which tensors are weights of layers that a LoRA can hold, told by name and shape."""

from collections.abc import Sequence
from typing import Final

WEIGHT: Final = ".weight"
_LAYER_DIMENSIONS: Final = range(2, 6)  # Linear (out, in); Conv1d, Conv2d, Conv3d (out, in, *kernel)
_EMBEDDING_ENDINGS: Final = ("embedding", "embeddings", "embed", "emb")
_EMBEDDINGS: Final = frozenset(
    {"embed_tokens", "embed_positions", "shared", "wte", "wpe", "relative_attention_bias"}
)


def is_layer(key: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a Linear or convolution layer.

    A Linear and an Embedding both have two axes; the name tells them apart, as in `token_embedding`,
    `embed_tokens`, T5's `shared` and `relative_attention_bias`. `time_embedding.linear_1` is a Linear.

    Args:
        key: Such as `unet.mid_block.attentions.0.proj_in.weight`.
        shape: The tensor's.
    """
    if not key.endswith(WEIGHT) or len(shape) not in _LAYER_DIMENSIONS or 0 in shape:
        return False
    return len(shape) > 2 or not _is_embedding(key.removesuffix(WEIGHT).rpartition(".")[2])


def _is_embedding(module: str) -> bool:
    return module in _EMBEDDINGS or module.endswith(_EMBEDDING_ENDINGS)
