"""Give a LoRA another rank, without the models that it was made from.

QR of both factors and the SVD of their small core give all singular values of ΔW exactly, so any policy or
budget that an extraction knows works on a finished LoRA too, and the error of the result is known.
"""

import time
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.merging.lora_output import LoraOutput
from sigmascope.lora.merging.merge_inputs import InputLora
from sigmascope.lora.merging.reduced_module import ReducedModule
from sigmascope.lora.merging.reducible import FormedChange, reducible
from sigmascope.lora.merging.reducible_change import ReducibleChange
from sigmascope.lora.merging.reduction import RankPlan, Reduction, require_modules
from sigmascope.lora.merging.reduction_report import ReductionReport, unused_keys
from sigmascope.lora.names.lora_dtype import STORAGE_DTYPES, SavePrecision, dtype_name, storage_dtype
from sigmascope.lora.names.united import unite
from sigmascope.lora.paths import as_text, check_target, refuse_inputs
from sigmascope.progress import Progress, no_progress

__all__ = ["RankPlan", "ReducedModule", "ReductionReport", "resize_lora"]

_NEEDS_BASE: Final = frozenset({"dora", "set"})
_TARGET: Final = "OUT"


def resize_lora(
    lora: str | PathLike[str],
    save_to: str | PathLike[str],
    plan: RankPlan,
    *,
    save_precision: SavePrecision | None = None,
    format: str | None = None,
    progress: Progress = no_progress,
) -> ReductionReport:
    """Write a LoRA anew at another rank.

    Each module gets the nearest change of the rank that the plan gives it (Eckart and Young, 1936), with alpha =
    the stored rank. Where nothing has to be cut or rounded, its factors stay as they are, bit for bit. LoHa,
    LoKr and Tucker changes become plain factors. Biases and norms, and changes that depend on the base (DoRA),
    are carried over as they are.

    In the plan's patterns and in the report, layers have the names of the model (`denoiser.conv_in`), whatever
    the format of the file.

    Args:
        lora: In any format; read one module at a time.
        save_to: The `.safetensors` file to write.
        plan: How much rank each module gets, or all together.
        save_precision: Storage of the factors; that of the input when left out (float16 for an 8-bit one).
        format: `native`, `kohya`, `peft` or `comfyui`; the input's, with its own names, when left out.
        progress: Told after each module.

    Returns:
        Every module's old and new rank, and the true error of the factors as stored.

    Raises:
        ConfigError: The target is the input or a folder, a pattern matches no module, the budget cannot be met,
            or the plan leaves out every module.
        CheckpointError: The input is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, its factors do not fit together, or the format to write
            cannot hold it.
        NonFiniteError: NaN or Inf in the input, or factors too large for the storage precision.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    source, target = Path(lora), Path(save_to)
    check_target(target, _TARGET)
    with open_checkpoint(source) as checkpoint:
        refuse_inputs(target, checkpoint, flag=_TARGET)
        dtype = storage_dtype(checkpoint) if save_precision is None else STORAGE_DTYPES[save_precision]
    with open_lora(source) as original:
        united = unite([original])
        split = _Split.of(united.loras[0])
        metadata = {
            "sigmascope_version": __version__,
            "sigmascope_resized_from": as_text(source.name),
            "sigmascope_rank": plan.describe(),
        }
        compact = plan.budget is not None and plan.budget.max_bytes is not None
        with LoraOutput(target, united, [original], format, metadata, compact=compact) as output:
            modules = _write(output, split, dtype, plan, progress)
        return ReductionReport(
            inputs=(InputLora.of(original, source),),
            lora=target,
            format=output.format.name,
            dtype=dtype_name(dtype),
            method="linear",
            plan=plan.describe(),
            modules=modules,
            carried=split.carried,
            formed=split.formed,
            findings=tuple(unused_keys([original])),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
        )


@dataclass(frozen=True, slots=True)
class _Split:
    """The layers of a LoRA by what happens to them.

    Attributes:
        lora: By layer.
        reduced: Get another rank, in the file's order.
        formed: Those of them that are more than up and down.
        carried: Stay as they are: they have no rank, or depend on the base.
    """

    lora: LoraFile
    reduced: tuple[str, ...]
    formed: tuple[str, ...]
    carried: tuple[str, ...]

    @classmethod
    def of(cls, lora: LoraFile) -> "_Split":
        formed = tuple(
            name
            for name in lora.changes
            if lora.kind_of(name) not in _NEEDS_BASE and len(lora.shape_of(name)) > 1
        )
        carried = tuple(name for name in lora.changes if name not in set(formed))
        return cls(lora, (*lora.modules, *formed), formed, carried)

    def load(self, dtype: torch.dtype, name: str, wanted: int) -> ReducibleChange:
        if name in self.lora.modules:
            return reducible(self.lora.modules[name], wanted, dtype)
        return FormedChange(self.lora.changes[name].delta(), dtype)

    def old_rank(self, name: str) -> int | None:
        return self.lora.rank_of(name) if name in self.lora.modules else None


def _write(
    output: LoraOutput, split: _Split, dtype: torch.dtype, plan: RankPlan, progress: Progress
) -> tuple[ReducedModule, ...]:
    lora = split.lora
    others = {name: 4 * lora.facts_of(name).parameters for name in split.carried}
    reduction = Reduction(
        shapes={name: lora.shape_of(name) for name in split.reduced},
        old_ranks={name: split.old_rank(name) for name in split.reduced},
        load=partial(split.load, dtype),
        plan=plan,
        storage=output.storage(dtype, len(split.reduced), others),
    )
    modules = []
    for module, factors in reduction.run(progress):
        modules.append(module)
        if factors is not None:
            output.write(module.name, factors)
    for name in split.carried:
        output.write_change(name, lora.changes[name])
    require_modules(modules, plan)
    return tuple(modules)
