"""The file of an extraction, written from the journal one layer at a time in the model's order."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Final

import torch

from sigmascope.checkpoints.writer import PADDING_SHARE
from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.extraction.decomposed import DecomposedLayer
from sigmascope.lora.extraction.journal import Journal
from sigmascope.lora.extraction.layer_extraction import read_factors
from sigmascope.lora.extraction.layer_stream import LayerReader
from sigmascope.lora.extraction.options import ExtractOptions
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.base import FormatName, LoraFormat
from sigmascope.lora.formats.registry import format_named
from sigmascope.lora.formats.writer import LoraWriter
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.names.unet_names import UnetBlocks, blocks_of
from sigmascope.lora.numerics.decompose import at_full_rank
from sigmascope.lora.ranking.format_cost import names_in, numbers_in, parts_in
from sigmascope.lora.ranking.storage_cost import StorageCost

_CPU: Final = torch.device("cpu")
_FIELDS_BYTES: Final = 2048  # that the format adds to the header
_SPARE_BYTES: Final = 100  # that the writer reserves for each name's header entry and may leave empty
_ENTRY_BYTES: Final = 200  # that a header entry takes beside the tensor's name in the checkpoint


def resolve_format(options: ExtractOptions, pair: CheckpointPair, diffs: Iterable[str] = ()) -> FormatName:
    """The format asked for, or the one that tools for such a checkpoint read.

    Args:
        options: With the format, or `auto`.
        pair: The checkpoints.
        diffs: Keys of biases, norms and embeddings that it has to hold.

    Raises:
        ConfigError: It cannot hold what was asked for.
        LoraFormatError: There is no such format, or it has no name for a layer.
    """
    chosen = _usual_format(pair.layout) if options.format == "auto" else options.format
    found = format_named(chosen)
    if options.biases_and_norms and not found.keys.holds_changes:
        raise ConfigError(
            f"--biases_and_norms: {found.name} files hold up and down factors only.",
            hint="Use --format native, kohya or comfyui.",
        )
    blocks = _blocks(pair)
    for layer in pair.layers:
        placed = found.placement(layer, pair.layout, blocks=blocks)
        found.named(layer, placed if isinstance(placed, str) else placed.original, pair.layout)
    for key in diffs:
        _require_name(found, key, pair.layout, blocks)
    return found.name


def storage_cost(
    format: FormatName,
    pair: CheckpointPair,
    options: ExtractOptions,
    metadata: Mapping[str, str],
    diffs: Iterable[str] = (),
) -> StorageCost:
    """What factors take in the file, never too little.

    Args:
        format: Of the file.
        pair: The checkpoints.
        options: Precision.
        metadata: Texts for the header.
        diffs: Keys of tensors whose change is stored whole.
    """
    found, layout, blocks = format_named(format), pair.layout, _blocks(pair)
    shapes = {layer: pair.shape(layer) for layer in pair.layers}
    spare = 3 * _SPARE_BYTES * len(shapes)
    if options.budget is not None and options.budget.max_bytes is not None:
        spare = min(spare, options.budget.max_bytes // PADDING_SHARE)
    other = _FIELDS_BYTES + spare
    for layer in shapes:
        other += 3 * (len(layer.encode()) + _ENTRY_BYTES) * (parts_in(found, layout, layer, blocks) - 1)
    for key in diffs:
        values = prod(pair.base.info(key).shape) * options.storage_dtype.itemsize
        other += values + len(key.encode()) + _ENTRY_BYTES
    return StorageCost.of(
        options.storage_dtype,
        metadata,
        other_bytes=other,
        names=names_in(found, layout, blocks),
        numbers=numbers_in(found, layout, shapes, blocks),
    )


def write_extracted(
    target: Path,
    format: FormatName,
    pair: CheckpointPair,
    layers: Mapping[str, DecomposedLayer],
    journal: Journal,
    options: ExtractOptions,
    metadata: Mapping[str, str],
    diffs: Iterable[str],
) -> None:
    """Write the LoRA, whole or not at all.

    Args:
        target: The file.
        format: Its format.
        pair: The checkpoints, for layers kept whole and for `diffs`.
        layers: What was decided, in the model's order.
        journal: Where the factors are.
        options: Precision.
        metadata: Texts for the header beside those of the format.
        diffs: Keys of biases, norms and embeddings whose change is stored as it is.

    Raises:
        WriteError: The target cannot be written.
        NonFiniteError: A change does not fit the storage precision.
    """
    reader = LayerReader(pair, _CPU)
    writer = LoraWriter(
        target,
        format=format,
        layout=pair.layout,
        metadata=metadata,
        expected=[layer for layer, one in layers.items() if one.rank > 0],
        model_layers=pair.layers,
        dtype=options.storage_dtype,
    )
    with writer:
        for layer, one in layers.items():
            if one.rank > 0:
                writer.write(layer, _factors(reader, layer, one, journal, options.storage_dtype))
        for key in diffs:
            writer.write_diff(key, pair.change(key, _CPU).delta)


def _usual_format(layout: ModelLayout) -> FormatName:
    if layout.naming == "diffusers":
        return "peft"
    return "comfyui" if layout.naming in ("sgm", "original") else "native"


def _blocks(pair: CheckpointPair) -> UnetBlocks:
    placed = map(pair.layout.split, pair.layers)
    return blocks_of(path for part, path in placed if part == "denoiser")


def _require_name(found: LoraFormat, key: str, layout: ModelLayout, blocks: UnetBlocks) -> None:
    """Refuse a bias or norm that the format cannot name before hours of work and not after."""
    try:
        found.name_for(key.removesuffix(".weight").removesuffix(".bias"), layout, blocks=blocks)
    except LoraFormatError as error:
        raise ConfigError(
            f"--biases_and_norms: {error.message}",
            hint="Use --format native, which keeps the model's own names.",
        ) from error


def _factors(
    reader: LayerReader, layer: str, one: DecomposedLayer, journal: Journal, dtype: torch.dtype
) -> LoraFactors:
    if one.record.whole:
        return at_full_rank(reader.read(layer).delta, dtype).factors
    return read_factors(journal, one.name, one.rank)
