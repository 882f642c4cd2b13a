"""How several LoRAs add up on the same weights: where they work with each other, and where against.

‖Σ ΔWᵢ‖² = Σ ‖ΔWᵢ‖² + 2·Σ <ΔWᵢ, ΔWⱼ>. The inner products are exact and come from the factors; other kinds of change are formed.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import combinations
from math import fsum, hypot, sqrt
from os import PathLike
from pathlib import Path
from typing import Any

from sigmascope.errors import ConfigError
from sigmascope.lora.adapters import WeightChange, form_delta
from sigmascope.lora.alignment import AlignedLoras, align_all
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.reader import open_lora
from sigmascope.progress import Progress, no_progress

__all__ = ["LorasTogether", "ModuleTogether", "inspect_together"]


@dataclass(frozen=True, slots=True)
class ModuleTogether:
    """One weight that the LoRAs change, at strength 1.

    Attributes:
        name: The common name of the layer.
        norms: ‖ΔWᵢ‖ of each LoRA, 0 where it leaves the weight alone; empty if unknown.
        inner: <ΔWᵢ, ΔWⱼ> of each pair: of 1 and 2, 1 and 3, …, 2 and 3, ….
        unavailable: Why the figures are unknown.
    """

    name: str
    norms: tuple[float, ...] = ()
    inner: tuple[float, ...] = ()
    unavailable: str | None = None

    @property
    def sum_norm(self) -> float | None:
        """‖Σ ΔWᵢ‖; None if unknown."""
        return None if self.unavailable else sqrt(max(self._energy + 2.0 * fsum(self.inner), 0.0))

    @property
    def unrelated_norm(self) -> float | None:
        """√Σ‖ΔWᵢ‖², the norm of the sum if the changes had nothing in common; None if unknown."""
        return None if self.unavailable else hypot(*self.norms)

    @property
    def interference(self) -> float | None:
        """2·Σ<ΔWᵢ, ΔWⱼ> / Σ‖ΔWᵢ‖²: −1 if they cancel, 0 if unrelated, n − 1 if n are equal; None if unknown or zero."""
        return 2.0 * fsum(self.inner) / self._energy if self._energy > 0.0 else None

    @property
    def _energy(self) -> float:
        return fsum(norm**2 for norm in self.norms)

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        derived = ("sum_norm", "unrelated_norm", "interference")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class LorasTogether:
    """Several LoRAs on one model, each at strength 1.

    Attributes:
        paths: The files.
        modules: Every weight that any of them changes.
    """

    paths: tuple[Path, ...]
    modules: tuple[ModuleTogether, ...]

    @property
    def total(self) -> ModuleTogether:
        """All weights whose figures are known, as one."""
        known = [module for module in self.modules if module.unavailable is None]
        pairs = len(self.paths) * (len(self.paths) - 1) // 2
        return ModuleTogether(
            "all",
            tuple(hypot(*(module.norms[index] for module in known)) for index in range(len(self.paths))),
            tuple(fsum(module.inner[index] for module in known) for index in range(pairs)),
        )

    @property
    def shared(self) -> tuple[ModuleTogether, ...]:
        """Weights that two or more of them change, the strongest interference first."""
        some = [module for module in self.modules if any(module.inner)]
        return tuple(sorted(some, key=lambda module: -abs(fsum(module.inner))))

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "paths": [str(path) for path in self.paths],
            "total": self.total.as_dict(),
            "modules": [module.as_dict() for module in self.modules],
        }


def inspect_together(
    paths: Sequence[str | PathLike[str]], *, progress: Progress = no_progress
) -> LorasTogether:
    """Measure how LoRAs of any formats add up, module by module; the model is not needed.

    Args:
        paths: Two files or more.
        progress: Called after each module.

    Raises:
        ConfigError: There is one file, or none.
        CheckpointError: A file is missing, damaged, or not a file of tensors.
        LoraFormatError: A file's keys follow no known format, or its factors do not fit together.
        NonFiniteError: A module holds NaN or Inf.
    """
    if len(paths) < 2:
        raise ConfigError("--together needs two LoRAs or more.", hint="Name the others too.")
    with ExitStack() as stack:
        aligned = align_all([stack.enter_context(open_lora(Path(path))) for path in paths])
        sizes = {
            name: sum(aligned.loras[at].facts_of(name).parameters for at in aligned.positions(name))
            for name in aligned.names
        }
        found: dict[str, ModuleTogether] = {}
        for name, module in run_layers(sizes, lambda name: _together(aligned, name)):
            found[name] = module
            progress(len(found), len(sizes), name)
    return LorasTogether(tuple(map(Path, paths)), tuple(found[name] for name in aligned.names))


def _together(aligned: AlignedLoras, name: str) -> ModuleTogether:
    changes = {at: aligned.change(at, name) for at in aligned.positions(name)}
    if any(getattr(change, "needs_base", False) for change in changes.values()):
        return ModuleTogether(name, unavailable="a change depends on the base model's weight")
    if len({tuple(change.weight_shape) for change in changes.values()}) > 1:
        return ModuleTogether(name, unavailable="the changes are for weights of different shape")
    everyone = range(len(aligned.loras))
    return ModuleTogether(
        name,
        tuple(changes[at].frobenius_norm() if at in changes else 0.0 for at in everyone),
        tuple(
            _inner(name, changes[a], changes[b]) if a in changes and b in changes else 0.0
            for a, b in combinations(everyone, 2)
        ),
    )


def _inner(name: str, first: LoraFactors | WeightChange, second: LoraFactors | WeightChange) -> float:
    if isinstance(first, LoraFactors) and isinstance(second, LoraFactors):
        return first.inner(second)
    formed = [as_float64(form_delta(name, change)) for change in (first, second)]
    return float((formed[0] * formed[1]).sum())
