"""Give a LoRA another rank, without the models that it was made from.

QR of both factors and the SVD of their small core give all singular values of ΔW exactly, so any policy or
budget that an extraction knows works on a finished LoRA too, and the error of the result is known.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats import open_lora
from sigmascope.lora.lora_dtype import dtype_name, storage_dtype
from sigmascope.lora.merge_inputs import InputLora
from sigmascope.lora.options import STORAGE_DTYPES, SavePrecision, check_target, refuse_inputs
from sigmascope.lora.paths import as_text
from sigmascope.lora.reducible import FormedChange, ReducibleChange, reducible
from sigmascope.lora.reduction import RankPlan, ReducedModule, Reduction, require_modules
from sigmascope.lora.reduction_report import ReductionReport
from sigmascope.lora.same_names import SameNamesWriter
from sigmascope.lora.storage_cost import StorageCost
from sigmascope.progress import Progress, no_progress

__all__ = ["RankPlan", "ReducedModule", "ReductionReport", "resize_lora"]

NEEDS_BASE: Final = frozenset({"dora", "set"})
_HEADER_FIELDS: Final = 2048  # bytes of the fields that are known at the end
_ENTRY_BYTES: Final = 160


def resize_lora(
    lora: str | PathLike[str],
    save_to: str | PathLike[str],
    plan: RankPlan,
    *,
    save_precision: SavePrecision | None = None,
    progress: Progress = no_progress,
) -> ReductionReport:
    """Write a LoRA anew at another rank, in its own format and under its own names.

    Each module gets the nearest change of the rank that the plan gives it (Eckart and Young, 1936), with alpha =
    the stored rank. Where nothing has to be cut or rounded, its factors stay as they are, bit for bit. LoHa,
    LoKr and Tucker changes become plain factors. Biases and norms, and changes that depend on the base (DoRA),
    are carried over as they are.

    Args:
        lora: In any format; read one module at a time.
        save_to: The `.safetensors` file to write.
        plan: How much rank each module gets, or all together.
        save_precision: Storage of the factors; that of the input when left out (float16 for an 8-bit one).
        progress: Told after each module.

    Returns:
        Every module's old and new rank, and the true error of the factors as stored.

    Raises:
        ConfigError: The target is the input or a folder, a pattern matches no module, the budget cannot be met,
            or the plan leaves out every module.
        CheckpointError: The input is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, or its factors do not fit together.
        NonFiniteError: NaN or Inf in the input, or factors too large for the storage precision.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    source, target = Path(lora), Path(save_to)
    check_target(target)
    with open_checkpoint(source) as checkpoint:
        refuse_inputs(target, checkpoint)
        dtype = storage_dtype(checkpoint) if save_precision is None else STORAGE_DTYPES[save_precision]
    with open_lora(source) as opened:
        split = _Split.of(opened)
        metadata = {
            "sigmascope_version": __version__,
            "sigmascope_resized_from": as_text(source.name),
            "sigmascope_rank": plan.describe(),
        }
        compact = plan.budget is not None and plan.budget.max_bytes is not None
        with SameNamesWriter(target, opened, metadata, compact=compact) as writer:
            reduction = split.reduction(opened, plan, dtype, writer, metadata)
            modules = []
            for module, factors in reduction.run(progress):
                modules.append(module)
                if factors is not None:
                    writer.write(module.name, factors)
            for name in split.carried:
                writer.write_change(name, opened.changes[name])
            require_modules(modules, plan)
        return ReductionReport(
            inputs=(InputLora.of(opened, source),),
            lora=target,
            format=opened.format,
            dtype=dtype_name(dtype),
            method="linear",
            plan=plan.describe(),
            modules=tuple(modules),
            carried=split.carried,
            formed=split.formed,
            findings=(),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True, slots=True)
class _Split:
    """The modules of a file by what happens to them.

    Attributes:
        reduced: Get another rank, in the file's order.
        formed: Those of them that are more than up and down.
        carried: Stay as they are: they have no rank, or depend on the base.
    """

    reduced: tuple[str, ...]
    formed: tuple[str, ...]
    carried: tuple[str, ...]

    @classmethod
    def of(cls, lora: LoraFile) -> "_Split":
        formed = tuple(
            name
            for name in lora.changes
            if lora.kind_of(name) not in NEEDS_BASE and len(lora.shape_of(name)) > 1
        )
        carried = tuple(name for name in lora.changes if name not in set(formed))
        return cls((*lora.modules, *formed), formed, carried)

    def reduction(
        self,
        lora: LoraFile,
        plan: RankPlan,
        dtype: torch.dtype,
        writer: SameNamesWriter,
        metadata: Mapping[str, str],
    ) -> Reduction:
        def load(name: str, wanted: int) -> ReducibleChange:
            if name in lora.modules:
                return reducible(lora.modules[name], wanted, dtype)
            return FormedChange(lora.changes[name].delta(), dtype)

        return Reduction(
            shapes={name: lora.shape_of(name) for name in self.reduced},
            old_ranks={name: lora.rank_of(name) if name in lora.modules else None for name in self.reduced},
            load=load,
            plan=plan,
            storage=StorageCost.of(
                dtype,
                {**lora.metadata, **metadata},
                other_bytes=_HEADER_FIELDS + sum(map(partial(_carried_bytes, lora, writer), self.carried)),
                names=writer.keys_of,
            ),
        )


def _carried_bytes(lora: LoraFile, writer: SameNamesWriter, name: str) -> int:
    tensors = writer.change_tensors(name, lora.changes[name])
    return sum(tensor.nbytes + len(key) + _ENTRY_BYTES for key, tensor in tensors.items())
