"""Weights spread over several files, with an index that says which key is where."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.paths import is_regular_file, reading, shortened
from sigmascope.checkpoints.safetensors_file import SafetensorsCheckpoint
from sigmascope.errors import CheckpointError

_MAX_SHARD_INDEX_BYTES = 100_000_000
_INCOMPLETE = "Download the folder again, all of it."


class ShardedCheckpoint(Checkpoint):
    """A `*.safetensors.index.json` and the files that it names, all checked when it is opened."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        index = _read_shard_index(path)
        weight_map = _checked_weight_map(index, path)
        self._shards: dict[str, SafetensorsCheckpoint] = {}
        try:
            for name in dict.fromkeys(weight_map.values()):
                self._shards[name] = _open_shard(path, name)
            infos, skipped = self._collect(weight_map, path)
        except BaseException:
            self.close()
            raise
        self._weight_map = weight_map
        super().__init__(path, infos, _merged_metadata(index, self._shards), skipped)

    def _collect(
        self, weight_map: Mapping[str, str], path: Path
    ) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        infos: dict[str, TensorInfo] = {}
        skipped: dict[str, str] = {}
        for key, name in weight_map.items():
            shard = self._shards[name]
            if key in shard:
                infos[key] = shard.info(key)
            elif key in shard.skipped:
                skipped[key] = shard.skipped[key]
            else:
                message = f"lists {shortened(key)} in {name}, which does not have it."
                raise CheckpointError(path, message, hint=_INCOMPLETE)
        for name, shard in self._shards.items():
            for key in shard:
                if weight_map.get(key) != name and key not in infos:
                    skipped[key] = f"is in {name} but not in the index"
        return infos, skipped

    def _read(self, info: TensorInfo) -> Tensor:
        return self._shards[self._weight_map[info.name]].tensor(info.name)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return self._shards[self._weight_map[info.name]].tensor_into(info.name, buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        return self._shards[self._weight_map[info.name]].pieces(info.name, buffer)

    @property
    def files(self) -> tuple[Path, ...]:
        """The index, then its shards."""
        return (self.path, *(shard.path for shard in self._shards.values()))

    def close(self) -> None:
        """Close every shard."""
        for shard in self._shards.values():
            shard.close()


def _read_shard_index(path: Path) -> dict[str, Any]:
    with reading(path):
        size = path.stat().st_size
        if size > _MAX_SHARD_INDEX_BYTES:
            message = f"is too large for an index ({size} bytes)."
            raise CheckpointError(path, message, hint="Download it again.")
        content = path.read_bytes()
    try:
        index = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON ({error}).", hint="Download it again.") from error
    if not isinstance(index, dict):
        raise CheckpointError(path, "is not a JSON object with a weight_map.", hint="Download it again.")
    return index


def _checked_weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map.", hint="Name the index of a sharded checkpoint.")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name):
            raise CheckpointError(
                path,
                f"puts {shortened(key)} in {shortened(name)}, which is no file of this folder.",
                hint="An index may only name files beside it. Do not use this one unless you know its maker.",
            )
    return weight_map


def is_plain_name(name: str) -> bool:
    """A bare file name on every system: no folder, drive, parent or NUL."""
    special = name in {"", ".", ".."} or "\0" in name
    return not special and PurePosixPath(name).name == name and PureWindowsPath(name).name == name


def _open_shard(index: Path, name: str) -> SafetensorsCheckpoint:
    shard = index.parent / name
    if not is_regular_file(shard):
        raise CheckpointError(index, f"names the shard {name}, which is not there.", hint=_INCOMPLETE)
    return SafetensorsCheckpoint(shard)


def _merged_metadata(index: dict[str, Any], shards: Mapping[str, SafetensorsCheckpoint]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for shard in shards.values():
        merged.update(shard.metadata)
    own = index.get("metadata")
    if isinstance(own, dict):
        merged.update(
            {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
        )
    return merged
