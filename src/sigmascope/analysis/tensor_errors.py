"""How far two tensors of one shape lie apart: the whole, each token, and where; and what rounding explains.

Errors are measured in two passes over pieces of both tensors in float64, so that neither is ever copied
whole.

The tolerance says how far two tensors may lie apart because numbers are rounded, by their dtypes. u is the
unit roundoff of a dtype, eps / 2. With the larger errors of the two dtypes in mind:

* **Stored.** A value kept in a dtype lies within u·|value| of the true one, below the normal range within half
  the smallest subnormal (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., theorem 2.2). Two
  copies of one value therefore differ by at most u_a·|a| + u_b·|b|.
* **Computed.** Independent rounding errors add up like √n and not like n (Higham and Mary 2019, SIAM J. Sci.
  Comput. 41(5)). Text encoders of 12 and 24 layers (CLIP and T5, random weights) computed in a dtype lie from
  the same in float64 by a relative L2 error of 2.8 to 5.9 u in bfloat16 and float16, which sum in float32, and
  9 to 18 u in float32, whose sums round too. `docs/compare-tensors.md` has the table. Allowed are 8 u and 32 u.
  Errors of two computations add as squares.
* **Scale and spread.** Rounding leaves the scale alone (measured: 0.1 u in the 16-bit types, 0.2 u in float32,
  for a token 0.3 u and 2.4 u) and spreads over all tokens (measured: the worst token 1.6 times the whole). A
  sixteenth of the computed error is allowed as scale, 4 times the whole for a token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sigmascope.errors import ConfigError

_CPU_PIECE = 1 << 16  # half a MiB as float64: stays in the cache
_DEVICE_PIECE = 1 << 21
_EXACT_IN_FLOAT64 = 8  # bytes of an integer from which on it may not fit float64
_HALF_FACTOR = 8.0
_SINGLE_FACTOR = 32.0
_EIGHT_BIT_FACTOR = 1.0  # nothing sums in 8 bits: these are stored only
_SCALE_SHARE = 16.0
TOKEN_FACTOR = 4.0
"""How much more than the whole one token may err when rounding is the cause."""


@dataclass(frozen=True, slots=True)
class Place:
    """One element: its index in the tensors as compared, and both values."""

    index: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class TokenErrors:
    """Errors of the slices along one axis, each column with one value a slice.

    Attributes:
        axis: The axis of the tensors as compared.
        relative_l2: ‖a − b‖ / ‖a‖ of the slice; infinite where a is zero and b is not.
        max_abs: The largest |a − b|.
        outside: Elements outside the tolerance.
        unequal: Elements that differ at all.
        scale: ⟨a, b⟩ / ⟨a, a⟩, the factor that brings a nearest to b; 1 where a is zero.
        blank: Whether the slice is zero in both, as the padding of many pipelines is: nothing there can be rounded.
    """

    axis: int
    relative_l2: tuple[float, ...]
    max_abs: tuple[float, ...]
    outside: tuple[int, ...]
    unequal: tuple[int, ...]
    scale: tuple[float, ...]
    blank: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.relative_l2)

    @property
    def filled(self) -> int:
        """How many slices are not blank."""
        return len(self) - sum(self.blank)

    @property
    def typical(self) -> float:
        """The median (of two, the lower one) of the relative errors of the slices that are not blank; 0 without any."""
        errors = sorted(error for error, blank in zip(self.relative_l2, self.blank, strict=True) if not blank)
        return errors[(len(errors) - 1) // 2] if errors else 0.0

    @property
    def worst(self) -> int | None:
        """The token with the largest relative error; None if no token differs."""
        if not any(self.unequal):
            return None
        return max(range(len(self)), key=lambda token: (self.relative_l2[token], self.unequal[token] > 0))


@dataclass(frozen=True, slots=True)
class TensorErrors:
    """Errors of two tensors of one shape. Sums are in float64, over places where both are finite.

    Attributes:
        elements: How many elements there are.
        unequal: How many differ at all; a NaN equals a NaN.
        outside: How many lie outside the element tolerance, or are NaN or Inf in one alone.
        beyond_storage: How many differ by more than rounding to the two dtypes explains.
        max_abs: The largest |a − b|, None without a place where both are finite.
        max_abs_at: Where that is.
        relative_l2: ‖a − b‖ / ‖a‖; None where a is zero and b is not.
        cosine: ⟨a, b⟩ / (‖a‖·‖b‖); None if either is zero.
        scale: ⟨a, b⟩ / ⟨a, a⟩; None if a is zero.
        first_difference: The first place, in row-major order, where they differ at all.
        first_outside: The first that is outside the tolerance.
        nan_a: NaN in the first tensor.
        nan_b: NaN in the second.
        inf_a: Inf in the first.
        inf_b: Inf in the second.
        non_finite_mismatch: Places that are NaN or Inf in one, and something else in the other.
        rtol: The relative element tolerance used.
        atol: The absolute one.
        tokens: The same by token; None without a token axis.
    """

    elements: int
    unequal: int
    outside: int
    beyond_storage: int
    max_abs: float | None
    max_abs_at: Place | None
    relative_l2: float | None
    cosine: float | None
    scale: float | None
    first_difference: Place | None
    first_outside: Place | None
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int
    non_finite_mismatch: int
    rtol: float
    atol: float
    tokens: TokenErrors | None

    @property
    def share_outside(self) -> float:
        """Share of elements outside the tolerance, 0 to 1."""
        return self.outside / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is allowed between two tensors of given dtypes.

    Attributes:
        narrower: The dtype that rounds more, as `bfloat16`.
        roundoff_a: u of the first tensor's dtype; 0 for integers.
        roundoff_b: u of the second's.
        smallest: Half the smallest subnormal number of the narrower dtype.
        computed: Relative L2 error that computing in these dtypes explains.
        close: Relative L2 error up to which they are close: what the next narrower precision inside would explain.
        scale: Deviation from 1 of the factor between the two that computing explains.
        close_scale: The same for `close`.
        rtol: The user's element tolerance, relative to the larger of |a| and |b|; None for the default.
        atol: The user's absolute element tolerance; None for the default.
    """

    narrower: str
    roundoff_a: float
    roundoff_b: float
    smallest: float
    computed: float
    close: float
    scale: float
    close_scale: float
    rtol: float | None = None
    atol: float | None = None

    @property
    def by_user(self) -> bool:
        """Whether the user said what an element may differ by."""
        return self.rtol is not None or self.atol is not None

    def element(self, root_mean_square: float) -> tuple[float, float]:
        """Relative and absolute tolerance of one element in a tensor of that root mean square.

        The default is the computed error, of the element and of the tensor's root mean square: an element near zero
        carries the rounding of the larger ones that it was computed from.
        """
        if self.by_user:
            return self.rtol or 0.0, self.atol or 0.0
        return self.computed, self.computed * root_mean_square


def tensor_errors(a: Tensor, b: Tensor, tolerance: Tolerance, token_axis: int | None = None) -> TensorErrors:
    """Measure two tensors against each other, in two passes over pieces of them.

    Args:
        a: The reference: any dense real tensor.
        b: Another of the same shape, on any device and of any dtype.
        tolerance: What an element may differ by.
        token_axis: The axis whose slices are measured one by one.

    Raises:
        ValueError: The shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
    sums = _Sums(a, tolerance, _TokenSums.of(a, token_axis))
    for piece in pair_pieces(a, b):
        sums.add(piece)
    rtol, atol = tolerance.element(sums.root_mean_square)
    if sums.unequal:
        for piece in pair_pieces(a, b):
            sums.add_outside(piece, rtol, atol)
    return sums.result(rtol, atol)


class _TokenSums:
    """Errors of each slice of one axis."""

    def __init__(self, tokens: int, inner: int, axis: int) -> None:
        self._tokens, self._inner, self._axis = tokens, inner, axis
        # The host may have set a default device.
        zeros = torch.zeros(6, tokens, dtype=torch.float64, device="cpu")
        self._aa, self._ab, self._dd, self._max, self._unequal, self._outside = zeros

    @classmethod
    def of(cls, tensor: Tensor, axis: int | None) -> "_TokenSums | None":
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

    def result(self) -> TokenErrors:
        """The errors of each token."""
        return TokenErrors(
            axis=self._axis,
            relative_l2=tuple((self._dd.sqrt() / self._aa.sqrt()).where(self._dd > 0, 0.0).tolist()),
            max_abs=tuple(self._max.tolist()),
            outside=tuple(map(int, self._outside.tolist())),
            unequal=tuple(map(int, self._unequal.tolist())),
            scale=tuple((self._ab / self._aa).where(self._aa > 0, 1.0).tolist()),
            blank=tuple(((self._aa == 0) & (self._unequal == 0)).tolist()),
        )


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


class _Sums:
    def __init__(self, a: Tensor, tolerance: Tolerance, tokens: _TokenSums | None) -> None:
        self._shape = tuple(a.shape)
        self._elements = a.numel()
        self._tolerance = tolerance
        self._tokens = tokens
        self.unequal = self._finite = self._beyond = self._outside = self._mismatch = 0
        self._nan, self._inf = [0, 0], [0, 0]
        self._aa = self._bb = self._ab = self._dd = 0.0
        self._max_abs = -1.0
        self._at: Place | None = None
        self._first: Place | None = None
        self._first_outside: Place | None = None

    @property
    def root_mean_square(self) -> float:
        return math.sqrt(self._aa / self._finite) if self._finite else 0.0

    def add(self, piece: PairPiece) -> None:
        a, b, finite = self._finite_parts(piece)
        difference = a - b
        magnitude = difference.abs()
        self._finite += a.numel() if finite is None else int(finite.sum())
        self._aa += float(a @ a)
        self._bb += float(b @ b)
        self._ab += float(a @ b)
        self._dd += float(difference @ difference)
        if self._tokens is not None:
            self._tokens.add(piece.start, a, b, magnitude, piece.unequal)
        self._note_extremes(piece, magnitude, finite)
        bound = self._tolerance.roundoff_a * a.abs() + self._tolerance.roundoff_b * b.abs()
        self._beyond += int(((magnitude > bound + self._tolerance.smallest) & piece.unequal).sum())

    def _finite_parts(self, piece: PairPiece) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both with 0 where either is NaN or Inf, after counting those; the mask is None where all are finite."""
        total = float(piece.a.sum() + piece.b.sum())
        if math.isfinite(total):  # one NaN or Inf makes the sum so
            return piece.a, piece.b, None
        for side, values in enumerate((piece.a, piece.b)):
            self._nan[side] += int(values.isnan().sum())
            self._inf[side] += int(values.isinf().sum())
        finite = piece.a.isfinite() & piece.b.isfinite()
        self._mismatch += int((piece.unequal & ~finite).sum())
        return piece.a.where(finite, 0.0), piece.b.where(finite, 0.0), finite

    def _note_extremes(self, piece: PairPiece, magnitude: Tensor, finite: Tensor | None) -> None:
        count = int(piece.unequal.sum())
        if count and self._first is None:
            self._first = self._place(piece, int(piece.unequal.to(torch.uint8).argmax()))
        self.unequal += count
        candidates = magnitude if finite is None else magnitude.where(finite, -1.0)
        at = int(candidates.argmax())
        largest = float(candidates[at])
        if largest > self._max_abs:
            self._max_abs = largest
            self._at = self._place(piece, at)

    def add_outside(self, piece: PairPiece, rtol: float, atol: float) -> None:
        outside = piece.unequal
        if rtol or atol:
            larger = torch.maximum(piece.a.abs(), piece.b.abs())
            within = (piece.a - piece.b).abs() <= atol + rtol * larger
            # Inf − Inf is NaN, and Inf ≤ Inf: what is not finite is inside only where it is the same.
            finite = piece.a.isfinite() & piece.b.isfinite()
            outside = outside & ~(within & finite)
        count = int(outside.sum())
        if count and self._first_outside is None:
            self._first_outside = self._place(piece, int(outside.to(torch.uint8).argmax()))
        self._outside += count
        if self._tokens is not None:
            self._tokens.add_outside(piece.start, outside)

    def _place(self, piece: PairPiece, at: int) -> Place:
        index = np.unravel_index(piece.start + at, self._shape)
        return Place(tuple(map(int, index)), float(piece.a[at]), float(piece.b[at]))

    def result(self, rtol: float, atol: float) -> TensorErrors:
        norm_a, norm_b = math.sqrt(self._aa), math.sqrt(self._bb)
        error = math.sqrt(self._dd)
        known = self._finite > 0
        return TensorErrors(
            elements=self._elements,
            unequal=self.unequal,
            outside=self._outside,
            beyond_storage=self._beyond,
            max_abs=self._max_abs if known else None,
            max_abs_at=self._at if known and self.unequal else None,
            relative_l2=_finite_or_none(error / norm_a) if norm_a else (0.0 if known and not error else None),
            cosine=_cosine(self._ab, norm_a * norm_b) if self._dd else (1.0 if norm_a else None),
            scale=_finite_or_none(self._ab / self._aa) if self._aa else None,
            first_difference=self._first,
            first_outside=self._first_outside,
            nan_a=self._nan[0],
            nan_b=self._nan[1],
            inf_a=self._inf[0],
            inf_b=self._inf[1],
            non_finite_mismatch=self._mismatch,
            rtol=rtol,
            atol=atol,
            tokens=None if self._tokens is None else self._tokens.result(),
        )


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cosine(product: float, norms: float) -> float | None:
    if not norms or not math.isfinite(norms):
        return None
    return max(-1.0, min(1.0, product / norms))


def pair_pieces(a: Tensor, b: Tensor) -> Iterator[PairPiece]:
    """Cut two tensors of the same shape into pieces of the same elements.

    A piece never covers a part of an axis together with a part of an axis before it.
    """
    on_cpu = a.device.type == b.device.type == "cpu"
    for start, part_a, part_b in _cut(a.detach(), b.detach(), 0, _CPU_PIECE if on_cpu else _DEVICE_PIECE):
        flat_a, flat_b = part_a.reshape(-1).cpu(), part_b.reshape(-1).cpu()
        wide_a, wide_b = flat_a.to(torch.float64), flat_b.to(torch.float64)
        yield PairPiece(start, wide_a, wide_b, _where_unequal(flat_a, flat_b, wide_a, wide_b))


def _cut(a: Tensor, b: Tensor, start: int, most: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    if a.numel() == 0:
        return
    if a.numel() <= most or a.dim() == 0:
        yield start, a, b
        return
    row = math.prod(a.shape[1:])
    if row > most:
        for index in range(a.shape[0]):
            yield from _cut(a[index], b[index], start + index * row, most)
        return
    rows = most // row
    for first in range(0, a.shape[0], rows):
        yield start + first * row, a[first : first + rows], b[first : first + rows]


def _where_unequal(a: Tensor, b: Tensor, wide_a: Tensor, wide_b: Tensor) -> Tensor:
    if not (a.is_floating_point() or b.is_floating_point()) and (
        max(a.element_size(), b.element_size()) >= _EXACT_IN_FLOAT64
    ):
        # As int64 numbers from 2⁶³ on turn negative, whose sign float64 keeps.
        return (a.to(torch.int64) != b.to(torch.int64)) | ((wide_a < 0) != (wide_b < 0))
    return (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())


def tolerance_for(
    a: torch.dtype, b: torch.dtype, *, rtol: float | None = None, atol: float | None = None
) -> Tolerance:
    """The tolerance between two dtypes.

    Args:
        a: The dtype of one tensor.
        b: That of the other.
        rtol: The user's relative tolerance of an element.
        atol: The user's absolute tolerance of an element. If one of the two is given, the other is 0.

    Raises:
        ConfigError: A tolerance is negative or not a number.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{name}={value} allows nothing.", hint="Give 0 or a positive number.")
    roundoff_a, roundoff_b = unit_roundoff(a), unit_roundoff(b)
    narrower = a if roundoff_a >= roundoff_b else b
    computed = (_computed_error(a) ** 2 + _computed_error(b) ** 2) ** 0.5
    close = _close_error(narrower, computed)
    return Tolerance(
        narrower=str(narrower).removeprefix("torch."),
        roundoff_a=roundoff_a,
        roundoff_b=roundoff_b,
        smallest=_half_smallest_subnormal(narrower),
        computed=computed,
        close=close,
        scale=computed / _SCALE_SHARE,
        close_scale=close / _SCALE_SHARE,
        rtol=rtol,
        atol=atol,
    )


def _computed_error(dtype: torch.dtype) -> float:
    roundoff = unit_roundoff(dtype)
    if dtype.itemsize == 1:
        return _EIGHT_BIT_FACTOR * roundoff
    return (_HALF_FACTOR if dtype.itemsize == 2 else _SINGLE_FACTOR) * roundoff


def _close_error(narrower: torch.dtype, computed: float) -> float:
    """float32 pipelines have TF32 or float16 inside, float64 ones float32; below that nothing is narrower."""
    if unit_roundoff(narrower) == 0.0:
        return 0.0
    if narrower in (torch.float64, torch.complex128):
        return _computed_error(torch.float32)
    if narrower in (torch.float32, torch.complex64):
        return _computed_error(torch.float16)
    return 2.0 * computed


def _half_smallest_subnormal(dtype: torch.dtype) -> float:
    if unit_roundoff(dtype) == 0.0:
        return 0.0
    limits = torch.finfo(dtype)
    return float(limits.smallest_normal) * float(limits.eps) / 2


def unit_roundoff(dtype: torch.dtype) -> float:
    """U = eps / 2 of a floating-point dtype (of the parts of a complex one), 0 for integers and bool."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    try:
        return torch.finfo(dtype).eps / 2
    except NotImplementedError:  # float4, which is compared by its codes
        return 0.0
