"""Write PyTorch's own format one tensor at a time, whole or not at all.

`torch.save` wants the whole state dict in memory. Its file is a zip, not compressed, with a pickle that
describes the tensors (`data.pkl`) and a member for the bytes of each (`data/0`, `data/1`, ...); so with names,
types and shapes known beforehand the description can be written first and the bytes as they come.
"""

import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from torch import Tensor

from sigmascope.checkpoints.bytes import iter_tensor_bytes
from sigmascope.checkpoints.paths import shortened
from sigmascope.checkpoints.torch_description import STORAGES, TensorSpec, description
from sigmascope.errors import WriteError
from sigmascope.records.atomic import atomic_path
from sigmascope.records.os_errors import reason_of, writing_hint

_ALIGNMENT: Final = 64  # torch.save's own: a mapped file can then be computed with as it lies
_LOCAL_HEADER_BYTES: Final = 30
_ZIP64_BYTES: Final = 20
_FIELD_HEADER_BYTES: Final = 4
_PADDING_ID: Final = b"FB"


class StreamingTorchWriter:
    """Write a state dict as `torch.save` would, with one tensor in memory at a time.

        with StreamingTorchWriter("out.ckpt", specs) as writer:
            for name in specs:
                writer.write(name, compute(name))

    The file is a bare dictionary of contiguous tensors; `torch.load` reads it with `weights_only=True` and with
    `mmap=True`. Leaving the block without an exception flushes it to the disk and renames it over the target;
    with one (Ctrl-C too) the temporary file goes and the target stays as it was. The same tensors give the same
    bytes.

    Args:
        path: The target.
        specs: What will be written, in the order that the dictionary shall have.

    Raises:
        WriteError: A type that such a file cannot hold; on entering, the target cannot be written; on leaving,
            tensors are missing.
    """

    def __init__(self, path: str | os.PathLike[str], specs: Mapping[str, TensorSpec]) -> None:
        self.path = Path(path)
        self._numbers = {name: number for number, name in enumerate(specs)}
        self._specs = dict(specs)
        for name, spec in specs.items():
            if spec.dtype not in STORAGES:
                raise WriteError(
                    self.path,
                    f"the tensor {shortened(name)} is of {spec.dtype}, which is not written here.",
                    hint="Convert it to a common type, or write .safetensors.",
                )

    def __enter__(self) -> "StreamingTorchWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            self._file = stack.enter_context(temporary.open("r+b"))
            self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
            stack.push(_abandon(self._archive))
            self._put("data.pkl", description(self._specs))
            self._put("byteorder", sys.byteorder.encode())
            self._stack = stack.pop_all()
        self._left = set(self._specs)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the bytes of one tensor; its memory may be freed afterwards.

        Args:
            name: One of the specs', not written before; in any order.
            tensor: Of the type and shape announced; any strides and device.

        Raises:
            WriteError: The tensor is not as announced, or the disk refused it.
        """
        if name not in self._left:
            raise WriteError(
                self.path, f"the tensor {shortened(name)} was not announced, or is written twice."
            )
        spec = self._specs[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            message = (
                f"the tensor {shortened(name)} is {tensor.dtype} {list(tensor.shape)}, "
                f"announced was {spec.dtype} {list(spec.shape)}."
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
                message = f"{len(self._left)} tensors were not written, first {shortened(min(self._left))}."
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
        begin = self._file.tell() + _LOCAL_HEADER_BYTES + len(member.filename) + _FIELD_HEADER_BYTES
        padding = -(begin + (_ZIP64_BYTES if is_large else 0)) % _ALIGNMENT
        member.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return member


def _abandon(archive: zipfile.ZipFile) -> Callable[..., None]:
    """Close an archive that will not be finished: what that says is about a file that goes anyway."""

    def close(*_: object) -> None:
        with suppress(OSError, ValueError):
            archive.close()

    return close
