"""Two tensors against each other: facts, layout, errors, verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from sigmascope.analysis.tensor_errors import Place, TensorErrors, TokenErrors
from sigmascope.analysis.tensor_layouts import Layout, find_layout, find_order
from sigmascope.analysis.tensor_measuring import tensor_errors
from sigmascope.analysis.tensor_values import TensorLike, as_comparable, as_tensor, outline
from sigmascope.analysis.tolerances import Tolerance, tolerance_for
from sigmascope.analysis.verdicts import Verdict, first_diverging_token, judge
from sigmascope.errors import ConfigError
from sigmascope.records.facts import TensorFacts

_TOKEN_AXIS = {2: 0, 3: 1}
"""Token axis by number of axes: (tokens, width) and (batch, tokens, width)."""


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
            "a": _facts(self.a),
            "b": _facts(self.b),
            "differences": {name: list(values) for name, values in self.differences.items()},
            "layout": self.layout,
            "layout_words": self.layout_words,
            "remainder": self.remainder,
            "first_token": self.first_token,
            "tolerance": _columns(self.tolerance),
            "errors": None,
        }
        if self.errors is not None:
            plain["errors"] = {**_columns(self.errors), "share_outside": self.errors.share_outside}
        return plain


@dataclass(frozen=True, slots=True)
class Compared:
    """What comes of comparing under one layout."""

    errors: TensorErrors
    verdict: Verdict
    reason: str
    token: int | None = field(default=None)


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
    left, right = as_tensor(a, "A"), as_tensor(b, "B")
    facts_a, facts_b = outline(left, devices[0]), outline(right, devices[1])
    tolerance = tolerance_for(left.dtype, right.dtype, rtol=options.rtol, atol=options.atol)
    token_axis = _token_axis(left.dim(), options.token_axis)
    left, right = as_comparable(left, right)
    layout = _fitting(left, right, token_axis)
    result = None if layout is None else _compared(layout, tolerance)
    if layout is not None and result is not None and result.verdict == "different" and not layout.kind:
        other = find_order(left, right, token_axis)
        if other is not None:
            layout, result = other, _compared(other, tolerance)
    base = _without_layout(facts_a, facts_b, tolerance)
    return base if layout is None or result is None else _filled(base, layout, result)


def _without_layout(a: TensorFacts, b: TensorFacts, tolerance: Tolerance) -> TensorComparison:
    return TensorComparison(
        a=a,
        b=b,
        differences=_differences(a, b),
        layout=None,
        layout_words=None,
        remainder=None,
        errors=None,
        first_token=None,
        tolerance=tolerance,
        verdict="different",
        reason=f"No transposition, padding, repetition or reshaping brings {a.shape} and {b.shape} together.",
    )


def _filled(base: TensorComparison, layout: Layout, result: Compared) -> TensorComparison:
    words = layout.words or None
    reason = (
        result.reason if words is None else f"With {words}: {result.reason[0].lower()}{result.reason[1:]}"
    )
    return replace(
        base,
        layout=layout.kind or None,
        layout_words=words,
        remainder=layout.remainder,
        errors=result.errors,
        first_token=result.token,
        verdict=result.verdict,
        reason=reason,
    )


def _fitting(a: Tensor, b: Tensor, token_axis: int | None) -> Layout | None:
    return Layout("", "", a, b, token_axis) if a.shape == b.shape else find_layout(a, b, token_axis)


def _compared(layout: Layout, tolerance: Tolerance) -> Compared:
    errors = tensor_errors(layout.a, layout.b, tolerance, layout.token_axis)
    verdict, reason = judge(errors, tolerance)
    return Compared(errors, verdict, reason, first_diverging_token(errors, tolerance))


def _token_axis(dims: int, asked: int | None) -> int | None:
    if asked is None:
        return _TOKEN_AXIS.get(dims)
    if not -dims <= asked < dims:
        raise ConfigError(
            f"token_axis={asked}: A has {dims} axes.", hint="Count from 0, or from -1 at the end."
        )
    return asked % dims


def _differences(a: TensorFacts, b: TensorFacts) -> dict[str, tuple[str, str]]:
    pairs = {name: (str(getattr(a, name)), str(getattr(b, name))) for name in ("shape", "dtype", "device")}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def _facts(facts: TensorFacts) -> dict[str, Any]:
    return {"shape": list(facts.shape), "dtype": facts.dtype, "device": facts.device, "nbytes": facts.nbytes}


def _columns(value: "Tolerance | TensorErrors | TokenErrors | Place") -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _columns(value) if isinstance(value, TokenErrors | Place) else value
