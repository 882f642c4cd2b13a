"""Two tensors of one shape, piece by piece in float64, so that neither is ever copied whole."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CPU_PIECE = 1 << 16  # half a MiB as float64: stays in the cache
_DEVICE_PIECE = 1 << 21
_EXACT_IN_FLOAT64 = 8  # bytes of an integer from which on it may not fit float64


@dataclass(frozen=True, slots=True)
class PairPiece:
    """A run of elements in row-major order.

    Attributes:
        start: Number of the first element in row-major order.
        a: The elements of the first tensor, float64, one axis, on the CPU.
        b: Those of the second.
        unequal: Where the two differ; a NaN equals a NaN.
    """

    start: int
    a: Tensor
    b: Tensor
    unequal: Tensor


def pair_pieces(a: Tensor, b: Tensor) -> Iterator[PairPiece]:
    """Cut two tensors of the same shape into pieces of the same elements.

    A piece never covers a part of an axis together with a part of an axis before it.

    Args:
        a: Any dense real tensor, on any device, with any strides.
        b: Another of the same shape.
    """
    on_cpu = a.device.type == b.device.type == "cpu"
    for start, part_a, part_b in _parts(a.detach(), b.detach(), 0, _CPU_PIECE if on_cpu else _DEVICE_PIECE):
        flat_a, flat_b = part_a.reshape(-1).cpu(), part_b.reshape(-1).cpu()
        wide_a, wide_b = flat_a.to(torch.float64), flat_b.to(torch.float64)
        yield PairPiece(start, wide_a, wide_b, _unequal(flat_a, flat_b, wide_a, wide_b))


def index_of(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of an element from its number in row-major order."""
    index = []
    for size in reversed(shape):
        place, here = divmod(place, size)
        index.append(here)
    return tuple(reversed(index))


def _parts(a: Tensor, b: Tensor, start: int, most: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    if a.numel() == 0:
        return
    if a.numel() <= most or a.dim() == 0:
        yield start, a, b
        return
    row = math.prod(a.shape[1:])
    if row > most:
        for index in range(a.shape[0]):
            yield from _parts(a[index], b[index], start + index * row, most)
        return
    rows = most // row
    for first in range(0, a.shape[0], rows):
        yield start + first * row, a[first : first + rows], b[first : first + rows]


def _unequal(a: Tensor, b: Tensor, wide_a: Tensor, wide_b: Tensor) -> Tensor:
    if not (a.is_floating_point() or b.is_floating_point()) and (
        max(a.element_size(), b.element_size()) >= _EXACT_IN_FLOAT64
    ):
        # As int64 numbers from 2⁶³ on turn negative, whose sign float64 keeps.
        return (a.to(torch.int64) != b.to(torch.int64)) | ((wide_a < 0) != (wide_b < 0))
    return (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
