"""Which layers of the denoiser are meant: blocks, coverage, and the list of LoRA layer names."""

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Final

from sigmascope.lora.options import Coverage
from sigmascope.records.atomic import atomic_path

DENOISER: Final = "denoiser."
_ATTENTION: Final = frozenset({"attn1", "attn2"})
_AROUND_ATTENTION: Final = frozenset({"ff", "proj_in", "proj_out"})
_FLOW: Final = ("conv_in", "time_embedding", "down_blocks", "mid_block", "up_blocks", "conv_out")
"""A UNet's parts in the order in which a latent passes them; others come last."""


def in_coverage(module: str, coverage: Coverage) -> bool:
    """Whether a layer is among those that a coverage names.

    Args:
        module: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        coverage: See `ExtractOptions.target_coverage`.
    """
    parts = frozenset(module.split("."))
    if coverage == "full":
        return True
    wanted = _ATTENTION if coverage == "attention" else _ATTENTION | _AROUND_ATTENTION
    return not parts.isdisjoint(wanted)


def block_of(module: str) -> str:
    """The block that a layer belongs to, such as `down_blocks.0`, `mid_block` or `conv_in`."""
    first, *rest = module.removeprefix(DENOISER).split(".")
    numbered = first.endswith("blocks") and bool(rest) and rest[0].isdigit()
    return f"{first}.{rest[0]}" if numbered else first


def block_order(block: str) -> tuple[int, int, str]:
    """Sorting key that puts blocks in the order in which a latent passes them."""
    first, _, number = block.partition(".")
    position = _FLOW.index(first) if first in _FLOW else len(_FLOW)
    return position, int(number) if number.isdigit() else 0, block


def layer_order(module: str) -> tuple[tuple[int, int, str], list[tuple[int, str]]]:
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
