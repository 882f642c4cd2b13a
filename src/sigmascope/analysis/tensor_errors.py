"""How far two tensors of one shape lie apart: the whole, each token, and where."""

from dataclasses import dataclass


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
