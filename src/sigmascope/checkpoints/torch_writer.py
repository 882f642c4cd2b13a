"""Write PyTorch's own files (`.ckpt`, `.pt`): at once, or with one tensor in memory at a time.

`torch.save` needs the whole state dict in memory. Its file is an uncompressed zip with a pickle that describes the
tensors (`data.pkl`) and a member for the bytes of each (`data/0`, `data/1`, …). `StreamingTorchWriter` knows names, types
and shapes beforehand, so it writes the description first and the bytes as they come.
"""

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    iter_tensor_bytes,
    shortened,
)
from sigmascope.errors import WriteError
from sigmascope.files import atomic_path, reason_of, writing_hint
from sigmascope.units import counted

# The archive that `StreamingTorchWriter` writes.
_ALIGNMENT: Final = 64  # torch.save's own: a mapped file can then be computed with as it lies
LOCAL_HEADER_BYTES: Final = 30
_ZIP64_BYTES: Final = 20
_FIELD_HEADER_BYTES: Final = 4
_PADDING_ID: Final = b"FB"
STORAGES: Final = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The types that such a file can hold."""
_PROTOCOL: Final = 2  # the one that `weights_only=True` reads


def save_torch(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` with `torch.save`: to a temporary file, flushed, renamed over the target.

    Args:
        path: The target (`.ckpt`, `.pt`).
        state: Tensors, numbers, texts and containers of them, so that `weights_only=True` reads it.

    Raises:
        WriteError: The target cannot be written; it is as it was before.
    """
    with atomic_path(path) as temporary, temporary.open("r+b") as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError as error:
            # After a refused write PyTorch finds its archive unfinished, and hides the reason behind that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor that is still to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


class StreamingTorchWriter:
    """Write a state dict as `torch.save` would, with one tensor in memory at a time.

        with StreamingTorchWriter("out.ckpt", specs) as writer:
            for name in specs:
                writer.write(name, compute(name))

    The file is a dictionary of contiguous tensors, bare or under the name `wrapper`; `torch.load` reads it with
    `weights_only=True` and with `mmap=True`. Leaving the block without an exception flushes it to
    the disk and renames it over the target; with one (Ctrl-C too) the temporary file is removed and the target stays as
    it was. The same tensors give the same bytes.

    Args:
        path: The target.
        specs: What will be written, in the order that the dictionary shall have.
        wrapper: The key of an outer dictionary that holds only this one, such as "state_dict"; None for no outer one.

    Raises:
        WriteError: A type that such a file cannot hold; on entering, the target cannot be written; on leaving,
            tensors are missing.
    """

    def __init__(
        self, path: str | os.PathLike[str], specs: Mapping[str, TensorSpec], wrapper: str | None = None
    ) -> None:
        self.path = Path(path)
        self._wrapper = wrapper
        self._numbers = {name: number for number, name in enumerate(specs)}
        self._specs = dict(specs)
        for name, spec in specs.items():
            if spec.dtype not in STORAGES:
                raise WriteError(
                    self.path,
                    f"the tensor {shortened(name)} is of {spec.dtype}, which this writer does not support.",
                    hint="Convert it to a common type, or write .safetensors.",
                )

    def __enter__(self) -> "StreamingTorchWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            self._file = stack.enter_context(temporary.open("r+b"))
            self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
            stack.callback(_close_unfinished, self._archive)
            self._put("data.pkl", description(self._specs, self._wrapper))
            self._put("byteorder", sys.byteorder.encode())
            self._stack = stack.pop_all()
        self._left = set(self._specs)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the bytes of one tensor; its memory may be freed afterwards.

        Args:
            name: One of the names in `specs`, not written before; in any order.
            tensor: Of the type and shape in `specs`; any strides and device.

        Raises:
            WriteError: The tensor does not match `specs`, or the disk refused it.
        """
        if name not in self._left:
            raise WriteError(
                self.path,
                f"the tensor {shortened(name)} was not in the list of tensors to write, or is written twice.",
            )
        spec = self._specs[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            message = (
                f"the tensor {shortened(name)} is {tensor.dtype} {list(tensor.shape)}, "
                f"but the list says {spec.dtype} {list(spec.shape)}."
            )
            raise WriteError(self.path, message)
        try:
            with self._archive.open(self._member(f"data/{self._numbers[name]}", spec.nbytes), "w") as stream:
                for piece in iter_tensor_bytes(tensor):
                    stream.write(piece)
        except OSError as error:
            message = f"cannot be written ({reason_of(error)})."
            raise WriteError(self.path, message, hint=writing_hint(error)) from error
        self._left.remove(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if self._left:
                message = f"{counted(len(self._left), 'tensor was', 'tensors were')} not written, first {shortened(min(self._left))}."
                raise WriteError(self.path, message)
            self._put("version", b"3\n")
            self._archive.close()
            self._file.flush()

    def _put(self, name: str, content: bytes) -> None:
        with self._archive.open(self._member(name, len(content)), "w") as stream:
            stream.write(content)

    def _member(self, name: str, nbytes: int) -> zipfile.ZipInfo:
        """The next member, padded such that its bytes begin aligned; without a date, so that files are equal."""
        member = zipfile.ZipInfo(f"archive/{name}")
        member.file_size = nbytes
        is_large = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # zipfile's own rule for the long header
        begin = self._file.tell() + LOCAL_HEADER_BYTES + len(member.filename) + _FIELD_HEADER_BYTES
        padding = -(begin + (_ZIP64_BYTES if is_large else 0)) % _ALIGNMENT
        member.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return member


def _close_unfinished(archive: zipfile.ZipFile) -> None:
    """Close an archive; what that says of one that is not finished is about a file that goes anyway."""
    with suppress(OSError, ValueError):
        archive.close()


def description(specs: Mapping[str, TensorSpec], wrapper: str | None = None) -> bytes:
    """The content of `data.pkl`: a dictionary of contiguous tensors on the CPU, the bytes of the n-th in `data/n`.

    Args:
        specs: By name, in the order that the dictionary shall have; of the types in `STORAGES`.
        wrapper: The key of an outer dictionary; None for no outer one.
    """
    stream = io.BytesIO()
    state = {
        name: _TensorToCome(_StorageToCome(str(number), spec))
        for number, (name, spec) in enumerate(specs.items())
    }
    _Describer(stream, protocol=_PROTOCOL).dump(state if wrapper is None else {wrapper: state})
    return stream.getvalue()


@dataclass(frozen=True)
class _StorageToCome:
    key: str
    spec: TensorSpec


@dataclass(frozen=True)
class _TensorToCome:
    storage: _StorageToCome


class _Describer(pickle.Pickler):
    """Pickle tensors that are still to come exactly as PyTorch pickles tensors that are there."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageToCome):
            return None
        return ("storage", STORAGES[value.spec.dtype], value.key, "cpu", value.spec.numel)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _TensorToCome):
            return NotImplemented
        shape = value.storage.spec.shape
        rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor_v2
        return rebuild, (
            value.storage,
            0,
            shape,
            torch.empty(shape, device="meta").stride(),
            False,
            OrderedDict(),
        )
