"""Two LoRAs beside each other: is it the same change, a scaled one, or another?"""

from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.extraction.layer_pool import run_layers
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.inspection.lora_comparison import LoraComparison, LoraSummary, MetadataDifference
from sigmascope.lora.inspection.module_difference import (
    ModuleDifference,
    ModuleSide,
    compare_deltas,
    compare_factors,
    same_tensors,
)
from sigmascope.lora.names.united import UnitedLoras, unite
from sigmascope.lora.norms import root_sum_square
from sigmascope.progress import Progress, no_progress

__all__ = ["LoraComparison", "LoraSummary", "ModuleDifference", "compare_loras"]

DEFAULT_TOLERANCE: Final = 0.01
"""Rounding factors to bfloat16 changes ΔW by about 0.2 %."""


def compare_loras(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    progress: Progress = no_progress,
) -> LoraComparison:
    """Compare two LoRA files, whatever their formats, module by module and without their model.

    Args:
        a: The first LoRA.
        b: The second.
        tolerance: Largest ‖ΔA − ΔB‖ of a module that counts as the same, as a share of the larger change.
        progress: Told after each module.

    Raises:
        ConfigError: `tolerance` is negative or no number.
        CheckpointError: A file is missing, damaged, or no file of tensors.
        LoraFormatError: A file's keys follow no known format, or its factors do not fit together.
        NonFiniteError: A module holds NaN or Inf.
    """
    if not 0.0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance {tolerance} is no share.", hint="Use a number such as 0.01.")
    with open_lora(Path(a)) as first, open_lora(Path(b)) as second:
        united = unite([first, second])
        sizes = {name: _size(united, name) for name in united.names}
        found: dict[str, ModuleDifference] = {}
        for name, difference in run_layers(sizes, lambda name: _compare(united, name)):
            found[name] = difference
            progress(len(found), len(sizes), name)
        modules = tuple(found[name] for name in united.names)
        return LoraComparison(
            a=_summary(Path(a), first, [module.a for module in modules]),
            b=_summary(Path(b), second, [module.b for module in modules]),
            modules=modules,
            metadata=_metadata(first.metadata, second.metadata),
            tolerance=tolerance,
        )


def _size(united: UnitedLoras, name: str) -> int:
    """Values that are read for one module, for the limit of what is in memory at once."""
    return sum(united.loras[position].facts_of(name).parameters for position in united.positions(name))


def _compare(united: UnitedLoras, name: str) -> ModuleDifference:
    changes = {position: united.change(position, name) for position in united.positions(name)}
    sides = {position: _side(united.sources[position][name], change) for position, change in changes.items()}
    if len(changes) == 1:
        ((position, side),) = sides.items()
        a, b = (side, None) if position == 0 else (None, side)
        return ModuleDifference(name, "only_b" if a is None else "only_a", a, b, 0.0, side.norm)
    one, other = changes[0], changes[1]
    if isinstance(one, LoraFactors) and isinstance(other, LoraFactors):
        return compare_factors(name, sides[0], sides[1], one, other)
    if sides[0].norm is None or sides[1].norm is None:
        if same_tensors(one, other):
            return ModuleDifference(name, "both", sides[0], sides[1], difference_norm=0.0)
        return ModuleDifference(name, "not_measured", sides[0], sides[1])
    return compare_deltas(name, sides[0], sides[1], one.delta(), other.delta())


def _side(name: str, change: LoraFactors | WeightChange) -> ModuleSide:
    if isinstance(change, LoraFactors):
        dtype = str(change.up.dtype).removeprefix("torch.")
        own = change.frobenius_norm()
        return ModuleSide(name, "lora", change.rank, change.alpha, dtype, change.weight_shape, own)
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
