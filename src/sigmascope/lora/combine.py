"""Several LoRAs into one: the exact weighted sum, or TIES and DARE, at any rank."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.merging.base_weights import BaseWeights
from sigmascope.lora.merging.lora_output import LoraOutput
from sigmascope.lora.merging.merge_findings import merge_findings
from sigmascope.lora.merging.merge_inputs import InputLora, merged_from
from sigmascope.lora.merging.merge_methods import MergeMethod, require_weights
from sigmascope.lora.merging.merged_changes import MergedChanges
from sigmascope.lora.merging.reduced_module import ReducedModule
from sigmascope.lora.merging.reduction import RankPlan, Reduction, require_modules
from sigmascope.lora.merging.reduction_report import ReductionReport
from sigmascope.lora.names.lora_dtype import STORAGE_DTYPES, SavePrecision, dtype_name, storage_dtype
from sigmascope.lora.names.united import unite
from sigmascope.lora.paths import check_target, refuse_files, refuse_inputs
from sigmascope.lora.ranking.rank_rules import RankRules
from sigmascope.lora.ranks import FULL_RANK, FixedRank
from sigmascope.progress import Progress, no_progress

__all__ = ["CombineOptions", "MergeMethod", "RankPlan", "ReductionReport", "combine_loras"]

_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class CombineOptions:
    """The choices of one merge.

    Attributes:
        weights: What each LoRA's change is multiplied with; 1 when left out.
        method: How the changes of one layer become one.
        plan: How much rank each layer gets, or all together. When left out, a plain sum keeps all its rank;
            what is no plain sum of factors needs a plan.
        save_precision: Storage of the factors; that of the inputs when left out, the widest of several.
        format: `native`, `kohya`, `peft` or `comfyui`; the first LoRA's when left out.
        base: The model, for DoRA and whole weights, whose change depends on it.
    """

    weights: tuple[float, ...] | None = None
    method: MergeMethod = field(default_factory=MergeMethod)
    plan: RankPlan | None = None
    save_precision: SavePrecision | None = None
    format: str | None = None
    base: Path | None = None


def combine_loras(
    loras: Sequence[str | PathLike[str]],
    save_to: str | PathLike[str],
    options: CombineOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> ReductionReport:
    """Write one LoRA whose change is that of several together.

    Formats may differ, and modules may be in some of the LoRAs only. A plain sum is exact: its factors are the
    LoRAs' factors side by side, reduced by QR and SVD to the rank that is asked for. One layer is in memory at a
    time.

    Args:
        loras: LoRA files, at least one.
        save_to: The `.safetensors` file to write.
        options: Weights, method and ranks.
        progress: Told after each layer.

    Returns:
        Every layer's rank and the true error of what is stored, against the change that the method gives.

    Raises:
        ConfigError: The target is an input or a folder, the weights are not one for each LoRA, or ranks are
            needed and not given.
        CheckpointError: A file is missing, damaged, or no file of tensors.
        LoraFormatError: A file is not understood, or holds changes that depend on a base that is not given.
        ModelMismatchError: The LoRAs change layers of different shape.
        NonFiniteError: NaN or Inf in a LoRA, or factors too large for the storage precision.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    options = options or CombineOptions()
    paths, target = [Path(path) for path in loras], Path(save_to)
    weights = require_weights(options.weights, len(paths))
    check_target(target)
    with ExitStack() as files:
        originals = [files.enter_context(open_lora(path)) for path in paths]
        lora_files = [lora.path or path for lora, path in zip(originals, paths, strict=True)]
        refuse_files(target, lora_files)
        bases = _bases(files, originals, target, options.base)
        dtype = _dtype(lora_files, options)
        changes = MergedChanges(unite(originals), weights, options.method, dtype, bases)
        plan = _plan(changes, options)
        output = LoraOutput(
            target,
            changes.united,
            originals,
            options.format,
            _provenance(lora_files, weights, options.method, plan),
            compact=plan.budget is not None and plan.budget.max_bytes is not None,
        )
        with output:
            modules = _write(output, changes, plan, progress)
        return ReductionReport(
            inputs=tuple(map(InputLora.of, originals, paths, weights)),
            lora=target,
            format=output.format.name,
            dtype=dtype_name(changes.dtype),
            method=options.method.describe(),
            plan=plan.describe(),
            modules=modules,
            carried=changes.vectors,
            formed=changes.formed,
            findings=tuple(merge_findings(originals, changes.united)),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
        )


def _bases(
    files: ExitStack, originals: Sequence[LoraFile], target: Path, base: Path | None
) -> BaseWeights | None:
    if base is None:
        return None
    checkpoint = files.enter_context(open_checkpoint(base))
    refuse_inputs(target, checkpoint)
    return BaseWeights(checkpoint, originals)


def _dtype(lora_files: Sequence[Path], options: CombineOptions) -> torch.dtype:
    if options.save_precision is not None:
        return STORAGE_DTYPES[options.save_precision]
    with ExitStack() as files:
        return storage_dtype(*(files.enter_context(open_checkpoint(file)) for file in lora_files))


def _plan(changes: MergedChanges, options: CombineOptions) -> RankPlan:
    """The plan asked for; without one everything is kept, where that is less than the whole weight."""
    if options.plan is not None:
        return options.plan
    if changes.formed:
        what = (
            f"--method {options.method.name} gives changes of full rank"
            if not options.method.is_linear
            else f"{len(changes.formed)} modules are more than up and down: {', '.join(changes.formed[:_NAMED])}"
        )
        raise ConfigError(
            f"{what}, so a rank has to be chosen.",
            hint=f"Give --rank, --max_size or another rank option; --rank {FULL_RANK} keeps everything.",
        )
    return RankPlan(RankRules(FixedRank(FULL_RANK, FULL_RANK)))


def _write(
    output: LoraOutput, changes: MergedChanges, plan: RankPlan, progress: Progress
) -> tuple[ReducedModule, ...]:
    reduction = Reduction(
        shapes={name: changes.shape(name) for name in changes.layers},
        old_ranks={name: changes.old_rank(name) for name in changes.layers},
        load=changes.load,
        plan=plan,
        storage=output.storage(
            changes.dtype,
            len(changes.layers),
            {name: 4 * prod(changes.shape(name)) for name in changes.vectors},
        ),
    )
    modules = []
    for module, factors in reduction.run(progress):
        modules.append(module)
        if factors is not None:
            output.write(module.name, factors)
    for name in changes.vectors:
        output.write_change(name, DiffChange({"diff": changes.vector(name)}))
    require_modules(modules, plan)
    return tuple(modules)


def _provenance(
    lora_files: Sequence[Path], weights: Sequence[float], method: MergeMethod, plan: RankPlan
) -> dict[str, str]:
    return {
        "sigmascope_version": __version__,
        "sigmascope_merged_loras": merged_from(lora_files, weights),
        "sigmascope_merge_method": method.describe(),
        "sigmascope_rank": plan.describe(),
    }
