"""Changes of fused matrices: divide them into their parts, or join the parts' changes, exactly.

The rows of a fused matrix W = [W₁; W₂; …] are those of its parts. ΔW = up·down divides by the rows of `up`, all
parts sharing `down`. Joined, the parts' factors stand on a block diagonal: the rank is the sum of their ranks.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from sigmascope.errors import LoraFormatError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.names.transformer_names import Row
from sigmascope.lora.precision import at_least_float32

_WIDENING = 4  # of the feed-forward part of FLUX' single blocks


def part_sizes(weight_shape: Sequence[int], row: Row) -> list[int]:
    """How many rows of a fused weight belong to each of its parts.

    Three parts share the rows equally. Of four, as in FLUX' single blocks, three have as many rows as the layer
    has inputs, and the last has the others.

    Raises:
        LoraFormatError: The rows cannot be divided so.
    """
    out, inner, count = weight_shape[0], prod(weight_shape[1:]), len(row.parts)
    if count == 1:
        return [out]
    sizes = [out // count] * count if count == 3 else [inner] * (count - 1) + [out - (count - 1) * inner]
    if min(sizes) < 1 or sum(sizes) != out:
        raise LoraFormatError(
            f"{row.original} of shape {tuple(weight_shape)} cannot be divided into {', '.join(row.parts)}.",
            hint="The LoRA is for another architecture.",
        )
    return sizes


def divided(factors: LoraFactors, row: Row) -> dict[str, LoraFactors]:
    """The change of each part of a fused layer, by the part's name.

    Raises:
        LoraFormatError: The layer's rows cannot be those of its parts.
    """
    if row.swapped:
        return {row.parts[0]: _swapped(factors)}
    ups = torch.split(factors.up, part_sizes(factors.weight_shape, row))
    return {
        part: LoraFactors(up, factors.down, factors.alpha, (len(up), *factors.weight_shape[1:]))
        for part, up in zip(row.parts, ups, strict=True)
    }


def joined(parts: Mapping[str, LoraFactors], row: Row) -> LoraFactors:
    """The change of a fused layer from those of its parts; a part that is not there does not change.

    Args:
        parts: At least one, by the part's name.
        row: The fused layer.

    Raises:
        LoraFormatError: The parts are of different width.
    """
    if row.swapped:
        return _swapped(parts[row.parts[0]])
    widths = {factors.weight_shape[1:] for factors in parts.values()}
    if len(widths) > 1:
        raise LoraFormatError(
            f"the parts of {row.original} have inputs of different shape: {sorted(widths)}."
        )
    (width,) = widths
    sizes = joined_sizes({name: factors.weight_shape[0] for name, factors in parts.items()}, row, prod(width))
    dtype = _common_dtype(list(parts.values()))
    rank, row_begin, column = sum(factors.rank for factors in parts.values()), 0, 0
    device = next(iter(parts.values())).up.device
    up = torch.zeros(sum(sizes), rank, dtype=dtype, device=device)
    downs = []
    for name, size in zip(row.parts, sizes, strict=True):
        factors = parts.get(name)
        if factors is not None:
            scaled = factors.up.to(at_least_float32(dtype)).mul(factors.scale)
            up[row_begin : row_begin + size, column : column + factors.rank] = scaled.to(dtype)
            downs.append(factors.down.to(dtype))
            column += factors.rank
        row_begin += size
    return LoraFactors(up, torch.cat(downs), float(rank), (sum(sizes), *width))


def joined_sizes(sizes: Mapping[str, int], row: Row, inner: int) -> list[int]:
    """How many rows each part of a fused layer has.

    Args:
        sizes: Of the parts that are there. Those of the others follow from the width, as in all these models.
        row: The fused layer.
        inner: Its number of inputs.
    """
    if len(row.parts) == 1:
        return [sizes[row.parts[0]]]
    usual = [inner] * 3 + [_WIDENING * inner] * (len(row.parts) - 3)
    return [sizes.get(name, size) for name, size in zip(row.parts, usual, strict=True)]


def _common_dtype(parts: Sequence[LoraFactors]) -> torch.dtype:
    """The parts' own dtype where they share one and no scale would round it; else float32 or wider."""
    dtypes = {tensor.dtype for factors in parts for tensor in (factors.up, factors.down)}
    unscaled = all(factors.scale == 1.0 for factors in parts)
    return next(iter(dtypes)) if len(dtypes) == 1 and unscaled else at_least_float32(*dtypes)


def _swapped(factors: LoraFactors) -> LoraFactors:
    """The halves of the rows exchanged, in a layer of twice as many outputs as inputs; any other as it is."""
    out, inner = factors.up.shape[0], factors.down.shape[1]
    if out != 2 * inner:
        return factors
    up = factors.up.roll(out // 2, dims=0)
    return LoraFactors(up, factors.down, factors.alpha, factors.weight_shape)
