"""Sums over the slices of an axis, added up from runs of elements in row-major order."""

import math

import torch
from torch import Tensor

Columns = tuple[
    int,
    tuple[float, ...],
    tuple[float, ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[float, ...],
    tuple[bool, ...],
]


class TokenSums:
    """Errors of each slice of one axis.

    Args:
        tokens: The axis's size.
        inner: Elements of all axes behind it together.
        axis: Which axis it is.
    """

    def __init__(self, tokens: int, inner: int, axis: int) -> None:
        self._tokens, self._inner, self._axis = tokens, inner, axis
        # The host may have set a default device.
        zeros = torch.zeros(6, tokens, dtype=torch.float64, device="cpu")
        self._aa, self._ab, self._dd, self._max, self._unequal, self._outside = zeros

    @classmethod
    def of(cls, tensor: Tensor, axis: int | None) -> "TokenSums | None":
        """Sums for an axis of a tensor; None without one, or where it has no elements."""
        if axis is None or tensor.numel() == 0:
            return None
        return cls(tensor.shape[axis], math.prod(tensor.shape[axis + 1 :]), axis)

    def add(self, start: int, a: Tensor, b: Tensor, magnitude: Tensor, unequal: Tensor) -> None:
        """Add a run of elements; 0 stands where one is not finite."""
        ids, rows = self._rows(start, a.numel())
        for total, values in (
            (self._aa, a * a),
            (self._ab, a * b),
            (self._dd, magnitude * magnitude),
            (self._unequal, unequal.to(torch.float64)),
        ):
            total.index_add_(0, ids, values.reshape(rows).sum(1))
        self._max.scatter_reduce_(0, ids, magnitude.reshape(rows).amax(1), "amax")

    def add_outside(self, start: int, outside: Tensor) -> None:
        """Add where a run of elements is outside the tolerance."""
        ids, rows = self._rows(start, outside.numel())
        self._outside.index_add_(0, ids, outside.to(torch.float64).reshape(rows).sum(1))

    def _rows(self, start: int, count: int) -> tuple[Tensor, tuple[int, int]]:
        """The token of each row that a run falls into: it holds whole slices, or lies inside one."""
        if count % self._inner:
            return torch.tensor([start // self._inner % self._tokens], device="cpu"), (1, count)
        rows = count // self._inner
        return (start // self._inner + torch.arange(rows, device="cpu")) % self._tokens, (rows, self._inner)

    def columns(self) -> Columns:
        """Axis, relative L2, largest error, elements outside, elements unequal, scale, and which are blank."""
        relative = (self._dd.sqrt() / self._aa.sqrt()).where(self._dd > 0, 0.0)
        scale = (self._ab / self._aa).where(self._aa > 0, 1.0)
        return (
            self._axis,
            tuple(relative.tolist()),
            tuple(self._max.tolist()),
            tuple(map(int, self._outside.tolist())),
            tuple(map(int, self._unequal.tolist())),
            tuple(scale.tolist()),
            tuple(((self._aa == 0) & (self._unequal == 0)).tolist()),
        )
