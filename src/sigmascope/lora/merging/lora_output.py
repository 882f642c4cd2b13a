"""The file that a resize or merge writes: under the LoRAs' own names where those agree, else under the format's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.header import kept_metadata
from sigmascope.lora.formats.registry import format_named
from sigmascope.lora.formats.writer import LoraWriter
from sigmascope.lora.names.same_names import SameNamesWriter
from sigmascope.lora.names.united import UnitedLoras
from sigmascope.lora.ranking.storage_cost import StorageCost

_HEADER_FIELDS: Final = 2048  # bytes of the fields that are known at the end
_SPARE: Final = 100  # bytes that a writer reserves for each header entry and may leave empty
_ENTRY: Final = 160
_PARTS: Final = 8  # tensors that a change may have
_BIAS: Final = ".bias"


class LoraOutput:
    """Writes the layers of united LoRAs into one file.

    Args:
        target: The `.safetensors` file to write or replace.
        united: The LoRAs under common names.
        originals: The same under their own names.
        format: To write; the first LoRA's own when left out.
        metadata: Texts for the header, over those in which all LoRAs agree.
        compact: Leave no room in the header where that can be avoided.

    Raises:
        LoraFormatError: There is no such format.
        WriteError: On entering: the target cannot be written.
    """

    def __init__(
        self,
        target: Path,
        united: UnitedLoras,
        originals: Sequence[LoraFile],
        format: str | None,
        metadata: Mapping[str, str],
        *,
        compact: bool = False,
    ) -> None:
        self.format = format_named(format or originals[0].format)
        self._layout, self._blocks = united.layout, united.blocks
        self._own = _own_names(united, originals) if self.format.name == originals[0].format else None
        inherited = _agreed(originals)
        self.metadata = {**inherited, **metadata}
        self._writer: SameNamesWriter | LoraWriter
        if self._own is not None:
            source = replace(originals[0], metadata=inherited)
            self._writer = SameNamesWriter(
                target,
                source,
                metadata,
                layout=united.layout,
                names=list(self._own.values()),
                compact=compact,
            )
        else:
            self._writer = LoraWriter(
                target,
                format=self.format.name,
                layout=united.layout,
                metadata=metadata,
                inherited=inherited,
                expected=[name.removesuffix(_BIAS) for name in united.names],
                blocks=united.blocks,
            )

    def __enter__(self) -> "LoraOutput":
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def write(self, layer: str, factors: LoraFactors) -> None:
        """Write a layer's factors.

        Raises:
            LoraFormatError: The format has no name for the layer.
        """
        self._writer.write(layer if self._own is None else self._own[layer], factors)

    def write_change(self, layer: str, change: WeightChange) -> None:
        """Write a change that is more than plain factors, as it is.

        Raises:
            LoraFormatError: The format cannot hold it, or has no name for the layer.
        """
        self._writer.write_change(layer if self._own is None else self._own[layer], change)

    def storage(self, dtype: torch.dtype, layers: int, others: Mapping[str, int]) -> StorageCost:
        """What modules take in this file, never too little.

        Args:
            dtype: Of the factors.
            layers: How many may come.
            others: Bytes of each change that is no factors.
        """
        spare = 0 if self._own is not None else 3 * _SPARE * layers
        whole = sum(size + _PARTS * (len(name) + _ENTRY) for name, size in others.items())
        return StorageCost.of(
            dtype, self.metadata, other_bytes=_HEADER_FIELDS + spare + whole, names=self._keys
        )

    def _name_for(self, layer: str) -> str:
        if self._own is not None:
            return self._own[layer]
        return self.format.name_for(layer, self._layout, blocks=self._blocks)

    def _keys(self, layer: str) -> list[str]:
        ends = self.format.keys
        try:
            name = self._name_for(layer)
        except LoraFormatError:  # it is joined with others there: fewer names, none much longer
            name = layer
        return [f"{name}.{end}" for end in (ends.up, ends.down, ends.alpha) if end is not None]


def _own_names(united: UnitedLoras, originals: Sequence[LoraFile]) -> dict[str, str] | None:
    """The name of each layer in all files that have it; None where the files differ in format or in a name."""
    if len({lora.format for lora in originals}) > 1:
        return None
    names: dict[str, str] = {}
    for sources in united.sources:
        if len(set(sources.values())) < len(sources):
            return None  # a fused module was divided
        for layer, name in sources.items():
            if names.setdefault(layer, name) != name:
                return None
    return names


def _agreed(loras: Sequence[LoraFile]) -> dict[str, str]:
    """The header fields that all LoRAs have alike, as far as they are still true."""
    first, *others = (kept_metadata(dict(lora.metadata)) for lora in loras)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
