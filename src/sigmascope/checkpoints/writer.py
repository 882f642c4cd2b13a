"""Write safetensors one tensor at a time, whole or not at all.

The header comes first in the file but is known last, so room is left for it and what stays of it is
filled with spaces, which the format allows. A header that does not fit, or that would leave much room,
makes the data move once.

Every tensor lies at a multiple of its element size: one whose size is no multiple of 8 bytes (a scalar,
an odd bias) waits and comes last, by falling element size.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch import Tensor

from sigmascope.checkpoints.bytes import iter_tensor_bytes
from sigmascope.checkpoints.disk_writes import (
    copy_bytes,
    move_bytes,
    require_space,
    telling_full_disk,
    write_all,
)
from sigmascope.checkpoints.dtypes import to_file
from sigmascope.checkpoints.format_limits import check_encodable, checked_metadata, storable_entry
from sigmascope.checkpoints.layout import (
    LENGTH_BYTES,
    FileEntry,
    aligned_order,
    encoded_header,
    estimated_header_bytes,
    padded,
)
from sigmascope.checkpoints.paths import shortened
from sigmascope.errors import WriteError
from sigmascope.records.atomic import atomic_path

_DEFAULT_HEADER_BYTES = 256 * 1024
_WAITING_IN_MEMORY = 16 * 2**20
PADDING_SHARE = 64
"""Room in the header above 1/64 of the data is not left standing."""


class StreamingWriter:
    """Write a safetensors file with one tensor in memory at a time.

        with StreamingWriter("out.safetensors", metadata={"format": "pt"}) as writer:
            for name in names:
                writer.write(name, compute(name))

    Leaving the block without an exception flushes the file to the disk and renames it over the target.
    With one (Ctrl-C too) the temporary file goes and the target stays as it was. The same tensors in
    the same order give the same bytes.

    Args:
        path: The target.
        metadata: Texts for the header.
        expected: Names of the tensors to come, if known: their header room is reserved.
        header_bytes: Header room to reserve, in place of an estimate.
        data_bytes: Bytes of all tensors together, if known: the disk is checked for them first.

    Raises:
        WriteError: The metadata is not valid text to text; on entering, the target cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        expected: Iterable[str] | None = None,
        header_bytes: int | None = None,
        *,
        data_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._metadata = checked_metadata(self.path, metadata or {})
        if header_bytes is None:
            header_bytes = _DEFAULT_HEADER_BYTES
            if expected is not None:
                header_bytes = estimated_header_bytes(expected, self._metadata)
        self._room = padded(LENGTH_BYTES + header_bytes)
        self._data_bytes = data_bytes
        self._names: set[str] = set()
        self._placed: list[FileEntry] = []
        self._placed_bytes = 0
        self._waiting: dict[FileEntry, int] = {}
        self._waiting_bytes = 0

    def __enter__(self) -> "StreamingWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            require_space(self.path, temporary.parent, self._room + (self._data_bytes or 0))
            self._file = stack.enter_context(temporary.open("r+b", buffering=0))
            self._spool = stack.enter_context(
                tempfile.SpooledTemporaryFile(max_size=_WAITING_IN_MEMORY, dir=str(temporary.parent))
            )
            self._stack = stack.pop_all()
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor; its memory may be freed afterwards.

        Args:
            name: Its key, not used before.
            tensor: Any strides and device.

        Raises:
            WriteError: The name was used already or is not valid text, the format has no such type, or the disk is full.
        """
        if name in self._names:
            raise WriteError(self.path, f"the tensor {shortened(name)} is written twice.")
        entry = storable_entry(self.path, name, tensor)
        if entry.keeps_alignment:
            self._append(tensor, entry.nbytes)
            self._placed.append(entry)
            self._placed_bytes += entry.nbytes
        else:
            with telling_full_disk(self.path, entry.nbytes):
                self._spool.seek(self._waiting_bytes)
                for piece in iter_tensor_bytes(tensor):
                    self._spool.write(piece)
            self._waiting[entry] = self._waiting_bytes
            self._waiting_bytes += entry.nbytes
        self._names.add(name)

    def update_metadata(self, metadata: Mapping[str, str]) -> None:
        """Set texts of the header that were not known at the start, such as sums over all tensors.

        Raises:
            WriteError: The metadata is not valid text to text.
        """
        self._metadata |= checked_metadata(self.path, metadata)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            self._place_waiting()
            self._write_header()

    def _append(self, tensor: Tensor, nbytes: int) -> None:
        with telling_full_disk(self.path, nbytes):
            self._file.seek(self._room + self._placed_bytes)
            for piece in iter_tensor_bytes(tensor):
                write_all(self._file, piece)

    def _place_waiting(self) -> None:
        for entry in aligned_order(self._waiting):
            with telling_full_disk(self.path, entry.nbytes):
                self._spool.seek(self._waiting[entry])
                self._file.seek(self._room + self._placed_bytes)
                copy_bytes(self._spool, self._file, entry.nbytes)
            self._placed.append(entry)
            self._placed_bytes += entry.nbytes

    def _write_header(self) -> None:
        header = encoded_header(self._placed, self._metadata)
        needed = padded(LENGTH_BYTES + len(header))
        fits = needed <= self._room and self._room - needed <= self._placed_bytes // PADDING_SHARE
        start = self._room if fits else needed
        with telling_full_disk(self.path, max(0, start - self._room)):
            move_bytes(self._file, self._room, start, self._placed_bytes)
            self._file.truncate(start + self._placed_bytes)
            self._file.seek(0)
            length = start - LENGTH_BYTES
            write_all(self._file, memoryview(length.to_bytes(LENGTH_BYTES, "little") + header.ljust(length)))


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors that are in memory as a safetensors file, whole or not at all.

    Args:
        path: The target.
        tensors: By key; any strides and devices; tensors that share memory are written each.
        metadata: Texts for the header.

    Raises:
        WriteError: The target cannot be written, the disk is too small, or a tensor has no type that
            the format knows.
    """
    texts = checked_metadata(Path(path), metadata or {})
    for name in tensors:
        check_encodable(Path(path), "the tensor", name)
    named = [(name, to_file(tensor.dtype, tuple(tensor.shape))) for name, tensor in tensors.items()]
    entries = aligned_order(FileEntry(name, *known) for name, known in named if known is not None)
    header_bytes = len(encoded_header(entries, texts))
    data_bytes = sum(entry.nbytes for entry in entries)
    with StreamingWriter(path, texts, header_bytes=header_bytes, data_bytes=data_bytes) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
