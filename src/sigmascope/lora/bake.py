"""LoRAs merged into a checkpoint file, one tensor at a time: whatever the model's size, memory holds a few layers."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, StreamingWriter, open_checkpoint
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merging.bake_report import BakeReport
from sigmascope.lora.merging.baking import BakedTensor, WeightedChange, bake
from sigmascope.lora.merging.merge_inputs import InputLora, merged_from
from sigmascope.lora.merging.merge_methods import MergeMethod, require_weights
from sigmascope.lora.merging.slots import Slot, map_in_order
from sigmascope.lora.names.alignment import AlignedLora
from sigmascope.lora.names.landing import Landing, landings, open_aligned, require_matched
from sigmascope.lora.paths import as_text, check_target, refuse_files, refuse_inputs
from sigmascope.progress import Progress, no_progress

__all__ = ["BakeReport", "BakedTensor", "bake_loras"]

_STALE: Final = frozenset({"modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash"})


def bake_loras(
    loras: Sequence[str | PathLike[str]],
    into: str | PathLike[str],
    save_to: str | PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    method: MergeMethod | None = None,
    allow_unmatched: bool = False,
    progress: Progress = no_progress,
) -> BakeReport:
    """Write a checkpoint with LoRAs merged into its weights.

    Each sum is formed in float32 (float64 for float64 weights) and rounded once to the stored dtype; every other
    tensor is copied bit for bit, and the header's metadata stays. LoRAs of any format land on a checkpoint in
    any naming; matrices that are fused on one side only are divided or put together exactly.

    Args:
        loras: LoRA files, at least one.
        into: A safetensors file, an index of shards, a `.ckpt`, or a component's folder.
        save_to: The `.safetensors` file to write.
        weights: Strength of each LoRA; 1 when left out. A LoRA of weight 0 touches nothing.
        method: How changes of one weight become one; the plain sum when left out.
        allow_unmatched: Go on although modules are of no tensor of the checkpoint; the report lists them.
        progress: Told after each tensor.

    Raises:
        ConfigError: The target is one of the inputs or a folder, or the weights are not one for each LoRA.
        CheckpointError: An input is missing, damaged, quantised with scales, or a folder of several components.
        LoraFormatError: A LoRA's keys follow no known format, or two of its modules are for one layer.
        ModelMismatchError: Modules are of no tensor, or of one of another shape.
        NonFiniteError: NaN or Inf in a LoRA, or in a merged weight.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    strengths = require_weights(None if weights is None else tuple(weights), len(loras))
    how = method or MergeMethod()
    paths, target = [Path(path) for path in loras], Path(save_to)
    if target.suffix != ".safetensors":
        raise ConfigError(
            f"--save_to {target}: a checkpoint is written as safetensors.",
            hint=f"Name it {target.stem}.safetensors.",
        )
    check_target(target)
    with ExitStack() as files:
        base = files.enter_context(open_checkpoint(into))
        _require_writable(base, Path(into))
        aligned = [open_aligned(files, path, base) for path in paths]
        lora_files = [one.lora.path or path for one, path in zip(aligned, paths, strict=True)]
        refuse_inputs(target, base)
        refuse_files(target, lora_files)
        found = landings(base, aligned, strengths)
        require_matched(base, aligned, found.unmatched, allow_unmatched=allow_unmatched)
        metadata = _provenance(base, lora_files, strengths, how)
        tensors = _write(target, base, found.by_key, aligned, how, metadata, progress)
        return BakeReport(
            into=Path(into),
            checkpoint=target,
            inputs=tuple(
                InputLora.of(one.lora, path, weight)
                for one, path, weight in zip(aligned, paths, strengths, strict=True)
            ),
            method=how.describe(),
            tensors=tensors,
            copied=len(base) - len(tensors),
            unmatched=found.unmatched,
            unused_keys={i: one.lora.unused_keys for i, one in enumerate(aligned) if one.lora.unused_keys},
            skipped=dict(base.skipped),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
        )


def _require_writable(base: Checkpoint, into: Path) -> None:
    if base.path.is_dir():
        components = list(dict.fromkeys(key.partition(".")[0] for key in base))
        raise CheckpointError(
            into,
            f"is a folder of several components ({', '.join(components)}): one file cannot take its place.",
            hint=f"Merge into one component, and put the result there: --into {into / components[0]}.",
        )
    if base.dequantised:
        key, how = next(iter(base.dequantised.items()))
        raise CheckpointError(
            into,
            f"is quantised ({key}: {how}), and a change added to it would be lost to rounding.",
            hint="Merge into the checkpoint in float, fp16 or bf16, and quantise the result.",
        )


def _write(
    target: Path,
    base: Checkpoint,
    landing: Mapping[str, Sequence[Landing]],
    aligned: Sequence[AlignedLora],
    method: MergeMethod,
    metadata: Mapping[str, str],
    progress: Progress,
) -> tuple[BakedTensor, ...]:
    def work(slot: Slot, key: str) -> tuple[Tensor, BakedTensor | None]:
        buffer = slot.scratch("file", base.info(key).nbytes, torch.uint8)
        weight = base.tensor_into(key, buffer)
        if key not in landing:
            return weight, None
        changes = [
            WeightedChange(one.position, one.weight, _change(aligned[one.position], one.layer))
            for one in landing[key]
        ]
        return weight, bake(key, weight, changes, method, slot)

    found = []
    keys = base.keys()
    with StreamingWriter(target, metadata, expected=keys, data_bytes=base.nbytes) as writer:
        for done, (key, (tensor, change)) in enumerate(map_in_order(keys, work), start=1):
            writer.write(key, tensor)
            if change is not None:
                found.append(change)
            progress(done, len(keys), key)
    return tuple(found)


def _change(aligned: AlignedLora, layer: str) -> LoraFactors | WeightChange:
    lora = aligned.lora
    return lora.modules[layer] if layer in lora.modules else lora.changes[layer]


def _provenance(
    base: Checkpoint, paths: Sequence[Path], weights: Sequence[float], method: MergeMethod
) -> dict[str, str]:
    """The checkpoint's own metadata, without hashes that are wrong now, and what was merged."""
    kept = {name: value for name, value in base.metadata.items() if name not in _STALE}
    return kept | {
        "sigmascope_version": __version__,
        "sigmascope_merged_into": as_text(base.path.name),
        "sigmascope_merged_loras": merged_from(paths, weights),
        "sigmascope_merge_method": method.describe(),
    }
