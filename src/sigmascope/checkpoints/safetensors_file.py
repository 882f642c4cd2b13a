"""One safetensors file, read tensor by tensor.

The bytes are read with `pread` into memory of the tensor's own, and not mapped: a file that is cut short
or replaced while it is open then gives an error where a mapping would kill the process, memory holds one
tensor, threads may read at once, and the tensor is aligned whatever the offset.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import LEFT_OUT_REASON, Checkpoint, TensorInfo, is_left_out
from sigmascope.checkpoints.dtypes import to_torch
from sigmascope.checkpoints.header import SafetensorsHeader, read_header_from
from sigmascope.checkpoints.paths import reading
from sigmascope.checkpoints.pread import read_exactly


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
        read_exactly(self._stream, self.path, info.name, begin, buffer)
        return buffer.view(info.dtype).reshape(info.shape)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        if self._stream.closed:
            raise self._closed()
        begin = self.header.data_start + self.header.tensors[info.name].begin
        most = buffer.numel() // info.dtype.itemsize * info.dtype.itemsize
        for done in range(0, info.nbytes, most):
            part = buffer[: min(most, info.nbytes - done)]
            read_exactly(self._stream, self.path, info.name, begin + done, part)
            yield part.view(info.dtype)

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
