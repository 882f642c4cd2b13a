"""Compare two LoRA files: the same change, a scaled copy, or a different one?

`compare_loras` gives the modules of both files common names and measures how the two changes of each weight differ: in
size, in direction, and in the spaces that they act on (`ModuleDifference`). `LoraComparison.verdict` sums it up.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import fsum, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange, form_delta
from sigmascope.lora.alignment import AlignedLoras, align_all
from sigmascope.lora.effect import shared_spaces
from sigmascope.lora.factors import LoraFactors, difference_norm
from sigmascope.lora.file import LoraFile
from sigmascope.lora.linalg import as_float64, frobenius_norm, matrix_shape, root_sum_square, same_matrix
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.reader import open_lora
from sigmascope.progress import Progress, no_progress

__all__ = ["LoraComparison", "LoraSummary", "ModuleDifference", "compare_loras"]

DEFAULT_TOLERANCE: Final = 0.01
"""Rounding factors to bfloat16 changes ΔW by about 0.2 %."""
Verdict = Literal["same", "scaled", "different"]
Presence = Literal["both", "only_a", "only_b", "other_shape", "not_measured"]


@dataclass(frozen=True, slots=True)
class LoraSummary:
    """One of the two files.

    Attributes:
        path: As given.
        format: `native`, `kohya`, `peft` or `comfyui`.
        modules: How many there are.
        parameters: Number of stored values.
        ranks: How many modules have each rank.
        dtypes: How many plain modules have each dtype.
        norm: ‖ΔW‖ over all modules that could be measured.
    """

    path: Path
    format: str
    modules: int
    parameters: int
    ranks: dict[int, int]
    dtypes: dict[str, int]
    norm: float


@dataclass(frozen=True, slots=True)
class MetadataDifference:
    """One header field; None on the side that lacks it."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class ModuleSide:
    """One LoRA's module.

    Attributes:
        name: Its name in the file.
        kind: `lora` for plain factors, else the kind of change, such as `loha` or `dora`.
        rank: Of the factors; None for other kinds.
        alpha: As stored; None for other kinds.
        dtype: Of the factors, such as `float16`; None for other kinds.
        shape: Of the changed weight.
        norm: ‖ΔW‖; None if the change depends on the base model's weight.
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
        name: The module's common name.
        presence: Which file has it. `other_shape`: both, for weights of different shapes. `not_measured`: both, but one
            change depends on the base model's weight.
        a: A's module; None if A lacks it.
        b: B's module; None if B lacks it.
        inner: <ΔA, ΔB>; 0 if one is missing, None if not measured.
        difference_norm: ‖ΔA − ΔB‖; the other's norm if one is missing, None if not measured.
        column_overlap: How far both write to the same space, 0 to 1 (`SharedSpaces`); None unless both are factors.
        row_overlap: The same for the spaces that they read from.
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
        """‖ΔA‖; 0 if A lacks the module or its norm is not known."""
        return (self.a.norm or 0.0) if self.a else 0.0

    @property
    def norm_b(self) -> float:
        """‖ΔB‖; 0 if B lacks the module or its norm is not known."""
        return (self.b.norm or 0.0) if self.b else 0.0

    @property
    def cosine(self) -> float | None:
        """<ΔA, ΔB> / (‖ΔA‖·‖ΔB‖); None if a side is missing or zero."""
        product = self.norm_a * self.norm_b
        return self.inner / product if self.inner is not None and product > 0.0 else None

    @property
    def relative_difference(self) -> float | None:
        """‖ΔA − ΔB‖ / ‖ΔA‖; None if A has no change here or it is not measured."""
        if self.difference_norm is None or self.norm_a == 0.0:
            return None
        return self.difference_norm / self.norm_a

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        return asdict(self) | {"cosine": self.cosine, "relative_difference": self.relative_difference}

    def within(self, tolerance: float) -> bool:
        """Whether ‖ΔA − ΔB‖ is at most this share of the larger change; a zero module equals a missing one."""
        largest = max(self.norm_a, self.norm_b)
        return self.difference_norm is not None and self.difference_norm <= tolerance * largest

    def within_scaled(self, factor: float, tolerance: float) -> bool:
        """Whether ‖ΔB − factor·ΔA‖ is at most this share of the larger of the two."""
        if self.inner is None:
            return False
        a, b = factor * self.norm_a, self.norm_b
        squared = b * b - 2.0 * factor * self.inner + a * a
        return sqrt(max(squared, 0.0)) <= tolerance * max(abs(a), b)


@dataclass(frozen=True, slots=True)
class LoraComparison:
    """Two LoRAs, module by module.

    Attributes:
        a: The first.
        b: The second.
        modules: A's modules in its order, then those that only B has.
        metadata: Header fields that differ.
        tolerance: The largest relative difference at which two modules count as the same.
    """

    a: LoraSummary
    b: LoraSummary
    modules: tuple[ModuleDifference, ...]
    metadata: tuple[MetadataDifference, ...]
    tolerance: float

    @property
    def only_a(self) -> tuple[str, ...]:
        """Modules that B lacks."""
        return tuple(module.name for module in self.modules if module.presence == "only_a")

    @property
    def only_b(self) -> tuple[str, ...]:
        """Modules that A lacks."""
        return tuple(module.name for module in self.modules if module.presence == "only_b")

    @property
    def not_measured(self) -> tuple[str, ...]:
        """Modules of both whose change depends on a base model's weight."""
        return tuple(module.name for module in self.modules if module.presence == "not_measured")

    @property
    def inner(self) -> float:
        """<ΔA, ΔB> over all modules."""
        return fsum(module.inner or 0.0 for module in self.modules)

    @property
    def difference_norm(self) -> float:
        """‖ΔA − ΔB‖ over all modules that could be measured."""
        return root_sum_square([module.difference_norm or 0.0 for module in self.modules])

    @property
    def cosine(self) -> float | None:
        """The cosine of the two changes as a whole; None if one is zero."""
        product = self.a.norm * self.b.norm
        return self.inner / product if product > 0.0 else None

    @property
    def relative_difference(self) -> float | None:
        """‖ΔA − ΔB‖ / ‖ΔA‖; None if A changes nothing."""
        return self.difference_norm / self.a.norm if self.a.norm > 0.0 else None

    @property
    def factor(self) -> float | None:
        """The x for which x·ΔA is nearest to ΔB; None if A changes nothing."""
        return self.inner / self.a.norm**2 if self.a.norm > 0.0 else None

    @property
    def verdict(self) -> Verdict:
        """`same`: every module is within the tolerance. `scaled`: every module is, once A is multiplied by `factor`."""
        if all(module.within(self.tolerance) for module in self.modules):
            return "same"
        factor = self.factor
        if factor and all(module.within_scaled(factor, self.tolerance) for module in self.modules):
            return "scaled"
        return "different"

    @property
    def most_different(self) -> tuple[ModuleDifference, ...]:
        """The ten modules with the largest ‖ΔA − ΔB‖, largest first."""
        measured = [module for module in self.modules if module.difference_norm]
        return tuple(sorted(measured, key=lambda module: -(module.difference_norm or 0.0))[:10])

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values, the verdict first."""
        names = ("cosine", "relative_difference", "difference_norm", "tolerance")
        return {
            "verdict": self.verdict,
            "factor": self.factor,
            **{name: getattr(self, name) for name in names},
            "a": asdict(self.a) | {"path": str(self.a.path)},
            "b": asdict(self.b) | {"path": str(self.b.path)},
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "not_measured": list(self.not_measured),
            "metadata": [asdict(field) for field in self.metadata],
            "modules": [module.as_dict() for module in self.modules],
        }


def compare_loras(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    progress: Progress = no_progress,
) -> LoraComparison:
    """Compare two LoRA files of any formats, module by module; the model is not needed.

    Args:
        a: The first LoRA.
        b: The second.
        tolerance: The largest ‖ΔA − ΔB‖, as a share of the larger change, at which two modules count as the same.
        progress: Called after each module.

    Raises:
        ConfigError: `tolerance` is negative or not a number.
        CheckpointError: A file is missing, damaged, or not a file of tensors.
        LoraFormatError: A file's keys follow no known format, or its factors do not fit together.
        NonFiniteError: A module holds NaN or Inf.
    """
    if not 0.0 <= tolerance < float("inf"):
        raise ConfigError(
            f"--tolerance {tolerance} is not a number of 0 or more.", hint="Use a number such as 0.01."
        )
    with open_lora(Path(a)) as first, open_lora(Path(b)) as second:
        aligned = align_all([first, second])
        sizes = {name: _size(aligned, name) for name in aligned.names}
        differences: dict[str, ModuleDifference] = {}
        for name, difference in run_layers(sizes, lambda name: _compare(aligned, name)):
            differences[name] = difference
            progress(len(differences), len(sizes), name)
        modules = tuple(differences[name] for name in aligned.names)
        return LoraComparison(
            a=_summary(Path(a), first, [module.a for module in modules]),
            b=_summary(Path(b), second, [module.b for module in modules]),
            modules=modules,
            metadata=_metadata(first.metadata, second.metadata),
            tolerance=tolerance,
        )


def _size(aligned: AlignedLoras, name: str) -> int:
    """How many values one module has in both files; `run_layers` limits what is in memory by it."""
    return sum(aligned.loras[position].facts_of(name).parameters for position in aligned.positions(name))


def _compare(aligned: AlignedLoras, name: str) -> ModuleDifference:
    changes = {position: aligned.change(position, name) for position in aligned.positions(name)}
    sides = {position: _side(aligned.sources[position][name], change) for position, change in changes.items()}
    if len(changes) == 1:
        ((position, side),) = sides.items()
        a, b = (side, None) if position == 0 else (None, side)
        return ModuleDifference(name, "only_b" if a is None else "only_a", a, b, 0.0, side.norm)
    first, second = changes[0], changes[1]
    if isinstance(first, LoraFactors) and isinstance(second, LoraFactors):
        return compare_factors(name, sides[0], sides[1], first, second)
    if sides[0].norm is None or sides[1].norm is None:
        if same_tensors(first, second):
            return ModuleDifference(name, "both", sides[0], sides[1], difference_norm=0.0)
        return ModuleDifference(name, "not_measured", sides[0], sides[1])
    return compare_deltas(name, sides[0], sides[1], form_delta(name, first), form_delta(name, second))


def _side(name: str, change: LoraFactors | WeightChange) -> ModuleSide:
    if isinstance(change, LoraFactors):
        dtype = str(change.up.dtype).removeprefix("torch.")
        norm: float | None = change.frobenius_norm()
        return ModuleSide(name, "lora", change.rank, change.alpha, dtype, change.weight_shape, norm)
    norm = None if getattr(change, "needs_base", False) else change.frobenius_norm()
    rank = getattr(change, "rank", None)
    return ModuleSide(name, change.kind, rank, None, None, change.weight_shape, norm)


def _summary(path: Path, lora: LoraFile, sides: list[ModuleSide | None]) -> LoraSummary:
    own = [side for side in sides if side is not None]
    return LoraSummary(
        path=path,
        format=lora.format,
        modules=len(lora.names),
        parameters=lora.parameters,
        ranks=lora.ranks,
        dtypes=dict(Counter(side.dtype for side in own if side.dtype is not None).most_common()),
        norm=root_sum_square([side.norm or 0.0 for side in own]),
    )


def _metadata(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[MetadataDifference, ...]:
    names = dict.fromkeys((*a, *b))
    return tuple(
        MetadataDifference(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)
    )


def compare_factors(
    name: str, a: ModuleSide, b: ModuleSide, factors_a: LoraFactors, factors_b: LoraFactors
) -> ModuleDifference:
    """Measure two plain changes from r×r matrices, without forming either.

    Weights of different shapes are compared as matrices if `same_matrix` says that they are one.
    """
    if not same_matrix(factors_a.weight_shape, factors_b.weight_shape):
        return ModuleDifference(name, "other_shape", a, b, 0.0, _apart(a, b))
    shape = matrix_shape(factors_a.weight_shape)
    first, second = (replace(factors, weight_shape=shape) for factors in (factors_a, factors_b))
    spaces = shared_spaces(first, second)
    return ModuleDifference(
        name,
        "both",
        a,
        b,
        inner=spaces.inner,
        difference_norm=difference_norm(first, second),
        column_overlap=spaces.columns,
        row_overlap=spaces.rows,
    )


def compare_deltas(
    name: str, a: ModuleSide, b: ModuleSide, delta_a: Tensor, delta_b: Tensor
) -> ModuleDifference:
    """Measure two formed changes, of which at least one is more than up and down factors."""
    if not same_matrix(delta_a.shape, delta_b.shape):
        return ModuleDifference(name, "other_shape", a, b, 0.0, _apart(a, b))
    first, second = delta_a.flatten(), delta_b.flatten()
    inner = float(torch.dot(as_float64(first), as_float64(second)))
    return ModuleDifference(name, "both", a, b, inner=inner, difference_norm=frobenius_norm(first - second))


def _apart(a: ModuleSide, b: ModuleSide) -> float:
    """‖ΔA − ΔB‖ of changes that have no value in common."""
    return sqrt((a.norm or 0.0) ** 2 + (b.norm or 0.0) ** 2)


def same_tensors(first: LoraFactors | WeightChange, second: LoraFactors | WeightChange) -> bool:
    """Whether two changes are stored as the same tensors, and so are the same on any base."""
    if isinstance(first, DoraChange) and isinstance(second, DoraChange):
        magnitudes = _equal(first.magnitude.flatten(), second.magnitude.flatten())
        same_axis = first.per_output == second.per_output
        return magnitudes and same_axis and same_tensors(first.direction, second.direction)
    if isinstance(first, LoraFactors) and isinstance(second, LoraFactors):
        return first.scale == second.scale and _equal(first.up, second.up) and _equal(first.down, second.down)
    if isinstance(first, Adapter) and isinstance(second, Adapter):
        return (
            first.kind == second.kind
            and first.scale == second.scale
            and first.parts.keys() == second.parts.keys()
            and all(_equal(part, second.parts[name]) for name, part in first.parts.items())
        )
    return False


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
