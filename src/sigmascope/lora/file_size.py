"""The most bytes that a LoRA file can take, in any format, before it is written.

A format may make one matrix of several layers, or several of one, so what a layer's factors take depends on it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from sigmascope.checkpoints.safetensors import ALIGNMENT, LENGTH_BYTES, encoded_header
from sigmascope.errors import LoraFormatError
from sigmascope.lora.alignment import joined_sizes
from sigmascope.lora.families import ModelLayout
from sigmascope.lora.formats import LoraFormat
from sigmascope.lora.layer_names import Row, UnetBlocks
from sigmascope.lora.linalg import matrix_shape, max_rank

_ALPHA_BYTES: Final = 4  # a float32
_ENTRY_BYTES: Final = len(':{"dtype":"BF16","shape":,"data_offsets":[,]},')

_ROUNDING: Final = 0.32
"""Rounding both factors changes their product by 0.30 ± 0.01 of the type's eps, measured over many shapes."""
_LEAST_ROUNDING: Final = 1e-6  # float32 arithmetic, whatever the storage


def native_names(layer: str) -> tuple[str, ...]:
    """The tensors of a module in native naming: up, down and alpha."""
    return f"{layer}.lora_up.weight", f"{layer}.lora_down.weight", f"{layer}.alpha"


def plain_numbers(layer: str, weight_shape: Sequence[int]) -> int:
    """What one rank takes where every layer is a module of its own: a column of up and a row of down."""
    return sum(matrix_shape(weight_shape))


@dataclass(frozen=True)
class StorageCost:
    """The bytes of a safetensors file of LoRA modules, never too few.

    Attributes:
        value_bytes: Of one number of a factor: 2 for float16 and bfloat16.
        fixed_bytes: What the file holds whatever the ranks are: metadata, tensors that are no factors.
        names: Gives the names of a layer's up, down and (where the format has one) alpha in the file.
        numbers: Gives how many numbers one rank of a layer of that shape takes.
        module_metadata_bytes: What each module adds to the metadata.
        offset_digits: Digits of the largest byte offset, which the header repeats for every tensor.
        rounding: What rounding to storage precision adds: its share of ‖up·down‖, as a fraction.
    """

    value_bytes: int
    fixed_bytes: int = 0
    names: Callable[[str], Sequence[str]] = native_names
    numbers: Callable[[str, Sequence[int]], int] = plain_numbers
    module_metadata_bytes: int = 0
    offset_digits: int = 12
    rounding: float = 0.0

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        metadata: Mapping[str, str] | None = None,
        *,
        other_bytes: int = 0,
        names: Callable[[str], Sequence[str]] = native_names,
        numbers: Callable[[str, Sequence[int]], int] = plain_numbers,
        module_metadata_bytes: int = 0,
    ) -> "StorageCost":
        """The cost of a file with factors of a dtype.

        Args:
            dtype: Storage dtype.
            metadata: The header's texts.
            other_bytes: Tensors that are no factors, with their header entries.
            names: As the attribute.
            numbers: As the attribute.
            module_metadata_bytes: As the attribute.
        """
        fixed = len(encoded_header([], metadata or {})) + other_bytes
        rounding = max(_ROUNDING * torch.finfo(dtype).eps, _LEAST_ROUNDING)
        return cls(dtype.itemsize, fixed, names, numbers, module_metadata_bytes, rounding=rounding)

    def rank_bytes(self, layer: str, weight_shape: Sequence[int]) -> int:
        """What one more singular value takes: a column of up and a row of down."""
        return self.numbers(layer, weight_shape) * self.value_bytes

    def module_bytes(self, layer: str, weight_shape: Sequence[int]) -> int:
        """What a module takes beside its factors: header entries and alpha."""
        names = self.names(layer)
        shapes = _factor_shapes(weight_shape)[: len(names)]
        entries = sum(_entry_bytes(name, shape) for name, shape in zip(names, shapes, strict=True))
        entries += len(names) * 2 * self.offset_digits
        return entries + (_ALPHA_BYTES if len(names) > 2 else 0) + self.module_metadata_bytes

    @property
    def empty_bytes(self) -> int:
        """The file without any module: what is fixed, the header's length and its padding."""
        return LENGTH_BYTES + ALIGNMENT + self.fixed_bytes

    def within(self, max_bytes: int) -> "StorageCost":
        """The same for a file of at most this size, whose offsets have no more digits than it has."""
        return replace(self, offset_digits=len(str(max_bytes)))

    def file_bytes(self, ranks: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> int:
        """The most that a file of these modules takes.

        Args:
            ranks: By layer; 0 is not in the file.
            shapes: Weight shapes by layer.
        """
        return self.empty_bytes + sum(
            rank * self.rank_bytes(layer, shapes[layer]) + self.module_bytes(layer, shapes[layer])
            for layer, rank in ranks.items()
            if rank > 0
        )


def _factor_shapes(weight_shape: Sequence[int]) -> list[list[int]]:
    """Shapes of up, down and alpha at the largest rank, whose digits are the most."""
    rank = max_rank(weight_shape)
    ones = [1] * (len(weight_shape) - 2)
    return [[weight_shape[0], rank, *ones], [rank, *weight_shape[1:]], []]


def _entry_bytes(name: str, shape: list[int]) -> int:
    """Bytes of `"<name>":{"dtype":"BF16","shape":[…],"data_offsets":[,]},`, offsets aside."""
    sizes = json.dumps(shape, separators=(",", ":"))
    return len(json.dumps(name, ensure_ascii=False).encode("utf-8")) + len(sizes) + _ENTRY_BYTES


def names_in(
    format: LoraFormat, layout: ModelLayout, blocks: UnetBlocks | None = None
) -> Callable[[str], list[str]]:
    """The names of a layer's up, down and alpha in a file of this format, for `StorageCost`.

    Args:
        format: Of the file.
        layout: Of the checkpoint.
        blocks: The U-Net's; the family's own when left out.
    """
    keys = format.keys
    ends = [end for end in (keys.up, keys.down, keys.alpha) if end is not None]

    def names(layer: str) -> list[str]:
        try:
            module = format.name_for(layer, layout, blocks=blocks)
        except LoraFormatError:  # it is joined with others there: fewer names, none much longer
            module = layer
        return [f"{module}.{end}" for end in ends]

    return names


def numbers_in(
    format: LoraFormat,
    layout: ModelLayout,
    shapes: Mapping[str, Sequence[int]],
    blocks: UnetBlocks | None = None,
) -> Callable[[str, Sequence[int]], int]:
    """How many numbers one more rank of a layer takes, for `StorageCost`.

    Joined, a layer's column of `up` is as long as all layers of the fused matrix together; divided, each part has
    a `down` of its own (see `sigmascope.lora.alignment`).

    Args:
        format: Of the file.
        layout: Of the checkpoint.
        shapes: Weight shapes of all its layers.
        blocks: The U-Net's; the family's own when left out.
    """

    def numbers(layer: str, weight_shape: Sequence[int]) -> int:
        out, inner = matrix_shape(weight_shape)
        row = _fused_row(format, layout, layer, blocks)
        if row is None:
            return out + inner
        if _divides(format, layout):
            return out + len(row.parts) * inner
        path = layout.split(layer)[1]
        siblings = {part: layer.removesuffix(path) + part for part in row.parts}
        sizes = {part: shapes[name][0] for part, name in siblings.items() if name in shapes}
        return sum(joined_sizes(sizes, row, inner)) + inner

    return numbers


def parts_in(format: LoraFormat, layout: ModelLayout, layer: str, blocks: UnetBlocks | None = None) -> int:
    """How many modules a layer becomes in a format: more than one where it is divided."""
    row = _fused_row(format, layout, layer, blocks)
    return len(row.parts) if row is not None and _divides(format, layout) else 1


def _fused_row(format: LoraFormat, layout: ModelLayout, layer: str, blocks: UnetBlocks | None) -> Row | None:
    placed = format.placement(layer, layout, blocks=blocks)
    return placed if isinstance(placed, Row) and len(placed.parts) > 1 else None


def _divides(format: LoraFormat, layout: ModelLayout) -> bool:
    return format.naming(layout.family) == "diffusers"
