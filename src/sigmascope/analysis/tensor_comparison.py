"""Do two tensors, dumps or runs' dumps agree; where they do not, how far apart are they, and why.

Of two tensors the layout in which they fit is found, the errors are measured, and they are judged in words. What can
be compared are dense tensors with values.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, overload

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
from sigmascope.progress import Progress, no_progress
from sigmascope.records.prompts import prompt_sha256
from sigmascope.records.run import TensorFacts
from sigmascope.units import rough_percent

__all__ = [
    "DumpComparison",
    "NamedComparison",
    "Options",
    "RunComparison",
    "TensorComparison",
    "compare_dumps",
    "compare_runs",
    "compare_tensors",
]


TensorLike = Tensor | NDArray[Any]


TensorsByName = Mapping[str, TensorLike]


Verdict = Literal["identical", "rounding", "close", "different"]
"""From best to worst: every value is equal; rounding to the dtypes explains it; a little more than that; more."""


class _Matched(ABC):
    """Things of two sides that are matched by name: they agree if all have counterparts that agree."""

    __slots__ = ()
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @abstractmethod
    def _matched(self) -> "Sequence[TensorComparison | DumpComparison]":
        """The comparisons of those that both sides have."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all; `different` if one has no counterpart or none has."""
        matched = self._matched()
        if self.only_a or self.only_b or not matched:
            return "different"
        return max((comparison.verdict for comparison in matched), key=ORDER.index)

    @property
    def agrees(self) -> bool:
        """Whether all have counterparts and agree within their tolerances."""
        return self.verdict != "different"

    @property
    def same_layout(self) -> bool:
        """Whether all tensors were compared as they are."""
        return all(comparison.same_layout for comparison in self._matched())


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
        """Whether the values agree within the tolerance, even in another layout."""
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


@dataclass(frozen=True, slots=True)
class NamedComparison:
    """Two tensors of two dumps, with their names there."""

    name_a: str
    name_b: str
    comparison: TensorComparison


ORDER: tuple[Verdict, ...] = ("identical", "rounding", "close", "different")


@dataclass(frozen=True, slots=True)
class DumpComparison(_Matched):
    """Two dumps.

    Attributes:
        pairs: The tensors that were compared, in A's order.
        only_a: Names of A that have no counterpart.
        only_b: Names of B that have none.
        context: What the headers say differently of encoder and prompts, as (A, B); a prompt by its hash.
    """

    pairs: tuple[NamedComparison, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    context: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def _matched(self) -> Sequence[TensorComparison]:
        return [pair.comparison for pair in self.pairs]

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "context": {name: list(values) for name, values in self.context.items()},
            "tensors": [
                {"name_a": pair.name_a, "name_b": pair.name_b, **pair.comparison.as_dict()}
                for pair in self.pairs
            ],
        }


@overload
def compare_tensors(
    a: TensorLike,
    b: TensorLike,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
) -> TensorComparison: ...
@overload
def compare_tensors(
    a: TensorsByName,
    b: TensorsByName,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> DumpComparison: ...
def compare_tensors(
    a: TensorLike | TensorsByName,
    b: TensorLike | TensorsByName,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    token_axis: int | None = None,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> TensorComparison | DumpComparison:
    """Compare two tensors, or two dumps tensor by tensor.

    Sums are in float64, over pieces of the tensors, which are never copied whole. Neither tensor is changed. The dumps
    of two runs are compared by `compare_runs(TensorDumps(folder_a), TensorDumps(folder_b))`.

    Args:
        a: The reference: a tensor, an array, or a mapping of names to them such as `load_tensors` gives.
        b: The other, of the same kind.
        rtol: What an element may differ by, relative to the larger of the two values. Without `rtol` and `atol` the
            verdict rests on what rounding in the two dtypes explains.
        atol: What an element may differ by absolutely.
        token_axis: The axis whose slices are measured one by one. By default the second of three axes (batch, tokens,
            width) and the first of two.
        names: For dumps: compare these alone, A's name to B's.
        progress: For dumps: called with (pairs done, pairs in all, name).

    Returns:
        The comparison; `.verdict` and `.reason` are what it comes to, `.as_dict()` is all of it as JSON values.

    Raises:
        ConfigError: A tensor has no values to compare, a name is not there, or a tolerance is negative.
    """
    options = Options(rtol, atol, token_axis)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return compare_dumps(a, b, options, names=names, progress=progress)
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        raise ConfigError(
            "A tensor cannot be compared with a mapping of tensors.",
            hint="Pick the tensor out of the mapping.",
        )
    return compare_pair(a, b, options)


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


def compare_dumps(
    a: TensorsByName,
    b: TensorsByName,
    options: Options = Options(),
    *,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> DumpComparison:
    """Compare tensors of the same name, with one pair in memory at a time if the dumps are read lazily.

    Args:
        a: Tensors by name: the reference; what `load_tensors` gives brings its metadata.
        b: The others.
        options: Tolerances and token axis.
        names: Compare these alone: A's name to B's. Without it tensors of the same name are compared, or those that
            are the only ones in their dumps.
        progress: Called with (pairs done, pairs in all, name).

    Raises:
        ConfigError: `names` names what is not there, or a tensor cannot be compared.
    """
    chosen = dict(names) if names else _same_names(a, b)
    for name_a, name_b in chosen.items():
        _check_name(name_a, a, "A")
        _check_name(name_b, b, "B")
    pairs = []
    for done, (name_a, name_b) in enumerate(chosen.items()):
        progress(done, len(chosen), name_a)
        devices = (_saved_device(a, name_a), _saved_device(b, name_b))
        pairs.append(NamedComparison(name_a, name_b, compare_pair(a[name_a], b[name_b], options, devices)))
    progress(len(chosen), len(chosen), "")
    taken = set(chosen.values())
    return DumpComparison(
        pairs=tuple(pairs),
        only_a=() if names else tuple(name for name in a if name not in chosen),
        only_b=() if names else tuple(name for name in b if name not in taken),
        context=_header_differences(a, b),
    )


def _same_names(a: TensorsByName, b: TensorsByName) -> dict[str, str]:
    chosen = {name: name for name in a if name in b}
    if not chosen and len(a) == len(b) == 1:
        return {next(iter(a)): next(iter(b))}
    return chosen


def _check_name(name: str, tensors: TensorsByName, side: str) -> None:
    if name not in tensors:
        near = difflib.get_close_matches(name, list(tensors), n=3, cutoff=0.4) or list(tensors)[:8]
        raise ConfigError(
            f"{side} has no tensor {name!r}.",
            hint=f"It has {', '.join(near)}." if near else "It has no tensors at all.",
        )


def _saved_device(tensors: TensorsByName, name: str) -> str | None:
    """Where a tensor lay when it was dumped, if its dump says so."""
    saved = getattr(getattr(tensors, "metadata", None), "tensors", {}).get(name)
    return getattr(saved, "device", None)


def _header_differences(a: TensorsByName, b: TensorsByName) -> dict[str, tuple[str, str]]:
    """What two headers say differently. What only one of them says does not count."""
    metadata_a, metadata_b = getattr(a, "metadata", None), getattr(b, "metadata", None)
    encoders = (getattr(metadata_a, "encoder", None), getattr(metadata_b, "encoder", None))
    differences: dict[str, tuple[str, str]] = {}
    if None not in encoders and encoders[0] != encoders[1]:
        differences["encoder"] = (str(encoders[0]), str(encoders[1]))
    prompts_a, prompts_b = getattr(metadata_a, "prompts", {}), getattr(metadata_b, "prompts", {})
    for name in prompts_a:
        hashes = tuple(_prompt_hash(prompts[name]) for prompts in (prompts_a, prompts_b) if name in prompts)
        if len(hashes) == 2 and hashes[0] != hashes[1]:
            differences[name] = (f"sha256 {hashes[0][:12]}", f"sha256 {hashes[1][:12]}")
    return differences


def _prompt_hash(prompt: Any) -> str:
    return prompt_sha256(prompt.text) if prompt.text is not None else str(prompt.sha256)


@dataclass(frozen=True, slots=True)
class RunComparison(_Matched):
    """The dumps of two runs.

    Attributes:
        dumps: By name, those that both have, in A's order.
        only_a: Names of dumps that A alone has.
        only_b: Names of dumps that B alone has.
    """

    dumps: Mapping[str, DumpComparison]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()

    def _matched(self) -> Sequence[DumpComparison]:
        return list(self.dumps.values())

    @property
    def first_difference(self) -> str | None:
        """The first dump that does not agree, in the order in which A was saved; None if all do."""
        return next((name for name, dump in self.dumps.items() if not dump.agrees), None)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "same_layout": self.same_layout,
            "first_difference": self.first_difference,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "dumps": {name: dump.as_dict() for name, dump in self.dumps.items()},
        }


def compare_runs(
    a: Mapping[str, TensorsByName],
    b: Mapping[str, TensorsByName],
    options: Options = Options(),
    *,
    names: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> RunComparison:
    """Compare the dumps of two runs by name, one at a time.

    Args:
        a: Dumps by name, such as `TensorDumps(folder)`: the reference.
        b: The others.
        options: Tolerances and token axis.
        names: As for `compare_dumps`, in the dumps that have them; others are passed over.
        progress: Called with (dumps done, dumps in all, name).

    Raises:
        ConfigError: As for `compare_dumps`; no dump of both has a tensor of `names`.
        CheckpointError: A dump cannot be read.
    """
    names_a, names_b = list(a), set(b)
    common = [name for name in names_a if name in names_b]
    compared = {}
    for done, name in enumerate(common):
        progress(done, len(common), name)
        dump_a, dump_b = a[name], b[name]
        wanted = {
            first: second for first, second in (names or {}).items() if first in dump_a and second in dump_b
        }
        if wanted or not names:
            compared[name] = compare_dumps(dump_a, dump_b, options, names=wanted)
    if names and not compared:
        raise ConfigError(
            f"No dump that both have holds {', '.join(f'{first}={second}' for first, second in names.items())}.",
            hint="Leave the names out to see what there is.",
        )
    progress(len(common), len(common), "")
    return RunComparison(
        compared,
        tuple(name for name in names_a if name not in names_b),
        tuple(name for name in b if name not in set(names_a)),
    )


_TOKEN_AXIS = {2: 0, 3: 1}
"""Token axis by number of axes: (tokens, width) and (batch, tokens, width)."""


_FLOAT16_LARGEST = 65504
_LARGEST_SQUARE_ROOT = 1e150


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
        devices: The devices that they were saved from, if they are elsewhere now.

    Raises:
        ConfigError: One is not a dense tensor with values, or an option makes no sense.
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
    words = f"{places:,} {'place is' if places == 1 else 'places are'} NaN or Inf in only one of the two ({counts})."
    if tolerance.narrower == "float16" and (errors.inf_a > 0) != (errors.inf_b > 0):
        words += f" float16 ends at {_FLOAT16_LARGEST}: larger values become Inf."
    return words


def _why_rounding(errors: TensorErrors, tolerance: Tolerance) -> str | None:
    """Why rounding explains the errors, None if it does not."""
    if tolerance.roundoff_a == tolerance.roundoff_b == 0.0:
        return None
    if not errors.beyond_storage:
        return f"Every value is equal once rounded to {tolerance.narrower}."
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
    return "unknown" if fraction is None else rough_percent(fraction, 3)


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
        return f"{error}: B is A times {errors.scale:.5g}, and rounding does not change the scale."
    first = _equal_tokens(errors)
    if first:
        return f"{error}: the first {first} tokens are equal; from token {first} on, they differ."
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
        ConfigError: It is not one; the message names `side`.
    """
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        except (TypeError, ValueError) as error:
            message = f"{side} is an array of {value.dtype} that PyTorch cannot convert ({error})."
            raise ConfigError(message, hint="Give it as a tensor.") from error
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{side} is a {type(value).__name__}, not a tensor.",
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
