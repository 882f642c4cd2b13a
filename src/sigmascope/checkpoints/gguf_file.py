"""One GGUF file: its tensors under their own names, dequantised with the gguf package."""

import math
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.gguf_header import GgufEntry, GgufHeader, read_gguf_header
from sigmascope.checkpoints.paths import reading, shortened
from sigmascope.checkpoints.pread import read_exactly
from sigmascope.errors import CheckpointError

_ORIGINAL_SHAPE: Final = "comfy.gguf.orig_shape."
_PLAIN: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_BLOCKS_AT_ONCE: Final = 1 << 15  # of 32 to 256 numbers: a few tens of MiB of the package's working memory
_OTHER_FILE: Final = "Get a file in one of the common types (Q8_0, Q4_K, …) or in safetensors."


class GgufCheckpoint(Checkpoint):
    """A `.gguf` file. Quantised tensors are given in float32, the others in their own type.

    Shapes are in PyTorch's order; a tensor that was stored in another shape for the quantisation's sake has its
    own back, as ComfyUI-GGUF's files note it (`comfy.gguf.orig_shape.<key>`).
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self._gguf = _package(path)
        with reading(path):
            stream = path.open("rb")
            try:
                header = read_gguf_header(stream, path)
                self._kinds = {entry.name: _kind(self._gguf, path, entry) for entry in header.tensors}
                self._places = self._checked_places(header, path)
                infos = {entry.name: self._info(header, entry, path) for entry in header.tensors}
            except BaseException:
                stream.close()
                raise
        self._stream = stream
        metadata = {name: str(value) for name, value in header.fields.items() if not isinstance(value, list)}
        quantised = {
            name: f"GGUF {kind.name}" for name, kind in self._kinds.items() if kind.name not in _PLAIN
        }
        super().__init__(path, infos, metadata, {}, quantised)

    def _checked_places(self, header: GgufHeader, path: Path) -> dict[str, tuple[int, int]]:
        """First byte in the file and number of bytes of each tensor."""
        places: dict[str, tuple[int, int]] = {}
        position, previous = header.data_start, "the header"
        for entry in sorted(header.tensors, key=lambda entry: entry.offset):
            begin, name = header.data_start + entry.offset, shortened(entry.name)
            if begin < position:
                raise _damaged(path, f"tensor {name} overlaps {previous}.")
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[self._kinds[entry.name]]
            if entry.elements % block or (entry.shape and entry.shape[-1] % block):
                raise _damaged(path, f"tensor {name} of shape {entry.shape} is not whole blocks of {block}.")
            size = entry.elements // block * block_bytes
            if begin + size > header.file_bytes:
                message = (
                    f"is truncated: {name} ends at byte {begin + size}, the file has {header.file_bytes}."
                )
                raise _damaged(path, message)
            places[entry.name] = begin, size
            position, previous = begin + size, name
        return places

    def _info(self, header: GgufHeader, entry: GgufEntry, path: Path) -> TensorInfo:
        shape = header.fields.get(_ORIGINAL_SHAPE + entry.name, list(entry.shape))
        sizes = tuple(shape) if isinstance(shape, list) else ()
        integers = [size for size in sizes if isinstance(size, int)]
        if (
            len(integers) != len(sizes)
            or min(integers, default=0) < 0
            or math.prod(integers) != entry.elements
        ):
            raise _damaged(
                path, f"{shortened(entry.name)} of shape {entry.shape} cannot be of shape {shortened(shape)}."
            )
        dtype = _PLAIN.get(self._kinds[entry.name].name, torch.float32)
        return TensorInfo(entry.name, tuple(integers), dtype, entry.elements * dtype.itemsize)

    def _read(self, info: TensorInfo) -> Tensor:
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if self._stream.closed:
            raise self._closed()
        begin, size = self._places[info.name]
        tensor = buffer.view(info.dtype).reshape(info.shape)
        if info.name not in self.dequantised:
            read_exactly(self._stream, self.path, info.name, begin, buffer)
            return tensor
        raw = torch.empty(size, dtype=torch.uint8)
        read_exactly(self._stream, self.path, info.name, begin, raw)
        kind = self._kinds[info.name]
        _, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        numbers, blocks = tensor.view(-1), raw.numpy().reshape(-1, block_bytes)
        done = 0
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            # One row, as long as all blocks together: the package works on rows, few are faster than many.
            row = blocks[start : start + _BLOCKS_AT_ONCE].reshape(1, -1)
            part = torch.from_numpy(_dequantised(self._gguf, row, kind)).view(-1)
            numbers[done : done + part.numel()] = part
            done += part.numel()
        return tensor

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _package(path: Path) -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError as error:
        message = "is a GGUF file, and the gguf package is not installed."
        raise CheckpointError(
            path, message, hint='Install it with: pip install "sigmascope[gguf]"'
        ) from error
    return gguf


def _kind(gguf: ModuleType, path: Path, entry: GgufEntry) -> Any:
    """The element type as the package knows it, if it can turn it into numbers."""
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:
            _dequantised(gguf, np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        message = (
            f"tensor {shortened(entry.name)} is of the type {_name(gguf, entry.kind)}, which is not read."
        )
        raise CheckpointError(path, message, hint=_OTHER_FILE) from error
    return kind


def _name(gguf: ModuleType, kind: int) -> str:
    known: dict[int, str] = {member.value: member.name for member in gguf.GGMLQuantizationType}
    return known.get(kind, f"number {kind}")


def _dequantised(gguf: ModuleType, blocks: np.ndarray, kind: Any) -> np.ndarray:
    with np.errstate(all="ignore"):  # scales that are NaN or overflow: the numbers tell
        numbers: np.ndarray = gguf.quants.dequantize(blocks, kind)
    return numbers


def _damaged(path: Path, message: str) -> CheckpointError:
    return CheckpointError(path, message, hint="Download it again, or get another conversion.")
