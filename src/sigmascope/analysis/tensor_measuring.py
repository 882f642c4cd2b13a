"""Measures how far two tensors of one shape lie apart, in two passes over pieces of them."""

import math

import torch
from torch import Tensor

from sigmascope.analysis.pieces import PairPiece, index_of, pair_pieces
from sigmascope.analysis.tensor_errors import Place, TensorErrors, TokenErrors
from sigmascope.analysis.token_sums import TokenSums
from sigmascope.analysis.tolerances import Tolerance


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
    sums = _Sums(a, tolerance, TokenSums.of(a, token_axis))
    for piece in pair_pieces(a, b):
        sums.add(piece)
    rtol, atol = tolerance.element(sums.root_mean_square)
    if sums.unequal:
        for piece in pair_pieces(a, b):
            sums.add_outside(piece, rtol, atol)
    return sums.result(rtol, atol)


class _Sums:
    def __init__(self, a: Tensor, tolerance: Tolerance, tokens: TokenSums | None) -> None:
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
        self._aa += _dot(a, a)
        self._bb += _dot(b, b)
        self._ab += _dot(a, b)
        self._dd += _dot(difference, difference)
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
        larger = torch.maximum(piece.a.abs(), piece.b.abs())
        within = (piece.a - piece.b).abs() <= atol + rtol * larger
        # Inf − Inf is NaN, and Inf ≤ Inf: what is not finite is inside only where it is the same.
        finite = piece.a.isfinite() & piece.b.isfinite()
        outside = piece.unequal & ~(within & finite)
        if rtol == 0.0 and atol == 0.0:
            outside = piece.unequal
        count = int(outside.sum())
        if count and self._first_outside is None:
            self._first_outside = self._place(piece, int(outside.to(torch.uint8).argmax()))
        self._outside += count
        if self._tokens is not None:
            self._tokens.add_outside(piece.start, outside)

    def _place(self, piece: PairPiece, at: int) -> Place:
        return Place(index_of(piece.start + at, self._shape), float(piece.a[at]), float(piece.b[at]))

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
            tokens=None if self._tokens is None else TokenErrors(*self._tokens.columns()),
        )


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cosine(product: float, norms: float) -> float | None:
    if not norms or not math.isfinite(norms):
        return None
    return max(-1.0, min(1.0, product / norms))
