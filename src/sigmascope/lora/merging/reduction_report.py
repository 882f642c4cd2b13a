"""What became of the modules of a LoRA that was resized, or of several that were merged."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import fsum
from pathlib import Path
from typing import Any

from sigmascope.lora.file import LoraFile
from sigmascope.lora.merging.merge_inputs import InputLora
from sigmascope.lora.merging.reduced_module import ReducedModule
from sigmascope.lora.models.block_names import block_position
from sigmascope.lora.norms import root_sum_square
from sigmascope.records.finding import Finding


@dataclass(frozen=True, slots=True)
class BlockReduction:
    """The modules of one block together.

    Attributes:
        name: Such as `up_blocks.1`.
        modules: How many there were.
        kept: How many are in the file that was written.
        old_ranks: Lowest and highest rank before; None where none had one.
        ranks: Lowest and highest rank of those kept; None without any.
        relative_error: ‖ΔW − ΔW'‖ / ‖ΔW‖ of all together; None where nothing was changed.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept; None as above.
    """

    name: str
    modules: int
    kept: int
    old_ranks: tuple[int, int] | None
    ranks: tuple[int, int] | None
    relative_error: float | None
    kept_energy: float | None


@dataclass(frozen=True, slots=True)
class ReductionReport:
    """The result of a resize or merge.

    Attributes:
        inputs: The LoRAs, in the order given.
        lora: The file that was written.
        format: Its format.
        dtype: In which its factors are stored.
        method: How the changes became one; `linear` for a single LoRA.
        plan: How much rank there was to be.
        modules: What became of every module, in the order of the files.
        carried: Changes that have no rank (biases, norms) or depend on the base, written as they are.
        formed: Modules whose change was more than up and down, so that it was formed and decomposed.
        findings: What to know before using the LoRA.
        file_bytes: Size of the file that was written.
        seconds: Time of the whole work.
    """

    inputs: tuple[InputLora, ...]
    lora: Path
    format: str
    dtype: str
    method: str
    plan: str
    modules: tuple[ReducedModule, ...]
    carried: tuple[str, ...]
    formed: tuple[str, ...]
    findings: tuple[Finding, ...]
    file_bytes: int
    seconds: float

    @property
    def bytes_before(self) -> int:
        """Size of all files that went in."""
        return sum(one.file_bytes for one in self.inputs)

    @property
    def left_out(self) -> tuple[ReducedModule, ...]:
        """Modules that are not in the file, each with its reason."""
        return tuple(module for module in self.modules if module.left_out is not None)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules of the file have each rank, by rising rank."""
        return dict(sorted(Counter(module.rank for module in self.modules if module.rank).items()))

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − ΔW'‖ / ‖ΔW‖ over all modules; one that is left out counts as lost."""
        return _error(self.modules)

    @property
    def kept_energy(self) -> float | None:
        """Share of ‖ΔW‖² in the singular values that were kept."""
        return _kept_energy(self.modules)

    @property
    def blocks(self) -> tuple[BlockReduction, ...]:
        """One summary a block, in the order in which a latent passes them."""
        ordered = sorted(self.modules, key=lambda module: block_position(module.block))
        return tuple(_block(name, list(group)) for name, group in groupby(ordered, lambda m: m.block))

    @property
    def worst(self) -> tuple[ReducedModule, ...]:
        """The ten modules that lost the largest part of themselves, largest first."""
        measured = [module for module in self.modules if module.relative_error is not None]
        return tuple(sorted(measured, key=lambda module: -(module.relative_error or 0.0))[:10])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        totals = ("format", "dtype", "method", "plan", "relative_error", "kept_energy", "bytes_before")
        return {
            "lora": str(self.lora),
            "inputs": [asdict(one) | {"path": str(one.path)} for one in self.inputs],
            **{name: getattr(self, name) for name in totals},
            "file_bytes": self.file_bytes,
            "seconds": self.seconds,
            "total_modules": len(self.modules),
            "left_out": [module.name for module in self.left_out],
            "carried": list(self.carried),
            "formed": list(self.formed),
            "findings": [asdict(finding) for finding in self.findings],
            "blocks": [asdict(block) for block in self.blocks],
            "modules": [module.as_dict() for module in self.modules],
        }


def _block(name: str, modules: Sequence[ReducedModule]) -> BlockReduction:
    return BlockReduction(
        name=name,
        modules=len(modules),
        kept=sum(module.left_out is None for module in modules),
        old_ranks=_span([module.old_rank for module in modules]),
        ranks=_span([module.rank or None for module in modules]),
        relative_error=_error(modules),
        kept_energy=_kept_energy(modules),
    )


def _span(ranks: Sequence[int | None]) -> tuple[int, int] | None:
    known = [rank for rank in ranks if rank is not None]
    return (min(known), max(known)) if known else None


def _error(modules: Sequence[ReducedModule]) -> float | None:
    change = root_sum_square([module.norm for module in modules])
    return root_sum_square([module.error_norm for module in modules]) / change if change > 0.0 else None


def _kept_energy(modules: Sequence[ReducedModule]) -> float | None:
    energy = fsum(module.norm**2 for module in modules)
    kept = fsum(module.kept_energy * module.norm**2 for module in modules)
    return kept / energy if energy > 0.0 else None


_NAMED = 3


def unused_keys(loras: Sequence[LoraFile]) -> Iterator[Finding]:
    """Say which LoRAs have keys that are not in the result."""
    for lora in loras:
        if lora.unused_keys:
            yield Finding(
                "lora.unused_keys",
                "warning",
                f"{lora}: {len(lora.unused_keys)} keys belong to no module and are left out: "
                f"{', '.join(lora.unused_keys[:_NAMED])}.",
                {"keys": len(lora.unused_keys)},
                advice="lora inspect --json lists them.",
            )
