"""How two changes of one weight differ: in size, direction, and in the spaces they act on."""

from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspection.factor_differences import difference_norm
from sigmascope.lora.inspection.subspaces import bases_of, subspace_overlap
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.shapes import matrix_shape, same_matrix

Presence = Literal["both", "only_a", "only_b", "other_shape", "not_measured"]


@dataclass(frozen=True, slots=True)
class ModuleSide:
    """What one LoRA has for a module.

    Attributes:
        name: As its file names it.
        kind: `lora` for plain factors, else the kind of change, such as `loha` or `dora`.
        rank: Of plain factors; None of others.
        alpha: As stored; None of others.
        dtype: Of the factors, such as `float16`; None of other changes.
        shape: Of the weight that is changed.
        norm: ‖ΔW‖; None where the change is known only beside a base.
    """

    name: str
    kind: str
    rank: int | None
    alpha: float | None
    dtype: str | None
    shape: tuple[int, ...]
    norm: float | None


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """One module of two LoRAs A and B.

    Attributes:
        name: The name that both sides' names stand for.
        presence: In which it is. `other_shape`: in both, for weights of different shape. `not_measured`: in
            both, but one side is a change that is known only beside a base.
        a: A's side, None where A lacks the module.
        b: B's side.
        inner: <ΔA, ΔB>; 0 where one is missing, None where not measured.
        difference_norm: ‖ΔA − ΔB‖; the other's norm where one is missing, None where not measured.
        column_overlap: Of the spaces written to, 0 to 1 (`subspace_overlap`); None unless both are factors.
        row_overlap: Of the spaces read from.
    """

    name: str
    presence: Presence
    a: ModuleSide | None
    b: ModuleSide | None
    inner: float | None = None
    difference_norm: float | None = None
    column_overlap: float | None = None
    row_overlap: float | None = None

    @property
    def norm_a(self) -> float:
        """‖ΔA‖, 0 where A lacks the module or it is not known."""
        return (self.a.norm or 0.0) if self.a else 0.0

    @property
    def norm_b(self) -> float:
        """‖ΔB‖, 0 where B lacks the module or it is not known."""
        return (self.b.norm or 0.0) if self.b else 0.0

    @property
    def cosine(self) -> float | None:
        """<ΔA, ΔB> / (‖ΔA‖·‖ΔB‖); None where a side is missing or zero."""
        product = self.norm_a * self.norm_b
        return self.inner / product if self.inner is not None and product > 0.0 else None

    @property
    def relative_difference(self) -> float | None:
        """‖ΔA − ΔB‖ / ‖ΔA‖; None where A has no change here or it is not measured."""
        if self.difference_norm is None or self.norm_a == 0.0:
            return None
        return self.difference_norm / self.norm_a

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        return asdict(self) | {"cosine": self.cosine, "relative_difference": self.relative_difference}

    def within(self, tolerance: float) -> bool:
        """Whether ‖ΔA − ΔB‖ is at most this share of the larger change; a module of zeros equals none."""
        largest = max(self.norm_a, self.norm_b)
        return self.difference_norm is not None and self.difference_norm <= tolerance * largest

    def within_scaled(self, factor: float, tolerance: float) -> bool:
        """Whether ‖ΔB − factor·ΔA‖ is at most this share of the larger of the two."""
        if self.inner is None:
            return False
        a, b = factor * self.norm_a, self.norm_b
        squared = b * b - 2.0 * factor * self.inner + a * a
        return sqrt(max(squared, 0.0)) <= tolerance * max(abs(a), b)


def compare_factors(
    name: str, a: ModuleSide, b: ModuleSide, one: LoraFactors, other: LoraFactors
) -> ModuleDifference:
    """Measure two plain changes from r×r matrices, without forming either.

    Shapes that are one matrix are compared by it; see `same_matrix`.
    """
    if not same_matrix(one.weight_shape, other.weight_shape):
        return ModuleDifference(name, "other_shape", a, b, 0.0, _apart(a, b))
    shape = matrix_shape(one.weight_shape)
    first, second = (replace(pair, weight_shape=shape) for pair in (one, other))
    spaces = [bases_of(pair) for pair in (first, second)]
    return ModuleDifference(
        name,
        "both",
        a,
        b,
        inner=first.inner(second),
        difference_norm=difference_norm(first, second),
        column_overlap=subspace_overlap(spaces[0].columns, spaces[1].columns),
        row_overlap=subspace_overlap(spaces[0].rows, spaces[1].rows),
    )


def compare_deltas(name: str, a: ModuleSide, b: ModuleSide, one: Tensor, other: Tensor) -> ModuleDifference:
    """Measure two changes that are formed, where one at least is more than up and down."""
    if not same_matrix(one.shape, other.shape):
        return ModuleDifference(name, "other_shape", a, b, 0.0, _apart(a, b))
    first, second = one.flatten(), other.flatten()
    inner = float(torch.dot(first.to(torch.float64), second.to(torch.float64)))
    return ModuleDifference(name, "both", a, b, inner=inner, difference_norm=frobenius_norm(first - second))


def same_tensors(one: LoraFactors | WeightChange, other: LoraFactors | WeightChange) -> bool:
    """Whether two changes are stored as the same tensors, so that they are the same beside any base."""
    if isinstance(one, DoraChange) and isinstance(other, DoraChange):
        magnitudes = _equal(one.magnitude.flatten(), other.magnitude.flatten())
        same_axis = one.per_output == other.per_output
        return magnitudes and same_axis and same_tensors(one.direction, other.direction)
    if isinstance(one, LoraFactors) and isinstance(other, LoraFactors):
        return one.scale == other.scale and _equal(one.up, other.up) and _equal(one.down, other.down)
    if isinstance(one, Adapter) and isinstance(other, Adapter):
        return (
            one.kind == other.kind
            and one.scale == other.scale
            and one.parts.keys() == other.parts.keys()
            and all(_equal(part, other.parts[name]) for name, part in one.parts.items())
        )
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _apart(a: ModuleSide, b: ModuleSide) -> float:
    """The difference of changes that share no value."""
    return sqrt((a.norm or 0.0) ** 2 + (b.norm or 0.0) ** 2)
