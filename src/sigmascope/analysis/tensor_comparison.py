"""Compare two tensors: find the layout in which they fit, measure the errors, and judge them in words.

What can be compared are dense tensors with values.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.analysis.tensor_errors import (
    TOKEN_FACTOR,
    Place,
    TensorErrors,
    TokenErrors,
    Tolerance,
    tensor_errors,
    tolerance_for,
)
from sigmascope.analysis.tensor_layouts import Layout, find_layout, find_order
from sigmascope.errors import ConfigError
from sigmascope.records.run import TensorFacts

_TOKEN_AXIS = {2: 0, 3: 1}
"""Token axis by number of axes: (tokens, width) and (batch, tokens, width)."""
Verdict = Literal["identical", "rounding", "close", "different"]
"""From best to worst: every value is equal; rounding to the dtypes explains it; a little more than that; more."""
TensorLike = Tensor | NDArray[Any]
ORDER: tuple[Verdict, ...] = ("identical", "rounding", "close", "different")
_FLOAT16_LARGEST = 65504
_LARGEST_SQUARE_ROOT = 1e150


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """What became of two tensors when they were compared.

    Attributes:
        a: The reference.
        b: The other.
        differences: Of `shape`, `dtype` and `device` those that differ, with both values as text.
        layout: What B was put through to fit A: see `Layout.kind`; None where it fits as it is.
        layout_words: The same in words.
        remainder: Of padding and parts, what the rest of the larger one holds: `zeros`, `repeated` or `values`.
        errors: What was measured; None where no layout brings the shapes together.
        first_token: The first token that diverges.
        tolerance: What was allowed.
        verdict: `identical`, `rounding`, `close` or `different`: of the values, whatever the layout.
        reason: Why, in words.
    """

    a: TensorFacts
    b: TensorFacts
    differences: Mapping[str, tuple[str, str]]
    layout: str | None
    layout_words: str | None
    remainder: str | None
    errors: TensorErrors | None
    first_token: int | None
    tolerance: Tolerance
    verdict: Verdict
    reason: str

    @property
    def agrees(self) -> bool:
        """Whether the values agree within the tolerance, be it in another layout."""
        return self.verdict != "different"

    @property
    def same_layout(self) -> bool:
        """Whether they were compared as they are."""
        return self.layout is None and "shape" not in self.differences

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values; a number that is not finite is None."""
        plain: dict[str, Any] = {
            "verdict": self.verdict,
            "reason": self.reason,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "a": _facts_dict(self.a),
            "b": _facts_dict(self.b),
            "differences": {name: list(values) for name, values in self.differences.items()},
            "layout": self.layout,
            "layout_words": self.layout_words,
            "remainder": self.remainder,
            "first_token": self.first_token,
            "tolerance": _fields_dict(self.tolerance),
            "errors": None,
        }
        if self.errors is not None:
            plain["errors"] = {**_fields_dict(self.errors), "share_outside": self.errors.share_outside}
        return plain


def _facts_dict(facts: TensorFacts) -> dict[str, Any]:
    return {"shape": list(facts.shape), "dtype": facts.dtype, "device": facts.device, "nbytes": facts.nbytes}


def _fields_dict(value: "Tolerance | TensorErrors | TokenErrors | Place") -> dict[str, Any]:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _fields_dict(value) if isinstance(value, TokenErrors | Place) else value


@dataclass(frozen=True, slots=True)
class Options:
    """How tensors are compared.

    Attributes:
        rtol: Allowed difference of an element relative to the larger of the two values; None: by dtype.
        atol: Allowed absolute difference of an element; if one of the two is given, the other is 0.
        token_axis: The axis whose slices are measured one by one; None: of (batch, tokens, width) and (tokens, width)
            the tokens, else none.
    """

    rtol: float | None = None
    atol: float | None = None
    token_axis: int | None = None


def compare_pair(
    a: TensorLike,
    b: TensorLike,
    options: Options,
    devices: tuple[str | None, str | None] = (None, None),
) -> TensorComparison:
    """Compare two tensors.

    Args:
        a: The reference.
        b: The other.
        options: Tolerances and token axis.
        devices: Where they lay when they were saved, if that is not where they lie now.

    Raises:
        ConfigError: One is no dense tensor with values, or an option makes no sense.
    """
    tensor_a, tensor_b = as_tensor(a, "A"), as_tensor(b, "B")
    facts_a, facts_b = outline(tensor_a, devices[0]), outline(tensor_b, devices[1])
    tolerance = tolerance_for(tensor_a.dtype, tensor_b.dtype, rtol=options.rtol, atol=options.atol)
    token_axis = _token_axis(tensor_a.dim(), options.token_axis)
    tensor_a, tensor_b = as_comparable(tensor_a, tensor_b)
    same_shape = tensor_a.shape == tensor_b.shape
    layout = (
        Layout("", "", tensor_a, tensor_b, token_axis)
        if same_shape
        else find_layout(tensor_a, tensor_b, token_axis)
    )
    errors: TensorErrors | None = None
    verdict: Verdict = "different"
    reason = f"No transposition, padding, repetition or reshaping brings {facts_a.shape} and {facts_b.shape} together."
    if layout is not None:
        errors, verdict, reason = _measured(layout, tolerance)
        reordered = (
            find_order(tensor_a, tensor_b, token_axis) if verdict == "different" and not layout.kind else None
        )
        if reordered is not None:
            layout, (errors, verdict, reason) = reordered, _measured(reordered, tolerance)
    return TensorComparison(
        a=facts_a,
        b=facts_b,
        differences=_different_facts(facts_a, facts_b),
        layout=(layout.kind or None) if layout else None,
        layout_words=(layout.words or None) if layout else None,
        remainder=layout.remainder if layout else None,
        errors=errors,
        first_token=None if errors is None else first_diverging_token(errors, tolerance),
        tolerance=tolerance,
        verdict=verdict,
        reason=reason,
    )


def _token_axis(dims: int, asked: int | None) -> int | None:
    if asked is None:
        return _TOKEN_AXIS.get(dims)
    if not -dims <= asked < dims:
        raise ConfigError(
            f"token_axis={asked}: A has {dims} axes.", hint="Count from 0, or from -1 at the end."
        )
    return asked % dims


def _measured(layout: Layout, tolerance: Tolerance) -> tuple[TensorErrors, Verdict, str]:
    """The errors under one layout, the verdict on them, and the reason with the layout in words."""
    errors = tensor_errors(layout.a, layout.b, tolerance, layout.token_axis)
    verdict, reason = judge(errors, tolerance)
    if layout.words:
        reason = f"With {layout.words}: {reason[0].lower()}{reason[1:]}"
    return errors, verdict, reason


def _different_facts(a: TensorFacts, b: TensorFacts) -> dict[str, tuple[str, str]]:
    pairs = {name: (str(getattr(a, name)), str(getattr(b, name))) for name in ("shape", "dtype", "device")}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def judge(errors: TensorErrors, tolerance: Tolerance) -> tuple[Verdict, str]:
    """The verdict on two tensors and the reason for it."""
    if errors.non_finite_mismatch:
        return "different", _non_finite(errors, tolerance)
    if not errors.elements:
        return "identical", "There are no values."
    if not errors.unequal:
        both = " NaN and Inf are at the same places." if errors.nan_a or errors.inf_a else ""
        return "identical", f"Every value is equal.{both}"
    explained = _why_rounding(errors, tolerance)
    if tolerance.by_user:
        return _by_user_tolerance(errors, tolerance, explained)
    if explained is not None:
        return "rounding", explained
    return _close_or_different(errors, tolerance)


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


def _why_rounding(errors: TensorErrors, tolerance: Tolerance) -> str | None:
    """Why rounding explains the errors, None if it does not."""
    if tolerance.roundoff_a == tolerance.roundoff_b == 0.0:
        return None
    if not errors.beyond_storage:
        return f"Every value is the same but for being rounded to {tolerance.narrower}."
    if _is_like_rounding(errors, tolerance.computed, tolerance.scale):
        return (
            f"Relative error {_percent(errors.relative_l2)}: computing in {tolerance.narrower} leaves up to "
            f"{_percent(tolerance.computed)}, spread evenly as it is here."
        )
    return None


def _is_like_rounding(errors: TensorErrors, bound: float, scale_bound: float) -> bool:
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


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100.0 * fraction:.3g} %"


def _by_user_tolerance(
    errors: TensorErrors, tolerance: Tolerance, explained: str | None
) -> tuple[Verdict, str]:
    allowed = f"rtol {errors.rtol:g}, atol {errors.atol:g}"
    if errors.outside:
        also = f" {explained}" if explained else f" {_difference_words(errors, tolerance)}"
        return "different", f"{errors.outside:,} of {errors.elements:,} elements are beyond {allowed}.{also}"
    if explained:
        return "rounding", explained
    return "close", f"All elements are within {allowed}."


def _difference_words(errors: TensorErrors, tolerance: Tolerance) -> str:
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
        return f"{error}, {_token_words(errors.tokens, token)}."
    if _only_scaled(errors, tolerance):
        return f"{error}: B is A times {errors.scale:.5g}, and rounding changes no scale."
    first = _equal_tokens(errors)
    if first:
        return f"{error}: the first {first} tokens are equal, from token {first} on they differ."
    if errors.relative_l2 > tolerance.computed:
        return f"{error}: computing in {tolerance.narrower} explains up to {_percent(tolerance.computed)}."
    return f"{error}, with the scale changed by {errors.scale or 0.0:.5g}, which rounding does not do."


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _token_words(tokens: TokenErrors, token: int) -> str:
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


def _equal_tokens(errors: TensorErrors) -> int:
    """How many tokens are equal before the first that is not."""
    if errors.tokens is None:
        return 0
    return next((token for token, count in enumerate(errors.tokens.unequal) if count), 0)


def _close_or_different(errors: TensorErrors, tolerance: Tolerance) -> tuple[Verdict, str]:
    difference = _difference_words(errors, tolerance)
    if _is_like_rounding(errors, tolerance.close, tolerance.close_scale):
        inside = f"A lower precision used inside would leave up to {_percent(tolerance.close)}."
        return "close", f"{difference} {inside}"
    return "different", difference


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
    diverging = (
        token
        for token, error in enumerate(tokens.relative_l2)
        if error > limit or (broken and tokens.outside[token])
    )
    return next(diverging, None)


def as_tensor(value: TensorLike, side: str) -> Tensor:
    """A dense tensor with values.

    Raises:
        ConfigError: It is none; `side` says which.
    """
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        except (TypeError, ValueError) as error:
            message = f"{side} is an array of {value.dtype} that PyTorch cannot take over ({error})."
            raise ConfigError(message, hint="Give it as a tensor.") from error
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{side} is a {type(value).__name__} and no tensor.",
            hint="Give tensors, arrays, or what sigmascope.load_tensors gives.",
        )
    if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
        message = f"{side} is a {kind} tensor of {value.dtype}: its values cannot be compared."
        raise ConfigError(message, hint="Convert it with .to_dense() or .dequantize() first.")
    return value.detach()


def as_comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Complex numbers as two real ones on an axis more; fp4, which PyTorch does not compute with, by its codes.

    Raises:
        ConfigError: One alone is fp4.
    """
    packed = [str(tensor.dtype) == "torch.float4_e2m1fn_x2" for tensor in (a, b)]
    if all(packed):
        return a.view(torch.uint8), b.view(torch.uint8)
    if any(packed):
        raise ConfigError(
            f"{a.dtype} and {b.dtype} cannot be compared.",
            hint="Unpack the fp4 numbers first: load_tensors can.",
        )
    if not (a.is_complex() or b.is_complex()):
        return a, b
    wide_a, wide_b = (tensor if tensor.is_complex() else tensor.to(torch.complex128) for tensor in (a, b))
    return torch.view_as_real(wide_a.resolve_conj()), torch.view_as_real(wide_b.resolve_conj())


def outline(tensor: Tensor, device: str | None) -> TensorFacts:
    """Shape, dtype, bytes, and the device: that of its dump, or where it lies."""
    return TensorFacts(
        shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=device or str(tensor.device),
        nbytes=tensor.numel() * tensor.element_size(),
        num_elements=tensor.numel(),
    )
