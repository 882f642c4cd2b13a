"""Merge LoRAs into a checkpoint file (`merge_into_checkpoint`), with only a few layers in memory at a time."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import fsum, isfinite, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, StreamingWriter, open_checkpoint
from sigmascope.errors import CheckpointError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.alignment import ChangedKeys, changed_keys
from sigmascope.lora.factors import LoraFactors, add_product, row_pieces
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import HASHES, as_text, check_target, refuse_files, refuse_inputs
from sigmascope.lora.linalg import at_least_float32, blocked_energy, is_real, root_sum_square, same_matrix
from sigmascope.lora.merge import MergeMethod, merged_from, require_weights
from sigmascope.lora.parallel import Scratch, map_in_order
from sigmascope.lora.reader import open_lora
from sigmascope.lora.resize import InputLora
from sigmascope.progress import Progress, no_progress
from sigmascope.units import counted, first_few

__all__ = ["CheckpointMergeReport", "MergedTensor", "merge_into_checkpoint"]


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """One changed tensor of the checkpoint.

    Attributes:
        name: Its key.
        loras: Positions of the LoRAs that change it.
        weight_norm: ‖W‖ before the merge.
        change_norm: ‖ΔW‖ that should be added.
        lost_norm: ‖W + ΔW − stored‖: what is lost to rounding to the stored dtype.
    """

    name: str
    loras: tuple[int, ...]
    weight_norm: float
    change_norm: float
    lost_norm: float

    @property
    def lost_share(self) -> float | None:
        """`lost_norm` / `change_norm`; above 1, rounding is larger than the change."""
        return self.lost_norm / self.change_norm if self.change_norm > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The tensor as JSON values."""
        return asdict(self) | {"lost_share": self.lost_share}


@dataclass(frozen=True, slots=True)
class CheckpointMergeReport:
    """The result of a merge into a checkpoint.

    Attributes:
        into: The checkpoint that the LoRAs were merged into.
        checkpoint: The file that was written.
        inputs: The LoRAs, in the order given.
        method: How their changes were combined.
        tensors: The changed tensors, in the checkpoint's order.
        copied: How many tensors were copied bit for bit.
        unmatched: Modules without a tensor in the checkpoint, by the LoRA's position.
        unused_keys: Keys that belong to no module of their LoRA, by the LoRA's position.
        skipped: Entries of the checkpoint that the new file does not have, with the reason.
        file_bytes: Size of the new file.
        seconds: How long the merge took.
    """

    into: Path
    checkpoint: Path
    inputs: tuple[InputLora, ...]
    method: str
    tensors: tuple[MergedTensor, ...]
    copied: int
    unmatched: dict[int, tuple[str, ...]]
    unused_keys: dict[int, tuple[str, ...]]
    skipped: dict[str, str]
    file_bytes: int
    seconds: float

    @property
    def change_norm(self) -> float:
        """‖ΔW‖ of all changes that should be added."""
        return root_sum_square([tensor.change_norm for tensor in self.tensors])

    @property
    def changes_nothing(self) -> bool:
        """Whether all changes are zero, so that every weight is as it was."""
        return self.change_norm == 0.0

    @property
    def lost_share(self) -> float | None:
        """Share of the changes that is lost to rounding to the checkpoint's dtype; None without changes."""
        lost = root_sum_square([tensor.lost_norm for tensor in self.tensors])
        return lost / self.change_norm if self.change_norm > 0.0 else None

    @property
    def most_lost(self) -> tuple[MergedTensor, ...]:
        """The ten tensors that lost the largest share of their change to rounding."""
        measured = [tensor for tensor in self.tensors if tensor.lost_share is not None]
        return tuple(sorted(measured, key=lambda tensor: -(tensor.lost_share or 0.0))[:10])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "into": str(self.into),
            "checkpoint": str(self.checkpoint),
            "inputs": [asdict(lora) | {"path": str(lora.path)} for lora in self.inputs],
            "method": self.method,
            "changed": len(self.tensors),
            "copied": self.copied,
            "change_norm": self.change_norm,
            "changes_nothing": self.changes_nothing,
            "lost_share": self.lost_share,
            "file_bytes": self.file_bytes,
            "seconds": self.seconds,
            "unmatched": {str(position): list(names) for position, names in self.unmatched.items()},
            "unused_keys": {str(position): list(keys) for position, keys in self.unused_keys.items()},
            "skipped": self.skipped,
            "tensors": [tensor.as_dict() for tensor in self.tensors],
        }


def merge_into_checkpoint(
    loras: Sequence[str | PathLike[str]],
    into: str | PathLike[str],
    save_to: str | PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    method: MergeMethod | None = None,
    allow_unmatched: bool = False,
    progress: Progress = no_progress,
) -> CheckpointMergeReport:
    """Write a checkpoint with LoRAs merged into its weights.

    Each sum is formed in float32 (float64 for float64 weights) and rounded once to the stored dtype. Every other tensor
    is copied bit for bit, and the header's metadata is kept. LoRA and checkpoint may use different formats and namings;
    matrices that are fused on one side only are divided or joined exactly.

    Args:
        loras: LoRA files, at least one.
        into: A safetensors file, an index of shards, a `.ckpt`, or a component's folder.
        save_to: The `.safetensors` file to write.
        weights: Strength of each LoRA; 1 when left out. A LoRA of weight 0 touches nothing.
        method: How changes of one weight are combined; their plain sum by default.
        allow_unmatched: Accept modules that have no tensor in the checkpoint; the report lists them.
        progress: Called after each tensor.

    Raises:
        ConfigError: The target is an input or a folder, or there is not one weight for each LoRA.
        CheckpointError: An input is missing, damaged, quantised with scales, or a folder of several components.
        LoraFormatError: A LoRA's keys follow no known format, or two of its modules are for one layer.
        ModelMismatchError: Modules have no tensor, or one of another shape.
        NonFiniteError: NaN or Inf in a LoRA, or in a merged weight.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    strengths = require_weights(None if weights is None else tuple(weights), len(loras))
    how = method or MergeMethod()
    paths, target = [Path(path) for path in loras], Path(save_to)
    check_target(target, content="a checkpoint")
    with ExitStack() as files:
        base = files.enter_context(open_checkpoint(into))
        _require_not_quantised(base, Path(into))
        layout = layout_of({key: base.info(key).shape for key in base})
        changes = [changed_keys(files.enter_context(open_lora(path)), base.keys(), layout) for path in paths]
        _require_one_file(base, Path(into), changes)
        lora_files = [change.lora.path or path for change, path in zip(changes, paths, strict=True)]
        refuse_inputs(target, base)
        refuse_files(target, lora_files)
        positions = _match_tensors(base, changes, strengths)
        unmatched = {i: change.unmatched for i, change in enumerate(changes) if change.unmatched}
        _require_matched(base, changes, unmatched, allow_unmatched=allow_unmatched)
        metadata = _provenance(base, lora_files, strengths, how)
        tensors = _write_checkpoint(
            target,
            base,
            lambda key: [
                WeightedChange(i, strengths[i], changes[i].change(key)) for i in positions.get(key, ())
            ],
            how,
            metadata,
            progress,
        )
        return CheckpointMergeReport(
            into=Path(into),
            checkpoint=target,
            inputs=tuple(
                InputLora.of(change.lora, path, weight)
                for change, path, weight in zip(changes, paths, strengths, strict=True)
            ),
            method=how.describe(),
            tensors=tensors,
            copied=len(base) - len(tensors),
            unmatched=unmatched,
            unused_keys={
                i: change.lora.unused_keys for i, change in enumerate(changes) if change.lora.unused_keys
            },
            skipped=dict(base.skipped),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
        )


def _require_one_file(base: Checkpoint, into: Path, loras: Sequence[ChangedKeys]) -> None:
    """Refuse a pipeline's folder, and name those of its components that the LoRAs have modules for."""
    if not base.path.is_dir():
        return
    components = dict.fromkeys(key.partition(".")[0] for key in base)
    modules = Counter(key.partition(".")[0] for lora in loras for key in lora.names)
    where = [f"--into {into / name} ({counted(number, 'module')})" for name, number in modules.most_common()]
    if not where:
        hint = "None of the LoRA's modules is for any of them. Merge into the model that it was made for."
    elif len(where) == 1:
        hint = f"Merge into the one that the LoRA is for, and put the result into its folder: {where[0]}."
    else:
        hint = (
            "Merge into one after the other with --allow_unmatched, and put each result into its folder: "
            f"{', '.join(where)}."
        )
    raise CheckpointError(
        into,
        f"is a folder of several components ({', '.join(components)}), which one file cannot replace.",
        hint=hint,
    )


def _require_not_quantised(base: Checkpoint, into: Path) -> None:
    if base.dequantised:
        key, how = next(iter(base.dequantised.items()))
        raise CheckpointError(
            into,
            f"is quantised ({key}: {how}); rounding would swallow a change added to it.",
            hint="Merge into the checkpoint in float, fp16 or bf16, and quantise the result.",
        )


def _match_tensors(
    base: Checkpoint, loras: Sequence[ChangedKeys], weights: Sequence[float]
) -> dict[str, list[int]]:
    """Which LoRAs change each tensor: their positions by the tensor's key, without LoRAs of weight 0.

    Raises:
        ModelMismatchError: A module is for a weight of another shape.
    """
    positions: dict[str, list[int]] = {}
    wrong: list[str] = []
    for position, (lora, weight) in enumerate(zip(loras, weights, strict=True)):
        for key, layer in lora.names.items():
            shape, own = base.info(key).shape, lora.lora.shape_of(layer)
            if layer in lora.lora.modules and not same_matrix(own, shape):
                wrong.append(f"{layer} is {shape} in the checkpoint and {own} in {lora.lora}")
            if weight != 0.0:
                positions.setdefault(key, []).append(position)
    if wrong:
        raise ModelMismatchError(
            f"{counted(len(wrong), 'module does', 'modules do')} not fit {base.path}: {first_few(wrong, between='; ')}.",
            hint="Merge the LoRA into the model that it was made for.",
        )
    return positions


def _require_matched(
    base: Checkpoint,
    loras: Sequence[ChangedKeys],
    unmatched: Mapping[int, tuple[str, ...]],
    *,
    allow_unmatched: bool,
) -> None:
    """Refuse modules that have no tensor, unless that is allowed; refuse a LoRA without any match always.

    Raises:
        ModelMismatchError: Names the first few.
    """
    matches_nothing = any(not lora.names for lora in loras)
    if not matches_nothing and (allow_unmatched or not unmatched):
        return
    parts = [
        f"{counted(len(names), 'module')} of {loras[position].lora}: {first_few(names)}"
        for position, names in unmatched.items()
    ]
    other = "" if matches_nothing else ", or go on without them: --allow_unmatched"
    raise ModelMismatchError(
        f"{base.path} has no tensors for {'; '.join(parts)}.",
        hint=f"Merge into the model that the LoRA was made for{other}.",
    )


def _provenance(
    base: Checkpoint, paths: Sequence[Path], weights: Sequence[float], method: MergeMethod
) -> dict[str, str]:
    """The checkpoint's own metadata without its hashes, and what was merged."""
    kept = {name: value for name, value in base.metadata.items() if name not in HASHES}
    return kept | {
        "sigmascope_version": __version__,
        "sigmascope_merged_into": as_text(base.path.name),
        "sigmascope_merged_loras": merged_from(paths, weights),
        "sigmascope_merge_method": method.describe(),
    }


def _write_checkpoint(
    target: Path,
    base: Checkpoint,
    changes_of: "Callable[[str], list[WeightedChange]]",
    method: MergeMethod,
    metadata: Mapping[str, str],
    progress: Progress,
) -> tuple[MergedTensor, ...]:
    def work(slot: Scratch, key: str) -> tuple[Tensor, MergedTensor | None]:
        buffer = slot.scratch("file", base.info(key).nbytes, torch.uint8)
        weight = base.tensor_into(key, buffer)
        changes = changes_of(key)
        return weight, _merge_into_weight(key, weight, changes, method, slot) if changes else None

    tensors = []
    keys = base.keys()
    with StreamingWriter(target, metadata, expected=keys, data_bytes=base.nbytes) as writer:
        for done, (key, (tensor, change)) in enumerate(map_in_order(keys, work), start=1):
            writer.write(key, tensor)
            if change is not None:
                tensors.append(change)
            progress(done, len(keys), key)
    return tuple(tensors)


class WeightedChange(NamedTuple):
    """One LoRA's change of a weight.

    Attributes:
        position: The LoRA's, among all.
        weight: The factor on its change.
        change: The change.
    """

    position: int
    weight: float
    change: LoraFactors | WeightChange


def _merge_into_weight(
    name: str, weight: Tensor, changes: Sequence[WeightedChange], method: MergeMethod, slot: Scratch
) -> MergedTensor:
    """Change a weight in place to W + Σ weight·ΔW, added in float32 (float64 for float64) and rounded once.

    With one LoRA and method `linear` the result is that of `merge_into_model` on a live model, bit for bit.

    Args:
        name: The tensor's key.
        weight: As stored in the checkpoint, contiguous.
        changes: At least one, of this weight.
        method: How several changes are combined. `linear` adds one after the other.
        slot: Memory to calculate in.

    Raises:
        ModelMismatchError: The weight is quantised, or a change is for a weight of another shape.
        NonFiniteError: The new weight holds NaN or Inf.
    """
    if not is_real(weight.dtype):
        raise ModelMismatchError(
            f"{name} is stored as {weight.dtype}: nothing can be added to such numbers.",
            hint="Merge into the checkpoint in float, fp16 or bf16.",
        )
    energies = _add(_matrix(weight), _addends(name, weight, changes, method), slot)
    if not isfinite(energies[2]):
        raise NonFiniteError(
            f"{name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
            hint="Check the weights, or merge with smaller --weights.",
        )
    positions = tuple(change.position for change in changes)
    return MergedTensor(name, positions, *map(sqrt, energies))


class _Addend(NamedTuple):
    """strength · rows·down, or strength · rows."""

    rows: Tensor
    down: Tensor | None
    strength: float


def _add(weight: Tensor, addends: Sequence[_Addend], slot: Scratch) -> tuple[float, float, float]:
    """Add in pieces that stay in the processor's cache; return ‖W‖², ‖ΔW‖² and the squared rounding loss."""
    compute = at_least_float32(weight.dtype)
    sums = []
    for piece, *parts in row_pieces(weight, *(addend.rows for addend in addends)):
        before, after = (slot.scratch(name, piece.numel(), compute) for name in ("before", "after"))
        total = after.view(piece.shape)
        total.copy_(piece)
        before.copy_(after)
        for part, addend in zip(parts, addends, strict=True):
            if addend.down is None:
                total.add_(part, alpha=addend.strength)
            else:
                add_product(total, part, addend.down, addend.strength)
        piece.copy_(total)
        own = _energy(before)
        before.sub_(after)
        added = _energy(before)
        before.view(piece.shape).copy_(piece)
        sums.append((own, added, _energy(after.sub_(before))))
    own, added, lost = (fsum(values) for values in zip(*sums, strict=True))
    return own, added, lost


def _energy(piece: Tensor) -> float:
    return float(blocked_energy(piece)) if piece.dtype == torch.float32 else float(torch.dot(piece, piece))


def _addends(
    name: str, weight: Tensor, changes: Sequence[WeightedChange], method: MergeMethod
) -> list[_Addend]:
    if method.is_linear:
        return [_addend(name, weight, change) for change in changes]
    deltas = {change.position: _delta(name, weight, change) for change in changes}
    strengths = {change.position: change.weight for change in changes}
    return [_Addend(_matrix(method.combine(name, deltas, strengths)), None, 1.0)]


def _addend(name: str, weight: Tensor, change: WeightedChange) -> _Addend:
    if not isinstance(change.change, LoraFactors):
        return _Addend(_matrix(_delta(name, weight, change)), None, change.weight)
    compute = at_least_float32(weight.dtype)
    return _Addend(
        change.change.up.to(compute), change.change.down.to(compute), change.weight * change.change.scale
    )


def _delta(name: str, weight: Tensor, change: WeightedChange) -> Tensor:
    compute = at_least_float32(weight.dtype)
    if isinstance(change.change, LoraFactors):
        return change.change.delta(compute).view(weight.shape)
    try:
        return change.change.delta(weight.to(compute), compute).reshape(weight.shape)
    except ModelMismatchError as error:
        raise ModelMismatchError(f"{name}: {error.message}", hint=error.hint) from error


def _matrix(tensor: Tensor) -> Tensor:
    """A row for each output; a bias has one value in each row."""
    return tensor.reshape(len(tensor) if tensor.ndim else 1, -1)
