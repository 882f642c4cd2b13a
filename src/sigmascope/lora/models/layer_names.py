"""Which layers of a model are meant: blocks, coverage, and the list of LoRA layer names."""

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Final, Literal

from sigmascope.lora.models.block_names import block_of_module, block_position
from sigmascope.records.atomic import atomic_path

__all__ = ["Coverage", "block_of", "block_order", "in_coverage", "layer_order", "write_layer_names"]

Coverage = Literal["full", "attention", "extended"]
"""Which layers of a model are extracted; see `ExtractOptions.target_coverage`."""

_ATTENTION: Final = re.compile(
    r"attn|SelfAttention|EncDecAttention|attentions\.\d+\.to_|single_blocks\.\d+\.linear1$"
)
"""Attention in diffusers' names, in the families' own, in text encoders and VAEs. FLUX's own `linear1` holds the
query, key and value of a block beside its feed-forward layer."""
_AROUND_ATTENTION: Final = re.compile(
    r"(?:^|\.)(?:ff|ff_context|ffn|mlp|\w+_mlp|DenseReluDense|proj_in|proj_mlp)(?:\.|$)"
    r"|\.\d+\.proj_out$|single_blocks\.\d+\.linear2$"
)
"""Feed-forward layers, and the projections into and out of a block; not the model's own last `proj_out`."""

block_of = block_of_module
block_order = block_position


def in_coverage(module: str, coverage: Coverage) -> bool:
    """Whether a layer is among those that a coverage names, in any family's names.

    Args:
        module: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        coverage: See `ExtractOptions.target_coverage`.
    """
    if coverage == "full" or _ATTENTION.search(module):
        return True
    return coverage == "extended" and _AROUND_ATTENTION.search(module) is not None


def layer_order(module: str) -> tuple[tuple[int, str, int], list[tuple[int, str]]]:
    """Sorting key for layers: by block, then by name with numbers as numbers (2 before 10)."""
    pieces = re.split(r"(\d+)", module)
    return block_order(block_of(module)), [(int(p), "") if p.isdigit() else (-1, p) for p in pieces]


def write_layer_names(path: str | PathLike[str], names: Iterable[str]) -> Sequence[str]:
    """Write `lora_layer_names.txt`: the LoRA's layers, one a line, in the model's order.

    Each line, or any part of one (`attn1`, `ff.net`, `up_blocks.1`), can go into a training
    configuration's `trainable_lora_modules`, which takes partial names.

    Args:
        path: The text file; replaced as a whole.
        names: Module paths in native naming.

    Returns:
        The names as written.

    Raises:
        WriteError: The file cannot be written.
    """
    ordered = sorted(set(names), key=layer_order)
    with atomic_path(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in ordered), encoding="utf-8")
    return ordered
