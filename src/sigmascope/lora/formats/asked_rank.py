"""The rank that a LoRA was asked for, as its header says, beside the rank that a weight can have.

Some tools store alpha = the rank asked for next to r = min(rank, out, in·kh·kw) factors: rank 16 for an output
convolution of 4 channels gives r = 4 and alpha 16. Those factors are the whole ΔW, so alpha / r = 4 would be
four times too much.
"""

import json
from collections.abc import Mapping, Sequence

from sigmascope.lora.shapes import is_convolution, max_rank


def true_alpha(alpha: float, rank: int, weight_shape: Sequence[int], metadata: Mapping[str, str]) -> float:
    """Give `rank` (scale 1) for an alpha that only repeats the rank asked for, else `alpha` itself.

    It does so when the factors have all the rank that the weight can have, and alpha is above it and equal to
    the header's rank for that kind of layer. An alpha that was chosen is left alone: there the header's rank is
    that of the factors.

    Args:
        alpha: As stored.
        rank: Of the stored factors.
        weight_shape: (out, in) or (out, in, kh, kw).
        metadata: The header's `ss_network_dim` and `conv_dim` in `ss_network_args`.
    """
    if rank == max_rank(weight_shape) and alpha > rank and alpha in _asked_ranks(weight_shape, metadata):
        return float(rank)
    return alpha


def _asked_ranks(weight_shape: Sequence[int], metadata: Mapping[str, str]) -> list[float]:
    """What may have been asked for: tools differ on whether a 1×1 convolution counts as Linear."""
    linear, convolution = metadata.get("ss_network_dim"), _conv_dim(metadata)
    pointwise = all(size == 1 for size in weight_shape[2:])
    asked: list[object] = [linear] if pointwise or convolution is None else []
    if is_convolution(weight_shape):
        asked.append(convolution)
    return [number for number in map(_number, asked) if number is not None]


def _conv_dim(metadata: Mapping[str, str]) -> object:
    try:
        arguments = json.loads(metadata.get("ss_network_args", "{}"))
    except (ValueError, RecursionError):
        return None
    return arguments.get("conv_dim") if isinstance(arguments, dict) else None


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None
