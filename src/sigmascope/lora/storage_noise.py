"""How much of two models' difference is only the rounding of how one of them is stored (`storage_noise`).

A quantised base is W + n, so that the change read from the files is ΔW − n. The rounding n is as large as that of other
numbers of the same size that are stored the same way: those of the other model, or, where both are stored coarsely, the
sums of neighbouring rows over √2, which lie between the levels. For types that the gguf package only reads, n follows
from the distance d of neighbouring levels: d / √12 on average.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import fsum, sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, numbers_of
from sigmascope.errors import SigmascopeError
from sigmascope.lora.linalg import is_real

_ROWS: Final = 128
_LAYERS: Final = 4
"""Read of each type."""
_LEVELS_IN: Final = 16
"""Numbers that share a distance of levels in all types that the gguf package only reads."""


class StorageNoise(NamedTuple):
    """What the rounding of one type makes of a difference.

    Attributes:
        stored: The type.
        layers: How many were looked at.
        of_weight: ‖n‖ / ‖W‖; None if it is not known.
        of_change: ‖n‖² / ‖ΔW − n‖², at most 1: the share of the measured change that is noise.
        unavailable: Why it is not known; None if it is.
    """

    stored: str
    layers: int
    of_weight: float | None
    of_change: float | None
    unavailable: str | None = None


def is_coarse(checkpoint: Checkpoint, key: str) -> bool:
    """Whether a tensor is quantised, or stored in 8 bits."""
    dtype = checkpoint.info(key).dtype
    return key in checkpoint.dequantised or (is_real(dtype) and dtype.itemsize == 1)


def storage_noise(side: Checkpoint, other: Checkpoint, keys: Sequence[str]) -> Iterator[StorageNoise]:
    """Estimate the rounding in a few layers of each type that a side is stored in.

    Args:
        side: The checkpoint that is stored coarsely.
        other: The one that it is compared with, under the same keys.
        keys: The compared layers' weights.
    """
    by_type: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        if is_coarse(side, key):
            by_type[_stored(side, key)].append(key)
    for stored, members in by_type.items():
        looked_at = members[:: -(-len(members) // _LAYERS)]
        try:
            sums = [_in_layer(side, other, key) for key in looked_at]
        except SigmascopeError as error:
            yield StorageNoise(stored, 0, None, None, str(error).rstrip("."))
            continue
        noise, weight, change = (fsum(part) for part in zip(*sums, strict=True))
        yield StorageNoise(
            stored,
            len(looked_at),
            sqrt(noise / weight) if weight > 0.0 else 0.0,
            min(noise / change, 1.0) if change > 0.0 else 0.0,
        )


def _stored(side: Checkpoint, key: str) -> str:
    return side.dequantised.get(key) or str(side.info(key).dtype).removeprefix("torch.")


def _in_layer(side: Checkpoint, other: Checkpoint, key: str) -> tuple[float, float, float]:
    """‖n‖², ‖W‖² and ‖ΔW − n‖² of some rows."""
    weight = numbers_of(side.tensor(key))
    matrix = weight.reshape(weight.shape[0], -1)
    start = matrix.shape[0] // 2 // _ROWS * _ROWS
    rows, peak = matrix[start : start + _ROWS].clone(), matrix.abs().amax()
    del weight, matrix
    compared = other.tensor(key)
    compared = numbers_of(compared.reshape(compared.shape[0], -1)[start : start + _ROWS])
    between = (rows + rows.roll(1, 0)).div_(sqrt(2.0)) if is_coarse(other, key) else compared
    return _energy(_noise(side, key, rows, between, peak)), _energy(rows), _energy(compared - rows)


def _noise(side: Checkpoint, key: str, rows: Tensor, between: Tensor, peak: Tensor) -> Tensor:
    try:
        again = side.rounding(key).again
    except SigmascopeError:
        if not side.dequantised.get(key, "").startswith("GGUF") or rows.numel() % _LEVELS_IN:
            raise
        ordered = rows.reshape(-1, _LEVELS_IN).sort().values
        gaps = ordered.diff()
        # Levels that equal numbers share differ by nothing, or by a rounding of the float32 that they are read as.
        least = ordered.abs().amax(1, keepdim=True).mul(1e-5)
        distance = gaps.masked_fill(gaps <= least, torch.inf).amin(1, keepdim=True)
        return distance.nan_to_num(posinf=0.0).div(sqrt(12.0)).expand(-1, _LEVELS_IN)
    return again(torch.maximum(peak, between.abs().amax()), between).sub(between)


def _energy(values: Tensor) -> float:
    return float(values.double().square().sum())
