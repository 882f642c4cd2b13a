"""What is in a LoRA file: ranks, strength, spectra, damage, and what its header says."""

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import groupby
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Final

from sigmascope.errors import NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.extraction.layer_pool import run_layers
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.inspection.block_strength import BlockStrength, block_strength, norm_of
from sigmascope.lora.inspection.module_strength import ModuleStrength, strength_of_delta, strength_of_factors
from sigmascope.lora.inspection.training_metadata import TrainingFacts, read_training_facts
from sigmascope.lora.models.block_names import block_position
from sigmascope.lora.shapes import max_rank
from sigmascope.progress import Progress, no_progress

__all__ = ["BlockStrength", "LoraInspection", "ModuleStrength", "inspect_lora"]

_NEAR_ZERO: Final = 1e-3
"""A module whose values are this much smaller than those of the middle module does nothing that shows."""
_SPECTRUM_UP_TO: Final = 512


@dataclass(frozen=True, slots=True)
class LoraInspection:
    """What one LoRA file holds.

    Attributes:
        path: The file.
        format: `native`, `kohya`, `peft` or `comfyui`.
        file_bytes: Its size.
        modules: Every module and change, in the file's order.
        unused_keys: Keys that belong to none.
        metadata: The header.
    """

    path: Path
    format: str
    file_bytes: int
    modules: tuple[ModuleStrength, ...]
    unused_keys: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def training(self) -> TrainingFacts:
        """The header, sorted by meaning."""
        return read_training_facts(self.metadata)

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(module.parameters for module in self.modules)

    @property
    def kinds(self) -> dict[str, int]:
        """How many modules are of each kind, plain factors (`lora`) first."""
        counts = Counter(module.kind for module in self.modules)
        return dict(sorted(counts.items(), key=lambda item: (item[0] != "lora", item[0])))

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank."""
        return dict(sorted(Counter(m.rank for m in self.modules if m.rank is not None).items()))

    @property
    def scales(self) -> dict[float, int]:
        """How many plain modules have each scale alpha / rank, the most frequent first."""
        return dict(Counter(m.scale for m in self.modules if m.scale is not None).most_common())

    @property
    def dtypes(self) -> dict[str, int]:
        """How many plain modules are stored in each dtype, the most frequent first."""
        return dict(Counter(m.dtype for m in self.modules if m.dtype is not None).most_common())

    @property
    def norm(self) -> float | None:
        """‖ΔW‖ of all modules that could be measured; None where none could."""
        return norm_of(self.modules)

    @property
    def not_finite(self) -> tuple[str, ...]:
        """Modules that hold NaN or Inf."""
        return tuple(module.name for module in self.modules if module.problem == "not_finite")

    @property
    def near_zero(self) -> tuple[str, ...]:
        """Modules whose values are a thousand times smaller than those of the middle module, or zero."""
        sizes = {module.name: module.size for module in self.modules if module.size is not None}
        middle = median(size for size in sizes.values() if size > 0.0) if any(sizes.values()) else 0.0
        return tuple(name for name, size in sizes.items() if size <= _NEAR_ZERO * middle)

    @property
    def dead_columns(self) -> dict[str, int]:
        """Modules with columns that change nothing, and how many."""
        return {module.name: module.dead_columns for module in self.modules if module.dead_columns}

    @property
    def strongest(self) -> tuple[ModuleStrength, ...]:
        """The ten modules with the largest ‖ΔW‖, largest first."""
        measured = [module for module in self.modules if module.norm is not None]
        return tuple(sorted(measured, key=lambda module: -(module.norm or 0.0))[:10])

    @property
    def blocks(self) -> tuple[BlockStrength, ...]:
        """One summary a block, in the order in which a latent passes them."""
        ordered = sorted(self.modules, key=lambda module: block_position(module.block))
        total = self.norm
        return tuple(
            block_strength(name, list(group), total) for name, group in groupby(ordered, lambda m: m.block)
        )

    def as_dict(self, *, spectra: bool = False) -> dict[str, Any]:
        """The inspection as JSON values, totals first.

        Args:
            spectra: Also all singular values of every module.
        """
        totals = ("parameters", "norm", "kinds", "ranks", "dtypes", "near_zero", "not_finite", "dead_columns")
        return {
            "path": str(self.path),
            "format": self.format,
            "file_bytes": self.file_bytes,
            "total_modules": len(self.modules),
            **{name: getattr(self, name) for name in totals},
            "unused_keys": list(self.unused_keys),
            "training": asdict(self.training),
            "metadata": self.metadata,
            "blocks": [asdict(block) for block in self.blocks],
            "modules": [module.as_dict(spectrum=spectra) for module in self.modules],
        }


def inspect_lora(
    path: str | PathLike[str], *, full_spectrum: bool = False, progress: Progress = no_progress
) -> LoraInspection:
    """Measure every module of a LoRA file, without its model and without forming plain changes.

    Args:
        path: A LoRA in any known format. Of OFT, BOFT and GLoRA, whose change depends on the model's weights, names,
            shapes and ranks are told.
        full_spectrum: Also the singular values of modules of a rank above 512, a second or more each.
        progress: Told after each module.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, or its factors do not fit together.
    """
    with open_any(Path(path)) as lora:
        sizes = {name: sum(lora.shape_of(name)) for name in lora.names}
        found: dict[str, ModuleStrength] = {}
        for name, module in run_layers(sizes, lambda name: _measured(lora, name, full_spectrum)):
            found[name] = module
            progress(len(found), len(sizes), name)
        return LoraInspection(
            path=Path(path),
            format=lora.format,
            file_bytes=(lora.path or Path(path)).stat().st_size,
            modules=tuple(found[name] for name in lora.names),
            unused_keys=lora.unused_keys,
            metadata=dict(lora.metadata),
        )


def _measured(lora: LoraFile, name: str, full_spectrum: bool) -> ModuleStrength:
    try:
        change = lora.modules[name] if name in lora.modules else lora.changes[name]
        return _strength(name, change, full_spectrum)
    except NonFiniteError:
        facts = lora.facts[name]
        return ModuleStrength(
            name, facts.kind, facts.weight_shape, facts.rank, facts.parameters, problem="not_finite"
        )


def _strength(name: str, change: LoraFactors | WeightChange, full_spectrum: bool) -> ModuleStrength:
    if isinstance(change, LoraFactors):
        quick = min(change.rank, max_rank(change.weight_shape)) <= _SPECTRUM_UP_TO
        return strength_of_factors(name, change, spectrum=full_spectrum or quick)
    rank = getattr(change, "rank", None)
    if getattr(change, "needs_base", False):
        shape = change.weight_shape
        return ModuleStrength(name, change.kind, shape, rank, change.parameters, problem="needs_base")
    return strength_of_delta(name, change.kind, change.delta(), rank, change.parameters)
