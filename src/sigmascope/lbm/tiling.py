"""Map a large image through a network tile by tile, blending where tiles overlap.

Memory is that of one tile. Away from seams a tile gives what the whole image would, as far as the network is
local: its group normalisation and attention see the tile only, which is the price of tiling.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

OVERLAP = 0.25
"""Share of a tile that it has in common with its neighbour."""


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """First positions of tiles of size `tile` that cover `length`, the last one flush with the end."""
    if length <= tile:
        return [0]
    count = math.ceil((length - overlap) / (tile - overlap))
    return [round(index * (length - tile) / (count - 1)) for index in range(count)]


def tiled_map(
    function: Callable[[Tensor], Tensor], tensor: Tensor, *, tile: int, scale: tuple[int, int]
) -> Tensor:
    """Apply `function` to overlapping tiles and blend the results linearly.

    Args:
        function: Maps (batch, channels, h, w) to (batch, other channels, h·up/down, w·up/down).
        tensor: The whole input.
        tile: Side of a tile in input elements.
        scale: (up, down): output elements per input element. Positions keep to multiples of `down`.
    """
    up, down = scale
    height, width = tensor.shape[-2] // down, tensor.shape[-1] // down
    side = max(tile // down, 2)
    overlap = max(int(side * OVERLAP), 1)
    total: Tensor | None = None
    weight_sum = torch.zeros(1, 1, height * up, width * up, device=tensor.device)
    for top in tile_starts(height, side, overlap):
        for left in tile_starts(width, side, overlap):
            bottom, right = min(top + side, height), min(left + side, width)
            part = function(tensor[..., top * down : bottom * down, left * down : right * down])
            if total is None:
                shape = (*part.shape[:-2], height * up, width * up)
                total = torch.zeros(shape, device=part.device, dtype=torch.float32)
            where = (..., slice(top * up, bottom * up), slice(left * up, right * up))
            weight = _feather(part.shape[-2], part.shape[-1], overlap * up).to(part.device)
            total[where] += part * weight
            weight_sum[where] += weight
    assert total is not None  # there is at least one tile
    return (total / weight_sum).to(tensor.dtype)


def _feather(height: int, width: int, ramp: int) -> Tensor:
    """Weights that rise linearly over `ramp` elements from each edge of a tile."""
    return _rise(height, ramp)[:, None] * _rise(width, ramp)[None, :]


def _rise(length: int, ramp: int) -> Tensor:
    position = torch.arange(1, length + 1, dtype=torch.float32)
    from_edge = torch.minimum(position, length + 1 - position)
    return (from_edge / (ramp + 1)).clamp(max=1.0)
