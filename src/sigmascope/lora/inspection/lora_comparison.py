"""What is found of two LoRAs beside each other, and the verdict."""

from dataclasses import asdict, dataclass
from math import fsum
from pathlib import Path
from typing import Any, Literal

from sigmascope.lora.inspection.module_difference import ModuleDifference
from sigmascope.lora.norms import root_sum_square

Verdict = Literal["same", "scaled", "different"]


@dataclass(frozen=True, slots=True)
class LoraSummary:
    """One of the two files.

    Attributes:
        path: As given.
        format: `native`, `kohya`, `peft` or `comfyui`.
        modules: How many there are.
        parameters: Number of stored values.
        ranks: How many modules have each rank.
        dtypes: How many plain modules are stored in each dtype.
        norm: ‖ΔW‖ of all that could be measured.
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
class LoraComparison:
    """Two LoRAs, module by module.

    Attributes:
        a: The first.
        b: The second.
        modules: Every module of either, in A's order, then what only B has.
        metadata: Header fields that differ.
        tolerance: Largest relative difference of a module that counts as the same.
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
        """Modules of both whose change is known only beside a base model."""
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
        """Of the two changes as a whole; None where one is zero."""
        product = self.a.norm * self.b.norm
        return self.inner / product if product > 0.0 else None

    @property
    def relative_difference(self) -> float | None:
        """‖ΔA − ΔB‖ / ‖ΔA‖; None where A changes nothing."""
        return self.difference_norm / self.a.norm if self.a.norm > 0.0 else None

    @property
    def factor(self) -> float | None:
        """The x for which x·ΔA is nearest to ΔB; None where A changes nothing."""
        return self.inner / self.a.norm**2 if self.a.norm > 0.0 else None

    @property
    def verdict(self) -> Verdict:
        """`same`: every module is within the tolerance. `scaled`: it is, once A is multiplied with `factor`."""
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
