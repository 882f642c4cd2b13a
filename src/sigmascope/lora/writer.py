"""Write a LoRA file in any format.

- `save_lora` writes a LoRA that is in memory.
- `LoraWriter` writes module by module, one in memory at a time. The file is renamed into place when it is complete
  (`sigmascope.files.atomic_path`).
- `writer_of_aligned` is the writer of a resize or merge: it keeps the LoRAs' own names where `names_to_keep` gives them.

Plain factors are stored with their scale in `up` and alpha = rank, so that a reader which ignores alpha gets the same ΔW
(`stored_factors`). If a loader would mix different alphas up, all modules get one alpha (`_write_alphas`). Other changes
are named as kohya's and LyCORIS' tools name them (`_change_tensors`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, SizeWriter, StreamingWriter
from sigmascope.errors import LoraFormatError, NonFiniteError
from sigmascope.lora.adapters import (
    MID,
    Adapter,
    DiffChange,
    DoraChange,
    LokrChange,
    SetChange,
    TuckerChange,
    WeightChange,
)
from sigmascope.lora.alignment import (
    AlignedLoras,
    divided,
    joined,
    joined_diff,
    joined_dora,
    joined_sizes,
    part_sizes,
)
from sigmascope.lora.budget import StorageCost
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import ModelLayout, Row, UnetBlocks
from sigmascope.lora.file import VARYING, LoraFile, as_text, family_in, kept_metadata, lora_header
from sigmascope.lora.formats import FactorKeys, LoraFormat, alphas_mislead, format_named, peft_header
from sigmascope.lora.kinds import BaseChange
from sigmascope.lora.kinds.fused import rows_of
from sigmascope.lora.layer_names import blocks_of_model
from sigmascope.lora.linalg import (
    as_float64,
    at_least_float32,
    is_convolution,
    is_real,
    matrix_shape,
    max_rank,
)
from sigmascope.lora.loadable import WrittenLoads, is_taken, loads_of_written, require_loadable

LBM_LAYOUT: Final = ModelLayout("lbm", "lbm", {"denoiser": "denoiser.", "vae": "vae.vae_model."})
"""The layout if none is given."""

_ALPHA: Final = ".alpha"
_KEY_ENDS: Final = (".lora_up.weight", ".lora_down.weight", _ALPHA)
_METADATA_ROOM_BYTES: Final = 2048  # for header fields that are known only at the end
_MAX_ENTRY_BYTES: Final = 200  # of a header entry, without the layer's name
_BIAS: Final = ".bias"
_OTHER_FORMAT: Final = "Write kohya's or ComfyUI's format, or leave such changes out: --drop_unsupported."

_LYCORIS_KINDS: Final = frozenset({"loha", "lokr", "tucker", "dora", "oft", "boft", "glora"})

SavePrecision = Literal["float", "fp16", "bf16"]
STORAGE_DTYPES: Final[dict[str, torch.dtype]] = {
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def save_lora(
    path: str | Path,
    lora: LoraFile,
    metadata: Mapping[str, str] | None = None,
    *,
    format: str = "native",
    layout: ModelLayout | None = None,
    model_layers: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
) -> WrittenLoads | None:
    """Write a LoRA; the target appears complete or not at all.

    The header has `lora.metadata`, the format's own fields (ranks, alpha, naming) and `metadata`; later ones win.

    Args:
        path: A `.safetensors` file to write or replace.
        lora: At least one module or change, named by the checkpoint's own paths. To change the format of a
            file, use `convert_lora`. A scale other than 1 is multiplied into the up factor.
        metadata: More strings for the header.
        format: "native", "kohya", "peft" or "comfyui".
        layout: The layout of the checkpoint that the names come from; LBM's by default.
        model_layers: Paths of all layers of the model, needed to number the blocks of a U-Net of unusual size.
        dtype: Stored dtype of the factors; by default their own, or float32 if a scale would round them.

    Returns:
        What the file loads into.

    Raises:
        LoraFormatError: The LoRA has no modules, the format cannot hold one of them, or its host would take none.
        NonFiniteError: A factor holds NaN or Inf, or overflows `dtype`.
        WriteError: The target cannot be written.
    """
    if not lora.names:
        raise _no_modules()
    with LoraWriter(
        path,
        format=format,
        layout=layout,
        metadata=metadata,
        inherited=lora.metadata,
        expected=lora.names,
        model_layers=model_layers,
        dtype=dtype,
    ) as writer:
        for name, factors in lora.modules.items():
            writer.write(name, factors)
        for name, change in lora.changes.items():
            writer.write_change(name, change)
    return writer.loads


class LoraWriter:
    """Write a LoRA with one module in memory at a time.

        with LoraWriter("lora.safetensors", format="kohya", layout=layout) as writer:
            for layer in layers:
                writer.write(layer, factors_of(layer))

    Layers are named by their paths in the checkpoint; the format makes its own names of them. Leaving the block
    without an exception completes the file and renames it into place; otherwise the target stays unchanged. The header
    gets the fields that tools look for (ranks, kind, architecture); `metadata` overrides them.

    Args:
        path: A `.safetensors` file to write or replace.
        format: "native", "kohya", "peft" or "comfyui".
        layout: The layout of the checkpoint that the layers come from; LBM's by default.
        metadata: Texts for the header.
        inherited: Texts for the header that all of the above override.
        expected: Paths of the layers that may come, to reserve room for the header.
        model_layers: Paths of all layers of the model, needed to number the blocks of a U-Net of unusual size.
        blocks: The U-Net's blocks, if they are known already.
        dtype: Stored dtype of the factors; by default their own, or float32 if a scale would round them.
        prefix: Prefix of the denoiser's names in PEFT's format: `unet` or `transformer` by default, "" for none.
        own_names: Names to write instead of the format's, by layer.
        compact: Reserve no spare room for the header, at the cost of moving the data once.
        writes: What the tensors go to; `SizeWriter` only finds the file's size.

    Attributes:
        tally: Kinds and ranks of what is written so far.
        widened: Layers whose up factor became float32, because their scale would have rounded it.
        loads: What the file loads into, once the block is left; None of a file that is only measured.

    Raises:
        LoraFormatError: There is no such format; on leaving: nothing was written, or the format's host would take none
            of it.
        WriteError: On entering: the target cannot be written.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        format: str = "native",
        layout: ModelLayout | None = None,
        metadata: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
        expected: Iterable[str] | None = None,
        model_layers: Iterable[str] | None = None,
        blocks: UnetBlocks | None = None,
        dtype: torch.dtype | None = None,
        prefix: str | None = None,
        own_names: Mapping[str, str] | None = None,
        compact: bool = False,
        writes: type[StreamingWriter] = StreamingWriter,
    ) -> None:
        self.path = Path(path)
        self.format = format_named(format)
        self.layout = layout or LBM_LAYOUT
        self.tally = Tally()
        self.widened: list[str] = []
        self.loads: WrittenLoads | None = None
        self._inherited, self._metadata = dict(inherited or {}), dict(metadata or {})
        self._dtype = dtype
        self._prefix = prefix
        self._own_names = own_names
        self._blocks = blocks if model_layers is None else blocks_of_model(model_layers, self.layout)
        self._parts: dict[str, tuple[Row, str, dict[str, LoraFactors]]] = {}
        room = None if expected is None else [layer + end for layer in expected for end in _KEY_ENDS]
        if own_names is not None:
            room = [key for name in own_names.values() for key in self.format.keys.of(name)]
        elif room is not None:
            room.append("x" * _METADATA_ROOM_BYTES)
        first = {"modelspec.title": as_text(self.path.stem)} | self._inherited | self._metadata
        self._file = writes(self.path, first, expected=room, header_bytes=0 if compact else None)
        self._changes: dict[str, tuple[Row, str, dict[str, DoraChange | DiffChange]]] = {}
        self._ranks: dict[str, int] = {}
        self._has_dora = False

    def __enter__(self) -> "LoraWriter":
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._file.__exit__(kind, error, trace)
            return
        self._file.look_at = self._hold
        with ExitStack() as stack:
            stack.push(self._file)  # renames the file into place, or removes it if `_finish` fails
            self._finish()

    def _hold(self, written: Path) -> None:
        """Hold the whole file to its format's host, before it takes its place.

        Without a prefix a file is for a model alone, which takes names that no pipeline does; so may an unknown model.
        """
        has_prefix = self._prefix is None or self._prefix.strip() not in ("", "none")
        if has_prefix and self.layout.family != "unknown":
            self.loads = require_loadable(written, target=self.path, format=self.format.name)
        else:
            self.loads = loads_of_written(written)

    @property
    def file_bytes(self) -> int:
        """The file's size, once the block is left."""
        return self._file.file_bytes

    def write(self, layer: str, factors: LoraFactors) -> None:
        """Write the factors of one layer.

        Layers that the format fuses into one matrix are kept until all of them have come, or the block ends. A fused
        layer is divided if the format has its parts.

        Args:
            layer: The layer's path in the checkpoint, without `.weight`.
            factors: Its change.

        Raises:
            LoraFormatError: The format has no name for the layer.
            NonFiniteError: A factor holds NaN or Inf, or overflows the stored dtype.
        """
        if self._own_names is not None:
            self._write(layer, self._own_names[layer], factors)
            return
        placed = self.format.placement(layer, self.layout, blocks=self._blocks)
        if isinstance(placed, str):
            self._write(layer, self.format.named(layer, placed, self.layout, self._prefix), factors)
        elif self._divides:
            for path, part in divided(factors, placed).items():
                self._write(layer, self.format.named(layer, path, self.layout, self._prefix), part)
        else:
            _, _, parts = self._parts.setdefault(placed.original, (placed, layer, {}))
            _, own = self.layout.split(layer)
            parts[own] = factors
            if len(parts) == len(placed.parts):
                self._write_joined(placed.original)

    def write_diff(self, key: str, tensor: Tensor) -> None:
        """Write the whole change of one tensor: a bias, a norm, an embedding, or any other.

        Args:
            key: The tensor's key in the checkpoint.
            tensor: Its change, of the same shape.

        Raises:
            LoraFormatError: The format cannot hold whole changes, or has no name for the tensor.
            NonFiniteError: It holds NaN or Inf, or overflows the stored dtype.
        """
        self.write_change(key.removesuffix(".weight"), DiffChange({"diff": tensor}))

    def write_change(self, name: str, change: WeightChange) -> None:
        """Write a change that is more than plain factors, as it is stored.

        Args:
            name: Its name, as in `LoraFile.changes`, with the layer's path in the checkpoint.
            change: One of `sigmascope.lora.adapters`.

        Raises:
            LoraFormatError: The format cannot hold such a change, or has no name for the layer.
            NonFiniteError: As of `write_diff`.
        """
        layer = name.removesuffix(_BIAS)
        if isinstance(change, TuckerChange) and not self.format.keys.holds_changes:
            self.write(name, change.factors())
            return
        if not isinstance(change, Adapter | DoraChange) or not holds(self.format, change, name):
            hint = _OTHER_FORMAT
            if isinstance(change, DiffChange | SetChange) and len(change.weight_shape) > 1:
                hint = (
                    "Make plain factors of it: sigmascope lora convert --rank 32, with the model (--model) if it is a whole weight. "
                    f"{hint}"
                )
            if not isinstance(change, Adapter | DoraChange) or isinstance(change, BaseChange):
                hint = (
                    "Give the model that it is for, which makes a whole difference of it: --model MODEL."
                    if self.format.keys.holds_changes
                    else "Make plain factors of it, with the model that it is for: --rank 32 --model MODEL."
                )
            raise LoraFormatError(
                f"{name}: {self.format.name} files cannot hold such a change ({change.kind}).", hint=hint
            )
        if self._own_names is not None:
            self._write_change(name, self._own_names[name].removesuffix(_BIAS), change)
            return
        placed = self.format.placement(layer, self.layout, blocks=self._blocks)
        if isinstance(placed, str):
            self._write_change(name, self.format.named(layer, placed, self.layout, self._prefix), change)
        else:
            self._write_fused_change(name, placed, change)

    def _write_fused_change(self, name: str, row: Row, change: Adapter | DoraChange) -> None:
        """Write the parts of a fused layer's difference or DoRA, or keep a part until all have come."""
        layer = name.removesuffix(_BIAS)
        end = name.removeprefix(layer)
        if row.swapped or not isinstance(change, DoraChange | DiffChange):
            raise self._needs_factors(name, row, change)
        if self._divides:
            sizes = part_sizes(change.weight_shape, row)
            for index, path in enumerate(row.parts):
                part = rows_of(change, sizes, index)
                if not isinstance(part, DoraChange | DiffChange):
                    raise self._needs_factors(name, row, change)
                module = self.format.named(layer, path, self.layout, self._prefix)
                self._write_change(f"{layer}{end}", module, part)
            return
        parts = self._changes.setdefault(row.original + end, (row, name, {}))[2]
        parts[self.layout.split(layer)[1]] = change
        if len(parts) == len(row.parts):
            self._write_joined_change(row.original + end)

    def _write_joined_change(self, original: str) -> None:
        row, name, parts = self._changes.pop(original)
        own = {part: parts[part] for part in row.parts if part in parts}
        whole = joined_dora(list(own.values()), row) or joined_diff(own, row)
        if whole is None:
            raise self._needs_factors(name, row, next(iter(own.values())))
        layer = name.removesuffix(_BIAS)
        self._write_change(name, self.format.named(layer, row.original, self.layout, self._prefix), whole)

    def _needs_factors(self, name: str, row: Row, change: WeightChange) -> LoraFormatError:
        return LoraFormatError(
            f"{name}: {self.format.name} files have {row.original} for {', '.join(row.parts)}, and what a {change.kind} change of "
            "it is cannot be told from its parts."
            if not self._divides
            else f"{name}: {self.format.name} files have {', '.join(row.parts)} for {row.original}, and a {change.kind} change of "
            "it cannot be divided.",
            hint="Make plain factors of it: --rank 32, with the model (--model) if it depends on the weights.",
        )

    def _write_change(self, name: str, module: str, change: Adapter | DoraChange) -> None:
        layer, keys = name.removesuffix(_BIAS), self.format.keys
        if keys.up_bias is not None and name != layer and module not in self._ranks:
            raise LoraFormatError(
                f"{name}: {self.format.name} files can hold a bias's change only beside factors of its layer.",
                hint=_OTHER_FORMAT,
            )
        tensors = _change_tensors(change, keys, is_bias=name != layer)
        self._write_tensors(
            module, {f"{module}.{end}": self._cast(name, tensor, end) for end, tensor in tensors.items()}
        )
        self.tally.add_change(change.kind)

    def estimated_storage(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> StorageCost:
        """How many bytes plain factors take in this file, without the format's own header fields.

        The format may join several layers into one matrix, or divide one into several (see `sigmascope.lora.alignment`).
        Joined, a column of a layer's `up` is as long as all layers of the fused matrix together. Divided, each part has
        its own `down`.

        Args:
            dtype: The factors' dtype.
            shapes: Shapes of the changed weights, by layer.
        """
        rows = {} if self._own_names is not None else self._fused(shapes)
        divides = self._divides
        parts = sum(3 * (len(layer) + _MAX_ENTRY_BYTES) * (len(row.parts) - 1) for layer, row in rows.items())

        def numbers(layer: str, weight_shape: Sequence[int]) -> int:
            out, inner = matrix_shape(weight_shape)
            row = rows.get(layer)
            if row is None:
                return out + inner
            if divides:
                return out + len(row.parts) * inner
            start = layer.removesuffix(self.layout.split(layer)[1])
            sizes = {part: shapes[start + part][0] for part in row.parts if start + part in shapes}
            return sum(joined_sizes(sizes, row, inner)) + inner

        return StorageCost.of(
            dtype,
            self._inherited | self._metadata,
            other_bytes=parts if divides else 0,
            names=self._factor_keys,
            numbers=numbers,
        )

    def _fused(self, layers: Iterable[str]) -> dict[str, Row]:
        """Layers that this format divides, or joins with others."""
        placed = {layer: self.format.placement(layer, self.layout, blocks=self._blocks) for layer in layers}
        return {layer: row for layer, row in placed.items() if isinstance(row, Row) and len(row.parts) > 1}

    @property
    def _divides(self) -> bool:
        return self.format.naming(self.layout) == "diffusers"

    def _factor_keys(self, layer: str) -> list[str]:
        if self._own_names is not None:
            return self.format.keys.of(self._own_names[layer])
        return self.format.keys_for(layer, self.layout, self._blocks)

    def _write(self, layer: str, name: str, factors: LoraFactors) -> None:
        stored = stored_factors(factors, self._dtype)
        for factor in (stored.up, stored.down):
            require_finite(layer, factor)
        self._write_tensors(name, self.format.keys.tensors(name, stored))
        if self._dtype is None and stored.up.dtype != factors.up.dtype:
            self.widened.append(layer)
        self.tally.add(stored.rank, stored.weight_shape)

    def _write_joined(self, original: str) -> None:
        row, layer, parts = self._parts.pop(original)
        name = self.format.named(layer, original, self.layout, self._prefix)
        self._write(layer, name, joined(parts, row))

    def _cast(self, module: str, tensor: Tensor, end: str) -> Tensor:
        keep = self._dtype is None or end == self.format.keys.alpha
        stored = tensor.detach() if keep else tensor.detach().to(self._dtype)
        require_finite(module, stored)
        return stored.contiguous()

    def _finish(self) -> None:
        for original in list(self._parts):
            self._write_joined(original)
        for original in list(self._changes):
            self._write_joined_change(original)
        if not self.tally.kinds:
            raise _no_modules()
        family = self.layout.family
        if self._own_names is not None or self.layout.is_any_unet:
            family = family_in(self._inherited) or "unknown"
        header = self.tally.header(self.format.name, family, self._write_alphas())
        if self.format.name == "peft":
            header |= peft_header(self._ranks, has_dora=self._has_dora)
        self._file.update_metadata(header | self._metadata)

    def _write_tensors(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one module's tensors, by key. Alphas of plain factors wait until all ranks are known."""
        keys = self.format.keys
        down = f"{module}.{keys.down}"
        if down in tensors and f"{module}.{MID}" not in tensors:
            self._ranks[module] = tensors[down].shape[0]
        self._has_dora |= f"{module}.{keys.magnitude}" in tensors
        for key, tensor in tensors.items():
            self._file.write(key, tensor)

    def _write_alphas(self) -> int | None:
        """Write each module's rank as its alpha, or one alpha for all if a loader would mix them up.

        The common alpha is the smallest rank, and `up` is scaled to match it. An alpha above its module's rank could be
        taken for the requested rank by `true_alpha`.

        Returns:
            The common alpha; None if each module has its own.

        Raises:
            NonFiniteError: A scaled factor overflows its dtype.
        """
        keys = self.format.keys
        if keys.alpha is None:
            return None
        mislead = alphas_mislead(self.format, self._ranks, self.layout)
        common_rank = min(self._ranks.values()) if mislead else None
        for module, rank in self._ranks.items():
            if common_rank is not None and rank != common_rank:
                self._file.rewrite(f"{module}.{keys.up}", partial(_scaled, module, rank / common_rank))
            self._file.write(f"{module}.{keys.alpha}", _alpha(float(common_rank or rank)))
        return common_rank


def _alpha(value: float) -> Tensor:
    """An alpha as every format stores it, for LoRA modules and adapters. `lora_header` writes the one in the header."""
    return torch.tensor(value, dtype=torch.float32)


def writer_of_aligned(
    target: Path,
    aligned: AlignedLoras,
    originals: Sequence[LoraFile],
    format: str | None,
    metadata: Mapping[str, str],
    *,
    own_names: Mapping[str, str] | None,
    compact: bool = False,
    writes: type[StreamingWriter] = StreamingWriter,
) -> LoraWriter:
    """A writer for the result of aligned LoRAs.

    Args:
        target: The `.safetensors` file to write or replace.
        aligned: The LoRAs under common names.
        originals: The same LoRAs under their own names.
        format: The format to write; the first LoRA's by default.
        metadata: Texts for the header; they override those that all LoRAs share.
        own_names: See `names_to_keep`; None for the format's names.
        compact: As for `LoraWriter`.
        writes: As for `LoraWriter`.

    Raises:
        LoraFormatError: There is no such format.
    """
    return LoraWriter(
        target,
        format=format or originals[0].format,
        layout=aligned.layout,
        metadata=metadata,
        inherited=_agreed_metadata(originals),
        expected=[name.removesuffix(_BIAS) for name in aligned.names],
        blocks=aligned.blocks,
        own_names=own_names,
        compact=compact,
        writes=writes,
    )


def measured_storage(
    new_writer: Callable[..., LoraWriter],
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    carried: Mapping[str, WeightChange],
) -> StorageCost:
    """How many bytes factors take in a file, measured by writing to a `SizeWriter`.

    Args:
        new_writer: Makes a new writer for the file; it takes `writes`.
        dtype: The factors' dtype.
        shapes: Shapes of the changed weights, by layer, in the order of writing.
        carried: Changes that are written unchanged.
    """
    storage = new_writer(writes=SizeWriter).estimated_storage(dtype, shapes)
    return replace(
        storage,
        measure=lambda ranks: measured_bytes(new_writer(writes=SizeWriter), dtype, shapes, ranks, carried),
    )


def measured_bytes(
    sizing: LoraWriter,
    dtype: torch.dtype,
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Mapping[str, int],
    carried: Mapping[str, WeightChange],
) -> int:
    """The size that a file with these ranks would have.

    Args:
        sizing: A new writer to a `SizeWriter`.
        dtype: The factors' dtype.
        shapes: Shapes of the changed weights, by layer, in the order of writing.
        ranks: Rank by layer; a layer of rank 0, or without one, is not in the file.
        carried: Changes that are written unchanged.
    """
    with sizing:
        for layer, shape in shapes.items():
            if rank := ranks.get(layer, 0):
                rows, columns = matrix_shape(shape)
                up, down = torch.zeros(rows, rank, dtype=dtype), torch.zeros(rank, columns, dtype=dtype)
                sizing.write(layer, LoraFactors(up, down, float(rank), shape))
        for name, change in carried.items():
            sizing.write_change(name, change)
    return sizing.file_bytes


def _no_modules() -> LoraFormatError:
    return LoraFormatError("a LoRA without modules is not written.", hint="Check what it was made from.")


def _scaled(module: str, scale: float, factor: Tensor) -> Tensor:
    scaled = as_float64(factor).mul(scale).to(factor.dtype)
    require_finite(module, scaled)
    return scaled


def names_to_keep(
    aligned: AlignedLoras, originals: Sequence[LoraFile], format: str | None
) -> dict[str, str] | None:
    """Each layer's name in the files of which a resize or merge makes one.

    Args:
        aligned: The LoRAs under common names.
        originals: The same LoRAs under their own names.
        format: The format to write; the first LoRA's by default.

    Returns:
        None if another format is asked for, if the files differ in format or in a name, if their keys spell other names than
        these (as XLabs' do), or if the format's host takes nothing under such names (PEFT's `base_model.model.`, `lora_transformer_` of a family that ComfyUI has no such names for):
        the result then gets the format's names.

    Raises:
        CheckpointError: A file is damaged.
    """
    first = originals[0]
    if (format or first.format) != first.format or len({lora.format for lora in originals}) > 1:
        return None
    is_known = aligned.layout.family not in ("unknown", "lbm")
    if is_known and first.path is not None and not is_taken(first.path, first.format):
        return None
    names: dict[str, str] = {}
    for sources in aligned.sources:
        if len(set(sources.values())) < len(sources):
            return None  # a fused module was divided
        for layer, name in sources.items():
            if names.setdefault(layer, name) != name:
                return None
    if any(name in lora.stored_names for lora in originals for name in names.values()):
        return None
    return names


def _agreed_metadata(loras: Sequence[LoraFile]) -> dict[str, str]:
    """The header fields that are equal in all LoRAs and still true."""
    first, *others = (kept_metadata(dict(lora.metadata)) for lora in loras)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _change_tensors(
    change: Adapter | DoraChange, keys: FactorKeys, *, is_bias: bool = False
) -> dict[str, Tensor]:
    """The tensors of a change by the end of their key, with an alpha if the change has a scale.

    Args:
        change: What to store. A scale that no alpha can express goes into a factor.
        keys: How the format names plain factors and magnitudes.
        is_bias: Whether it is a bias's difference, which is named `diff_b`, or is the up factor's in PEFT's format.
    """
    if isinstance(change, DoraChange):
        return _direction_tensors(change, keys) | _magnitude_tensors(change, keys)
    if isinstance(change, DiffChange):
        values = change.values.detach()
        scaled = values if change.scale == 1.0 else values.float().mul(change.scale)
        return {(keys.up_bias or "diff_b") if is_bias else "diff": scaled}
    return _adapter_tensors(change)


def _direction_tensors(change: DoraChange, keys: FactorKeys) -> dict[str, Tensor]:
    if isinstance(change.direction, Adapter):
        return _adapter_tensors(change.direction)
    tensors = keys.tensors("x", stored_factors(change.direction))
    return {key.removeprefix("x."): tensor for key, tensor in tensors.items()}


def _magnitude_tensors(change: DoraChange, keys: FactorKeys) -> dict[str, Tensor]:
    """LyCORIS stores magnitudes with the weight's axes, as a column or row; PEFT as a vector, or a row for convolutions."""
    ones = (1,) * (len(change.weight_shape) - 1)
    row = (1, -1, *ones[1:])
    values = change.magnitude.detach()
    if keys.magnitude is not None:
        return {keys.magnitude: values.reshape(row if len(ones) > 1 else (-1,))}
    return {"dora_scale": values.reshape((-1, *ones) if change.per_output else row)}


def _adapter_tensors(change: Adapter) -> dict[str, Tensor]:
    tensors = {name: part.detach() for name, part in change.parts.items()}
    rank = change.rank
    if rank is not None:
        tensors["alpha"] = _alpha(change.scale * rank)
    elif isinstance(change, BaseChange) and change.alpha is not None:
        tensors["alpha"] = _alpha(change.alpha)  # a limit of rotations, and no scale
    elif change.scale != 1.0 and isinstance(change, LokrChange):
        # Two whole factors have no rank, and readers ignore an alpha beside them.
        tensors["lokr_w1"] = tensors["lokr_w1"].float().mul(change.scale)
    return tensors


def holds(lora_format: LoraFormat, change: WeightChange, name: str) -> bool:
    """Whether a format can hold a change that is more than plain factors, as it is.

    Args:
        lora_format: The format.
        change: Of a weight or bias.
        name: The layer's; with `.bias` if it is of its bias.
    """
    keys = lora_format.keys
    if name.endswith(_BIAS) and isinstance(change, SetChange):
        return False  # no format has a name for a whole bias
    if name.endswith(_BIAS) and isinstance(change, DiffChange) and keys.up_bias is not None:
        return True
    if not isinstance(change, Adapter | DoraChange):
        return False  # it is not as a file has it
    if isinstance(change, DoraChange) and isinstance(change.direction, DiffChange):
        return False  # nor is DoRA of a direction that had to be formed
    if isinstance(change, BaseChange):
        return keys.holds_changes and change.lycoris_keys
    is_plain = (
        isinstance(change, DoraChange) and isinstance(change.direction, LoraFactors) and change.per_output
    )
    return keys.holds_changes or (keys.magnitude is not None and is_plain)


def require_finite(module: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds NaN or Inf.

    Raises:
        NonFiniteError: Names the module and the dtype.
    """
    if not bool(torch.isfinite(tensor.to(at_least_float32(tensor.dtype))).all()):
        raise NonFiniteError(
            f"{module}: a factor holds NaN or Inf in {tensor.dtype}.",
            hint="Store in bfloat16 or float32, which hold larger values than float16.",
        )


def stored_factors(factors: LoraFactors, dtype: torch.dtype | None = None) -> LoraFactors:
    """The same ΔW with its scale in the up factor and alpha = rank.

    Args:
        factors: With any scale.
        dtype: The stored dtype. By default the factors keep theirs, but an up factor that the multiplication would round
            becomes float32: a scale of 1/2 rounds nothing, one of 5/8 may.
    """
    rank = float(factors.rank)
    stored = factors if dtype is None else factors.to(dtype=dtype)
    if factors.scale == 1.0:
        return replace(stored, alpha=rank)
    product = as_float64(factors.up) * factors.scale
    up = _without_loss(product, factors.up.dtype) if dtype is None else product.to(dtype)
    return replace(stored, up=up.to(stored.up.device), alpha=rank)


def _without_loss(product: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = product.to(dtype)
    same = torch.equal(rounded.to(product.dtype), product)
    return rounded if same else product.to(at_least_float32(dtype))


@dataclass(slots=True)
class Tally:
    """Counts of the modules written so far, for the header.

    Attributes:
        kinds: `lora` for plain factors, else `WeightChange.kind`.
        linear: How many Linear layers have each rank, and whether it is the highest that the layer can have.
        convolution: The same for convolutions.
        changes: How many changes of other kinds there are.
    """

    kinds: set[str] = field(default_factory=set)
    linear: Counter[tuple[int, bool]] = field(default_factory=Counter)
    convolution: Counter[tuple[int, bool]] = field(default_factory=Counter)
    changes: int = 0

    @property
    def modules(self) -> int:
        """How many modules of plain factors there are."""
        return self.linear.total() + self.convolution.total()

    def add(self, rank: int, weight_shape: tuple[int, ...]) -> None:
        """Count plain factors."""
        self.kinds.add("lora")
        counts = self.convolution if is_convolution(weight_shape) else self.linear
        counts[rank, rank >= max_rank(weight_shape)] += 1

    def add_change(self, kind: str) -> None:
        """Count a change that is more than plain factors."""
        self.kinds.add(kind)
        self.changes += 1

    def header(self, format_name: str, family: str, alpha: int | None = None) -> dict[str, str]:
        """The header's fields; see `lora_header`."""
        module = "lycoris.kohya" if self.kinds & _LYCORIS_KINDS else "networks.lora"
        linear = VARYING if _varies(self.linear) else _common_rank(self.linear)
        convolution = _common_rank(self.convolution)
        return lora_header(format_name, family, linear, convolution, module=module, alpha=alpha)


def _varies(counts: Counter[tuple[int, bool]]) -> bool:
    """Whether ranks were chosen layer by layer. A layer that cannot have the others' rank proves nothing."""
    chosen = {rank for rank, full in counts if not full}
    return len(chosen) > 1 or any(full and rank > min(chosen, default=rank) for rank, full in counts)


def _common_rank(counts: Counter[tuple[int, bool]]) -> int | None:
    """The most frequent rank, the smallest of equally frequent ones; layers at their highest rank count only if all are."""
    free = {rank: number for (rank, full), number in counts.items() if not full}
    ranks = free or {rank: number for (rank, _), number in counts.items()}
    return max(ranks, key=lambda rank: (ranks[rank], -rank)) if ranks else None


def storage_dtype(*files: Checkpoint) -> torch.dtype:
    """The dtype in which to store factors made from these files: the widest that they have.

    Factors are not rounded to 8-bit floats, which count as float16. float16 goes before bfloat16, because it rounds eight
    times finer.

    Args:
        files: Opened LoRA files.
    """
    found = [info for file in files for info in map(file.info, file) if info.shape and is_real(info.dtype)]
    matrices = [info for info in found if len(info.shape) >= 2] or found  # (IA)³ has vectors alone
    dtypes = {torch.float16 if info.dtype.itemsize == 1 else info.dtype for info in matrices}
    order = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return next((dtype for dtype in order if dtype in dtypes), torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
