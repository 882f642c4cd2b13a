"""What a layer's factors take in a format that makes one matrix of several layers, or several of one."""

from collections.abc import Callable, Mapping, Sequence

from sigmascope.errors import LoraFormatError
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.names.fused import joined_sizes
from sigmascope.lora.names.transformer_names import Row
from sigmascope.lora.names.unet_names import UnetBlocks
from sigmascope.lora.shapes import matrix_shape


def numbers_in(
    format: LoraFormat,
    layout: ModelLayout,
    shapes: Mapping[str, Sequence[int]],
    blocks: UnetBlocks | None = None,
) -> Callable[[str, Sequence[int]], int]:
    """How many numbers one more rank of a layer takes, for `StorageCost`.

    Joined, a layer's column of `up` is as long as all layers of the fused matrix together; divided, each part has
    a `down` of its own (see `sigmascope.lora.names.fused`).

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


def parts_in(format: LoraFormat, layout: ModelLayout, layer: str, blocks: UnetBlocks | None = None) -> int:
    """How many modules a layer becomes in a format: more than one where it is divided."""
    row = _fused_row(format, layout, layer, blocks)
    return len(row.parts) if row is not None and _divides(format, layout) else 1


def _divides(format: LoraFormat, layout: ModelLayout) -> bool:
    return format.naming(layout.family) == "diffusers"


def _fused_row(format: LoraFormat, layout: ModelLayout, layer: str, blocks: UnetBlocks | None) -> Row | None:
    placed = format.placement(layer, layout, blocks=blocks)
    return placed if isinstance(placed, Row) and len(placed.parts) > 1 else None
