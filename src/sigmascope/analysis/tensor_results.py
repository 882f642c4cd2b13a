"""What is found of two tensors that are compared: facts, layout, errors, verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sigmascope.analysis.tensor_errors import Place, TensorErrors, TokenErrors
from sigmascope.analysis.tolerances import Tolerance
from sigmascope.analysis.verdicts import Verdict
from sigmascope.records.facts import TensorFacts


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
