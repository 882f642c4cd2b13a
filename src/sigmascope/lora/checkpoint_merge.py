"""Merge LoRAs into a checkpoint file (`merge_into_checkpoint`), with only a few layers in memory at a time."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from math import fsum, isfinite, sqrt
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import Checkpoint, StreamingWriter, open_checkpoint
from sigmascope.checkpoints.gguf import GgufCheckpoint
from sigmascope.checkpoints.gguf_writer import GgufRewriter
from sigmascope.checkpoints.rounding import Storage, recoded_rows
from sigmascope.errors import CheckpointError, LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.alignment import ChangedKeys, changed_keys, layout_for, weights_of
from sigmascope.lora.arrival import Arrival, arrival_findings, together
from sigmascope.lora.compatibility import (
    Mismatch,
    by_reason,
    energy_of,
    missing_in_variant,
    unmatched_reasons,
)
from sigmascope.lora.factors import LoraFactors, add_product, row_pieces
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import (
    HASHES,
    LoraFile,
    as_text,
    check_target,
    refuse_files,
    refuse_inputs,
    require_model,
)
from sigmascope.lora.file_verdict import variant_finding
from sigmascope.lora.linalg import at_least_float32, blocked_energy, is_real, root_sum_square, same_matrix
from sigmascope.lora.merge import MergeMethod, merged_from, require_weights
from sigmascope.lora.parallel import Scratch, map_in_order
from sigmascope.lora.reader import open_lora
from sigmascope.lora.resize import InputLora
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding
from sigmascope.units import counted, first_few, format_size

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
        inner: <stored − W, ΔW>.
        real_norm: ‖stored − W‖: what has really changed.
        stored: How it is stored.
        stored_before: How it was stored in the checkpoint, if that was otherwise.
        added_bytes: By how many bytes that made it larger.
        has_new_scale: Whether a scale was made anew, since the sum grew beyond it.
    """

    name: str
    loras: tuple[int, ...]
    weight_norm: float
    change_norm: float
    lost_norm: float
    inner: float
    real_norm: float
    stored: str
    stored_before: str | None = None
    added_bytes: int = 0
    has_new_scale: bool = False

    @property
    def arrival(self) -> Arrival:
        """What arrives of the change, and with how much noise; see `lora.arrival`."""
        return Arrival(self.change_norm**2, self.inner, self.real_norm**2, self.stored)

    @property
    def lost_share(self) -> float | None:
        """`lost_norm` / `change_norm`; above 1, rounding is larger than the change."""
        return self.lost_norm / self.change_norm if self.change_norm > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The tensor as JSON values."""
        arrival = self.arrival
        return asdict(self) | {"lost_share": self.lost_share, "share": arrival.share, "noise": arrival.noise}


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
        not_in_variant: Modules for layers that the model's family has and this variant does not, by the LoRA's position.
        kept_energy: Share of ‖ΔW‖² of all modules at their weights that those with a tensor have; None if a norm depends on the
            model's weights, or all changes are zero.
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
    not_in_variant: dict[int, tuple[str, ...]] = field(default_factory=dict)
    kept_energy: float | None = 1.0

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
    def arrival(self) -> Arrival:
        """What arrives of all changes together."""
        return together(tensor.arrival for tensor in self.tensors)

    @property
    def stored_otherwise(self) -> tuple[MergedTensor, ...]:
        """The tensors whose type only can be read, and that another one took the place of."""
        return tuple(tensor for tensor in self.tensors if tensor.stored_before is not None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is left out or lost of the changes, and what became larger."""
        found = [
            variant_finding(names, self.inputs[position].modules, self.inputs[position].path.name)
            for position, names in self.not_in_variant.items()
        ]
        found += arrival_findings(self.arrival, len(self.tensors))
        others = self.stored_otherwise
        if others:
            types = ", ".join(dict.fromkeys(str(tensor.stored_before) for tensor in others))
            added = sum(tensor.added_bytes for tensor in others)
            found.append(
                Finding(
                    "lora.stored_otherwise",
                    "info",
                    f"{counted(len(others), 'changed tensor')} of {types} {'is' if len(others) == 1 else 'are'} stored as "
                    f"{others[0].stored}, since the gguf package only reads {types}: {format_size(added)} more.",
                    {
                        "tensors": len(others),
                        "types": types,
                        "stored": others[0].stored,
                        "added_bytes": added,
                    },
                )
            )
        return tuple(found)

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
            "share": self.arrival.share,
            "noise": self.arrival.noise,
            "findings": [asdict(finding) for finding in self.findings],
            "file_bytes": self.file_bytes,
            "seconds": self.seconds,
            "kept_energy": self.kept_energy,
            "unmatched": _by_position(self.unmatched),
            "not_in_variant": _by_position(self.not_in_variant),
            "unused_keys": _by_position(self.unused_keys),
            "skipped": self.skipped,
            "tensors": [tensor.as_dict() for tensor in self.tensors],
        }


def _by_position(names: Mapping[int, Sequence[str]]) -> dict[str, list[str]]:
    return {str(position): list(of_lora) for position, of_lora in names.items()}


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

    Each sum is formed in float32 (float64 for float64 weights) and rounded once to how the weight is stored: also fp8 and
    int8 with scales, and GGUF, whose types that can only be read become Q8_0. Every other tensor is copied bit for bit,
    and the header's metadata is kept. LoRA and checkpoint may use different formats and namings;
    matrices that are fused on one side only are divided or joined exactly. Modules for layers that the model's family has and
    this variant does not are left out, and named in the report.

    Args:
        loras: LoRA files, at least one.
        into: A safetensors file, an index of shards, a `.ckpt`, a `.gguf`, or a component's folder.
        save_to: The `.safetensors` file to write; a `.gguf` one for a GGUF checkpoint.
        weights: Strength of each LoRA; 1 when left out. A LoRA of weight 0 touches nothing.
        method: How changes of one weight are combined; their plain sum by default.
        allow_unmatched: Also accept modules that have no tensor in the checkpoint for another reason; the report lists them.
        progress: Called after each tensor.

    Raises:
        ConfigError: The target is an input or a folder, or there is not one weight for each LoRA.
        CheckpointError: An input is missing, damaged, or a folder of several components, or a changed weight is stored in a
            way that cannot be written.
        LoraFormatError: A LoRA's keys follow no known format, or two of its modules are for one layer.
        ModelMismatchError: Modules have no tensor, or one of another shape.
        NonFiniteError: NaN or Inf in a LoRA, or in a merged weight.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    strengths = require_weights(None if weights is None else tuple(weights), len(loras))
    how = method or MergeMethod()
    paths, target = [Path(path) for path in loras], Path(save_to)
    with ExitStack() as files:
        base = files.enter_context(open_checkpoint(into, keep_unread=True))
        require_model(base)
        check_target(
            target,
            content="this checkpoint" if base.format == "gguf" else "a checkpoint",
            format="gguf" if base.format == "gguf" else "safetensors",
        )
        shapes = {key: base.info(key).shape for key in base}
        layout = layout_of(shapes)
        opened = [files.enter_context(open_lora(path)) for path in paths]
        changes = [
            changed_keys(lora, base.keys(), layout_for(lora, layout, base.path), weights_of(base))
            for lora in opened
        ]
        _require_one_file(base, Path(into), changes)
        lora_files = [change.lora.path or path for change, path in zip(changes, paths, strict=True)]
        refuse_inputs(target, base)
        refuse_files(target, lora_files)
        positions = _match_tensors(base, changes, strengths)
        idle = {i: change.unmatched for i, change in enumerate(changes) if change.unmatched}
        reasons = {i: unmatched_reasons(opened[i], names, shapes, base.path) for i, names in idle.items()}
        not_in_variant = _filled({i: missing_in_variant(whys) for i, whys in reasons.items()})
        unmatched = _filled(
            {
                i: tuple(name for name in names if name not in not_in_variant.get(i, ()))
                for i, names in idle.items()
            }
        )
        _require_matched(base, changes, reasons, allow_unmatched=allow_unmatched or not unmatched)
        storages = _storages(base, positions)
        tensors = _write_checkpoint(
            _writer(target, base, storages, _provenance(base, lora_files, strengths, how)),
            base,
            storages,
            positions,
            lambda key: [WeightedChange(i, strengths[i], changes[i].change(key)) for i in positions[key]],
            how,
            progress,
        )
        return CheckpointMergeReport(
            into=Path(into),
            checkpoint=target,
            inputs=tuple(
                InputLora.of(lora, path, weight)
                for lora, path, weight in zip(opened, paths, strengths, strict=True)
            ),
            method=how.describe(),
            tensors=tensors,
            copied=len(base.as_stored) - len(_owners(base, storages, positions)),
            unmatched=unmatched,
            unused_keys={
                i: change.lora.unused_keys for i, change in enumerate(changes) if change.lora.unused_keys
            },
            skipped=dict(base.as_stored.skipped),
            file_bytes=target.stat().st_size,
            seconds=time.perf_counter() - started,
            not_in_variant=not_in_variant,
            kept_energy=_kept_energy(opened, strengths, idle) if idle else 1.0,
        )


def _filled(names: Mapping[int, tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    return {position: of_lora for position, of_lora in names.items() if of_lora}


def _kept_energy(
    loras: Sequence[LoraFile], weights: Sequence[float], idle: Mapping[int, tuple[str, ...]]
) -> float | None:
    """The share of ‖ΔW‖² that modules with a tensor have, each LoRA by itself."""
    kept, lost = 0.0, 0.0
    for position, (lora, weight) in enumerate(zip(loras, weights, strict=True)):
        without = idle.get(position, ())
        own = energy_of(lora, [name for name in lora.names if name not in without])
        dropped = energy_of(lora, without)
        if own is None or dropped is None:
            return None
        kept, lost = kept + weight**2 * own, lost + weight**2 * dropped
    return kept / (kept + lost) if kept + lost > 0.0 else None


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


def _storages(base: Checkpoint, keys: Iterable[str]) -> dict[str, Storage]:
    """How changed weights that are quantised are stored; refuses those that cannot be."""
    return {key: base.storage(key) for key in keys if key in base.dequantised}


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
    unmatched: Mapping[int, Mapping[str, Mismatch]],
    *,
    allow_unmatched: bool,
) -> None:
    """Refuse modules that have no tensor, unless that is allowed; refuse a LoRA without any match always.

    Raises:
        ModelMismatchError: Names the first few of each reason.
    """
    matches_nothing = any(not lora.names for lora in loras)
    if not matches_nothing and (allow_unmatched or not unmatched):
        return
    parts = [
        f"{counted(len(whys), 'module')} of {loras[position].lora}: "
        f"{by_reason({name: why.detail for name, why in whys.items()})}"
        for position, whys in unmatched.items()
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


def _writer(
    target: Path, base: Checkpoint, storages: Mapping[str, Storage], metadata: Mapping[str, str]
) -> StreamingWriter | GgufRewriter:
    if isinstance(base, GgufCheckpoint):
        texts = {
            name.replace("_", ".", 1): text
            for name, text in metadata.items()
            if name.startswith("sigmascope_")
        }
        kinds = {key: int(base.new_kind_of(key)) for key in storages}
        added = {key: storage.added_bytes for key, storage in storages.items()}
        return GgufRewriter(target, base, kinds, added, texts)
    stored = base.as_stored
    return StreamingWriter(target, metadata, expected=stored.keys(), data_bytes=stored.nbytes)


def _owners(base: Checkpoint, storages: Mapping[str, Storage], changed: Iterable[str]) -> dict[str, str]:
    """The changed weight that each tensor of the file holds, or is a scale of."""
    return {own: key for key in changed for own in (storages[key].keys if key in storages else (key,))}


def _write_checkpoint(
    file: StreamingWriter | GgufRewriter,
    base: Checkpoint,
    storages: Mapping[str, Storage],
    changed: Iterable[str],
    changes_of: "Callable[[str], list[WeightedChange]]",
    method: MergeMethod,
    progress: Progress,
) -> tuple[MergedTensor, ...]:
    stored, owners = base.as_stored, _owners(base, storages, changed)

    def work(slot: Scratch, key: str) -> tuple[Mapping[str, Tensor], MergedTensor | None]:
        owner = owners.get(key)
        source, name = (stored, key) if owner is None else (base, owner)
        weight = source.tensor_into(name, slot.scratch("file", source.info(name).nbytes, torch.uint8))
        if owner is None:
            return {key: weight}, None
        if owner in storages:
            return _merge_into_codes(base, owner, weight, changes_of(owner), method, storages[owner])
        return {key: weight}, _merge_into_weight(owner, weight, changes_of(owner), method, slot)

    tensors = []
    # A weight's scales are written with its codes.
    keys = [key for key in stored if key not in owners or _first_key(owners[key], storages) == key]
    with file as writer:
        for done, (key, (parts, change)) in enumerate(map_in_order(keys, work), start=1):
            for name, tensor in parts.items():
                writer.write(name, tensor)
            if change is not None:
                tensors.append(change)
            progress(done, len(keys), key)
    return tuple(tensors)


def _first_key(weight: str, storages: Mapping[str, Storage]) -> str:
    return storages[weight].keys[0] if weight in storages else weight


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
    stored = str(weight.dtype).removeprefix("torch.")
    sums = _add(_matrix(weight), _addends(name, weight, changes, method), slot)
    return _merged(name, changes, sums, Storage(stored, (name,)))


def _merged(
    name: str, changes: Sequence[WeightedChange], sums: "_Sums", storage: Storage, before: str | None = None
) -> MergedTensor:
    if not all(map(isfinite, sums)):
        raise NonFiniteError(
            f"{name}: the merged weight would hold NaN or Inf in {storage.stored}.",
            hint="Check the weights, or merge with smaller --weights.",
        )
    return MergedTensor(
        name,
        tuple(change.position for change in changes),
        sqrt(sums.weight),
        sqrt(sums.change),
        sqrt(sums.lost),
        sums.inner,
        sqrt(sums.real),
        storage.stored,
        before if before != storage.stored else None,
        storage.added_bytes,
    )


def _merge_into_codes(
    base: Checkpoint,
    name: str,
    weight: Tensor,
    changes: Sequence[WeightedChange],
    method: MergeMethod,
    storage: Storage,
) -> tuple[Mapping[str, Tensor], MergedTensor]:
    """Store W + Σ weight·ΔW as a quantised weight is stored.

    Args:
        base: The checkpoint.
        name: The weight's key.
        weight: The numbers that its codes stand for.
        changes: At least one, of this weight.
        method: How several changes are combined.
        storage: How it is stored.

    Raises:
        NonFiniteError: The new weight holds NaN or Inf.
    """
    matrix, addends = _matrix(weight), _addends(name, weight, changes, method)

    def wanted(some: slice) -> Tensor:
        change = torch.zeros_like(matrix[some])
        for addend in addends:
            rows = addend.rows[some]
            change.add_(rows if addend.down is None else rows @ addend.down, alpha=addend.strength)
        return change

    recoded = base.recoded(name, lambda some: matrix[some] + wanted(some))
    sums = [
        _sums_of(matrix[some], wanted(some), recoded.numbers(some)) for some in recoded_rows(*matrix.shape)
    ]
    merged = _merged(name, changes, _added(sums), storage, base.dequantised[name])
    return recoded.tensors, replace(merged, has_new_scale=recoded.has_new_scale)


class _Sums(NamedTuple):
    """‖W‖², ‖ΔW‖², ‖W + ΔW − stored‖², <stored − W, ΔW> and ‖stored − W‖²."""

    weight: float
    change: float
    lost: float
    inner: float
    real: float


def _sums_of(weight: Tensor, change: Tensor, stored: Tensor) -> _Sums:
    real = (stored - weight).double()
    wanted = change.double()
    products = (
        weight.double().square(),
        wanted.square(),
        (wanted - real).square(),
        real * wanted,
        real.square(),
    )
    return _Sums(*(float(product.sum()) for product in products))


def _added(sums: Sequence[_Sums]) -> _Sums:
    return _Sums(*(fsum(values) for values in zip(*sums, strict=True)))


class _Addend(NamedTuple):
    """strength · rows·down, or strength · rows."""

    rows: Tensor
    down: Tensor | None
    strength: float


def _add(weight: Tensor, addends: Sequence[_Addend], slot: Scratch) -> _Sums:
    """Add in pieces that stay in the processor's cache."""
    compute = at_least_float32(weight.dtype)
    sums = []
    for piece, *parts in row_pieces(weight, *(addend.rows for addend in addends)):
        before, after, change, real = (
            slot.scratch(name, piece.numel(), compute) for name in ("before", "after", "change", "real")
        )
        total = after.view(piece.shape)
        total.copy_(piece)
        before.copy_(after)
        for part, addend in zip(parts, addends, strict=True):
            if addend.down is None:
                total.add_(part, alpha=addend.strength)
            else:
                add_product(total, part, addend.down, addend.strength)
        piece.copy_(total)
        torch.sub(after, before, out=change)
        real.view(piece.shape).copy_(piece)
        after.sub_(real)
        own = _energy(before)
        real.sub_(before)
        moved = _energy(real)
        inner = float(real.mul_(change).sum(dtype=torch.float64))
        sums.append(_Sums(own, _energy(change), _energy(after), inner, moved))
    return _added(sums)


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
    except (LoraFormatError, ModelMismatchError) as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from error


def _matrix(tensor: Tensor) -> Tensor:
    """A row for each output; a bias has one value in each row."""
    return tensor.reshape(len(tensor) if tensor.ndim else 1, -1)
