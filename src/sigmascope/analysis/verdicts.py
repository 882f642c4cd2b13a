"""From errors to a verdict, with the reason in words."""

import math
from typing import Literal

from sigmascope.analysis.tensor_errors import TensorErrors, TokenErrors
from sigmascope.analysis.tolerances import TOKEN_FACTOR, Tolerance

Verdict = Literal["identical", "rounding", "close", "different"]
"""From best to worst: every value is equal; rounding to the dtypes explains it; a little more than that; more."""

ORDER: tuple[Verdict, ...] = ("identical", "rounding", "close", "different")

_FLOAT16_LARGEST = 65504
_LARGEST_SQUARE_ROOT = 1e150


def judge(errors: TensorErrors, tolerance: Tolerance) -> tuple[Verdict, str]:
    """The verdict on two tensors and the reason for it.

    Args:
        errors: What was measured.
        tolerance: What is allowed; the user's own element tolerance decides alone between `close` and `different`.
    """
    if errors.non_finite_mismatch:
        return "different", _non_finite(errors, tolerance)
    if not errors.elements:
        return "identical", "There are no values."
    if not errors.unequal:
        both = " NaN and Inf are at the same places." if errors.nan_a or errors.inf_a else ""
        return "identical", f"Every value is equal.{both}"
    explained = _rounding(errors, tolerance)
    if tolerance.by_user:
        return _by_user(errors, tolerance, explained)
    if explained is not None:
        return "rounding", explained
    return _close(errors, tolerance)


def first_diverging_token(errors: TensorErrors, tolerance: Tolerance) -> int | None:
    """The first token that lies further apart than rounding of it, or the others' error, explains.

    With the user's tolerance it is the first with an element outside. Otherwise a token diverges beyond the computed
    error, or beyond both the storage error and 4 times the median token that is not zero in both, whichever is less.
    """
    tokens = errors.tokens
    if tokens is None:
        return None
    if tolerance.by_user:
        return next((token for token, count in enumerate(tokens.outside) if count), None)
    storage = tolerance.roundoff_a + tolerance.roundoff_b
    limit = min(tolerance.computed, max(storage, TOKEN_FACTOR * tokens.typical))
    broken = errors.non_finite_mismatch > 0
    found = (
        token
        for token, error in enumerate(tokens.relative_l2)
        if error > limit or (broken and tokens.outside[token])
    )
    return next(found, None)


def _rounding(errors: TensorErrors, tolerance: Tolerance) -> str | None:
    """Why rounding explains the errors, None if it does not."""
    if tolerance.roundoff_a == tolerance.roundoff_b == 0.0:
        return None
    if not errors.beyond_storage:
        return f"Every value is the same but for being rounded to {tolerance.narrower}."
    if _fits(errors, tolerance.computed, tolerance.scale):
        return (
            f"Relative error {_percent(errors.relative_l2)}: computing in {tolerance.narrower} leaves up to "
            f"{_percent(tolerance.computed)}, spread evenly as it is here."
        )
    return None


def _close(errors: TensorErrors, tolerance: Tolerance) -> tuple[Verdict, str]:
    difference = _difference(errors, tolerance)
    if _fits(errors, tolerance.close, tolerance.close_scale):
        inside = f"A lower precision used inside would leave up to {_percent(tolerance.close)}."
        return "close", f"{difference} {inside}"
    return "different", difference


def _by_user(errors: TensorErrors, tolerance: Tolerance, explained: str | None) -> tuple[Verdict, str]:
    allowed = f"rtol {errors.rtol:g}, atol {errors.atol:g}"
    if errors.outside:
        also = f" {explained}" if explained else f" {_difference(errors, tolerance)}"
        return "different", f"{errors.outside:,} of {errors.elements:,} elements are beyond {allowed}.{also}"
    if explained:
        return "rounding", explained
    return "close", f"All elements are within {allowed}."


def _fits(errors: TensorErrors, bound: float, scale_bound: float) -> bool:
    """Whether errors are as small, as free of a change of scale and as evenly spread as rounding's."""
    if errors.relative_l2 is None or errors.relative_l2 > bound or not bound:
        return False
    if errors.scale is None or abs(errors.scale - 1.0) > scale_bound:
        return False
    return _concentrated(errors) is None


def _concentrated(errors: TensorErrors) -> int | None:
    """The token on which the error sits, if it is not spread over all that have values."""
    tokens = errors.tokens
    if tokens is None or tokens.filled < 2 or tokens.worst is None:
        return None
    touched = sum(count > 0 for count in tokens.unequal)
    uneven = tokens.relative_l2[tokens.worst] > TOKEN_FACTOR * (errors.relative_l2 or 0.0)
    return tokens.worst if uneven or touched < tokens.filled / 2 else None


def _difference(errors: TensorErrors, tolerance: Tolerance) -> str:
    """What is most remarkable about a difference."""
    if tolerance.roundoff_a == tolerance.roundoff_b == 0.0:
        return f"{errors.unequal:,} of {errors.elements:,} elements differ, and {tolerance.narrower} does not round."
    if errors.relative_l2 is None:
        largest = f"(largest difference {_number(errors.max_abs)})"
        if (errors.max_abs or 0.0) > _LARGEST_SQUARE_ROOT:
            return f"The squares of the values are beyond float64 {largest}."
        return f"A is zero and B is not {largest}."
    if errors.scale == 0.0 and errors.relative_l2 == 1.0:
        return f"B is zero and A is not (largest difference {_number(errors.max_abs)})."
    error = f"Relative error {_percent(errors.relative_l2)}"
    token = _concentrated(errors)
    if token is not None and errors.tokens is not None:
        return f"{error}, {_where(errors.tokens, token)}."
    if _only_scaled(errors, tolerance):
        return f"{error}: B is A times {errors.scale:.5g}, and rounding changes no scale."
    first = _equal_tokens(errors)
    if first:
        return f"{error}: the first {first} tokens are equal, from token {first} on they differ."
    if errors.relative_l2 > tolerance.computed:
        return f"{error}: computing in {tolerance.narrower} explains up to {_percent(tolerance.computed)}."
    return f"{error}, with the scale changed by {errors.scale or 0.0:.5g}, which rounding does not do."


def _equal_tokens(errors: TensorErrors) -> int:
    """How many tokens are equal before the first that is not."""
    if errors.tokens is None:
        return 0
    return next((token for token, count in enumerate(errors.tokens.unequal) if count), 0)


def _where(tokens: TokenErrors, token: int) -> str:
    touched = sum(count > 0 for count in tokens.unequal)
    error = tokens.relative_l2[token]
    size = _percent(error) if math.isfinite(error) else "A is zero there"
    worst = f"most of it at token {token} ({size})"
    if touched == 1:
        return f"all of it at token {token} ({size})"
    if touched < tokens.filled / 2:
        return f"in {touched} of {tokens.filled} tokens, {worst}; rounding in a computation touches all"
    return f"{worst}; rounding in a computation spreads evenly"


def _only_scaled(errors: TensorErrors, tolerance: Tolerance) -> bool:
    """Whether most of the error goes away when A is multiplied by one number."""
    if errors.scale is None or not errors.relative_l2 or abs(errors.scale - 1.0) <= tolerance.scale:
        return False
    return abs(errors.scale - 1.0) > 0.9 * errors.relative_l2


def _non_finite(errors: TensorErrors, tolerance: Tolerance) -> str:
    counts = ", ".join(
        f"{side} has {count:,} {kind}"
        for side, kind, count in (
            ("A", "NaN", errors.nan_a),
            ("A", "Inf", errors.inf_a),
            ("B", "NaN", errors.nan_b),
            ("B", "Inf", errors.inf_b),
        )
        if count
    )
    places = errors.non_finite_mismatch
    words = f"{places:,} {'place is' if places == 1 else 'places are'} NaN or Inf in one alone ({counts})."
    if tolerance.narrower == "float16" and (errors.inf_a > 0) != (errors.inf_b > 0):
        words += f" float16 ends at {_FLOAT16_LARGEST}: larger values become Inf."
    return words


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100.0 * fraction:.3g} %"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
