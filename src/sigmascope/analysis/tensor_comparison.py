"""Compare two tensors: find the layout in which they fit, measure the errors, judge them."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from sigmascope.analysis.layout_candidates import Layout
from sigmascope.analysis.tensor_errors import TensorErrors
from sigmascope.analysis.tensor_layouts import find_layout, find_order
from sigmascope.analysis.tensor_measuring import tensor_errors
from sigmascope.analysis.tensor_results import TensorComparison
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
