"""A checkpoint under other names, such as those of the model that it is compared with."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo


class RenamedCheckpoint(Checkpoint):
    """An open checkpoint some of whose keys go by another name. It owns the other: closing closes both.

    Args:
        source: The opened checkpoint.
        names: The new name of each key that gets one. No two keys may end up with the same one.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str]) -> None:
        self.format = source.format
        self._source = source
        self._original = {names.get(key, key): key for key in source}
        if len(self._original) != len(source):
            raise ValueError("two keys would have one name")
        infos = {name: replace(source.info(key), name=name) for name, key in self._original.items()}
        dequantised = {names.get(key, key): how for key, how in source.dequantised.items()}
        super().__init__(source.path, infos, source.metadata, source.skipped, dequantised)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from."""
        return self._source.files

    def _read(self, info: TensorInfo) -> Tensor:
        return self._source.tensor(self._original[info.name])

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return self._source.tensor_into(self._original[info.name], buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        return self._source.pieces(self._original[info.name], buffer)

    def close(self) -> None:
        """Close the checkpoint behind it."""
        self._source.close()
