"""One safetensors file, read tensor by tensor.

The bytes are read with `pread` into memory of the tensor's own, and not mapped: a file that is cut short
or replaced while it is open then gives an error where a mapping would kill the process, memory holds one
tensor, threads may read at once, and the tensor is aligned whatever the offset.
"""

import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import LEFT_OUT_REASON, Checkpoint, TensorInfo, is_left_out
from sigmascope.checkpoints.dtypes import to_torch
from sigmascope.checkpoints.header import SafetensorsHeader, read_header_from, shortened
from sigmascope.checkpoints.paths import reading
from sigmascope.errors import CheckpointError

_MOST_AT_ONCE = 2**30  # Linux reads less than 2 GiB per call


class SafetensorsCheckpoint(Checkpoint):
    """One `.safetensors` file; `header` is what its header says."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        with reading(path):
            stream = path.open("rb", buffering=0)
            try:
                self.header = read_header_from(stream, path)
                infos, skipped = _torch_view(self.header)
            except BaseException:
                stream.close()
                raise
        self._stream = stream
        super().__init__(path, infos, self.header.metadata, skipped)

    def _read(self, info: TensorInfo) -> Tensor:
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if self._stream.closed:
            raise self._closed()
        begin = self.header.data_start + self.header.tensors[info.name].begin
        view = buffer.numpy().data
        try:
            done = 0
            while done < info.nbytes:
                count = _read_at(self._stream, view[done : done + _MOST_AT_ONCE], begin + done)
                if count == 0:
                    raise CheckpointError(
                        self.path,
                        f"ends inside {shortened(info.name)}: it was cut short while it was open.",
                        hint="Make sure that nothing writes to it, and start again.",
                    )
                done += count
        except OSError as error:
            message = f"{shortened(info.name)} cannot be read ({error.strerror or error})."
            raise CheckpointError(self.path, message, hint="Check the disk.") from error
        return buffer.view(info.dtype).reshape(info.shape)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _torch_view(header: SafetensorsHeader) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    infos: dict[str, TensorInfo] = {}
    skipped: dict[str, str] = {}
    for name, entry in header.tensors.items():
        if is_left_out(name):
            skipped[name] = LEFT_OUT_REASON
            continue
        known = to_torch(entry.dtype, entry.shape)
        if known is None:
            skipped[name] = f"is of type {entry.dtype}, which PyTorch {torch.__version__} cannot hold"
            continue
        infos[name] = TensorInfo(name, known[1], known[0], entry.nbytes)
    return infos, skipped


def _read_at(stream: BinaryIO, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset` on; gives the number of bytes read, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(stream.fileno(), [into], offset)
    with open(stream.name, "rb", buffering=0) as own:  # noqa: PTH123 - Windows has no pread: a place of its own
        own.seek(offset)
        return own.readinto(into)
