"""The file of an extraction, written from the journal one layer at a time in the model's order."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from sigmascope.checkpoints import StreamingWriter
from sigmascope.lora.decompose import at_full_rank
from sigmascope.lora.extraction_rounds import DecomposedLayer
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.native import module_tensors
from sigmascope.lora.journal import Journal
from sigmascope.lora.layer_extraction import read_factors
from sigmascope.lora.layer_stream import LayerReader
from sigmascope.lora.options import ExtractOptions
from sigmascope.lora.pairs import CheckpointPair


def write_extracted(
    target: Path,
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
        pair: The checkpoints, for layers kept whole and for `diffs`.
        layers: What was decided, in the model's order.
        journal: Where the factors are.
        options: Format and precision.
        metadata: Texts for the header beside those of the format.
        diffs: Keys of biases, norms and embeddings whose change is stored as it is.

    Raises:
        WriteError: The target cannot be written.
        NonFiniteError: A change does not fit the storage precision.
    """
    kept = {layer: one for layer, one in layers.items() if one.rank > 0}
    reader = LayerReader(pair, torch.device("cpu"))
    with StreamingWriter(target, metadata, expected=_names(kept)) as writer:
        for layer, one in kept.items():
            factors = _factors(reader, layer, one, journal, options.storage_dtype)
            for name, tensor in module_tensors(layer, factors).items():
                writer.write(name, tensor)


def _names(layers: Iterable[str]) -> list[str]:
    return [f"{layer}.{part}" for layer in layers for part in ("lora_up.weight", "lora_down.weight", "alpha")]


def _factors(
    reader: LayerReader, layer: str, one: DecomposedLayer, journal: Journal, dtype: torch.dtype
) -> LoraFactors:
    if one.record.whole:
        return at_full_rank(reader.read(layer).delta, dtype).factors
    return read_factors(journal, one.name, one.rank)
