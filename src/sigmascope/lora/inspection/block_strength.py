"""How strong a LoRA is in one block of a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from sigmascope.lora.inspection.module_strength import ModuleStrength
from sigmascope.lora.norms import root_sum_square


@dataclass(frozen=True, slots=True)
class BlockStrength:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many there are.
        norm: ‖ΔW‖ of all that could be measured; None where none could.
        share: Of the whole LoRA's ‖ΔW‖², 0 to 1; None where the norm is.
        ranks: Lowest and highest rank; None where none has one.
        effective_rank: Mean over the modules whose spectrum is known; None without any.
    """

    name: str
    modules: int
    norm: float | None
    share: float | None
    ranks: tuple[int, int] | None
    effective_rank: float | None


def norm_of(modules: Sequence[ModuleStrength]) -> float | None:
    """‖ΔW‖ of all modules that could be measured; None where none could, 0 without any."""
    measured = [module.norm for module in modules if module.norm is not None]
    return root_sum_square(measured) if measured or not modules else None


def block_strength(name: str, modules: list[ModuleStrength], total: float | None) -> BlockStrength:
    """Put the modules of one block together; `total` is the whole LoRA's norm."""
    norm = norm_of(modules)
    ranks = [module.rank for module in modules if module.rank is not None]
    effective = [rank for module in modules if (rank := module.effective_rank) is not None]
    return BlockStrength(
        name=name,
        modules=len(modules),
        norm=norm,
        share=None if norm is None else (norm / total) ** 2 if total else 0.0,
        ranks=(min(ranks), max(ranks)) if ranks else None,
        effective_rank=sum(effective) / len(effective) if effective else None,
    )
