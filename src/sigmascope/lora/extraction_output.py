"""The file of an extraction, written from the journal one layer at a time in the model's order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.decompose import at_full_rank
from sigmascope.lora.extraction_rounds import DecomposedLayer
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats import FormatName, LoraWriter, format_named
from sigmascope.lora.journal import Journal
from sigmascope.lora.layer_extraction import read_factors
from sigmascope.lora.layer_stream import LayerReader
from sigmascope.lora.layout import ModelLayout
from sigmascope.lora.options import ExtractOptions
from sigmascope.lora.pairs import CheckpointPair
from sigmascope.lora.storage_cost import StorageCost

_CPU: Final = torch.device("cpu")
_FIELDS_BYTES: Final = 2048  # that the format adds to the header
_SPARE_BYTES: Final = 100  # that the writer reserves for each name's header entry and may leave empty


def resolve_format(options: ExtractOptions, pair: CheckpointPair) -> FormatName:
    """The format asked for, or the one that tools for such a checkpoint read.

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
    for layer in pair.layers:
        found.placement(layer, pair.layout)
    return found.name


def storage_cost(
    format: FormatName, pair: CheckpointPair, options: ExtractOptions, metadata: Mapping[str, str]
) -> StorageCost:
    """What factors take in the file, never too little."""
    spare = _FIELDS_BYTES + 3 * _SPARE_BYTES * len(pair.layers)
    names = _names_in(format, pair.layout)
    return StorageCost.of(options.storage_dtype, metadata, other_bytes=spare, names=names)


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
        expected=pair.layers,
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


def _names_in(format: FormatName, layout: ModelLayout) -> Callable[[str], Sequence[str]]:
    found = format_named(format)
    ends = [end for end in (found.keys.up, found.keys.down, found.keys.alpha) if end is not None]

    def names(layer: str) -> list[str]:
        try:
            module = found.name_for(layer, layout)
        except LoraFormatError:  # it is joined with others there: fewer names, none much longer
            module = layer
        return [f"{module}.{end}" for end in ends]

    return names


def _factors(
    reader: LayerReader, layer: str, one: DecomposedLayer, journal: Journal, dtype: torch.dtype
) -> LoraFactors:
    if one.record.whole:
        return at_full_rank(reader.read(layer).delta, dtype).factors
    return read_factors(journal, one.name, one.rank)
