"""Read and write safetensors files, one tensor in memory at a time.

A file is 8 bytes of little-endian header length, that many bytes of JSON (which may end in spaces), then the tensors'
bytes. The JSON gives each tensor's element type, shape and byte range; the ranges must cover the data exactly, without
overlap or hole (format description of the safetensors project). The header is checked before anything else is read. Its
codes for element types are the format's own. The size of every type is known here, so that a header can be checked and
listed even if the installed PyTorch lacks a type.

Tensors are read with `pread` into memory of their own and not mapped. So a file that is cut short or replaced while it
is open gives an error where a mapping would kill the process, memory holds one tensor, threads may read at once, and
the tensor is aligned whatever its offset.

When a file is written, the header comes first but is known last. So room is reserved for it, and the rest of the room
is filled with spaces, which the format allows. If the header does not fit, or would leave much room unused, the data
is moved once. Every tensor starts at a multiple of its element size. Tensors whose size is not a multiple of 8 bytes
(a scalar, an odd bias) are written last, largest element size first.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    HEAD_BYTES,
    LEFT_OUT_REASON,
    Checkpoint,
    TensorInfo,
    foreign_file_error,
    is_left_out,
    iter_tensor_bytes,
    read_exactly,
    reading,
    shortened,
    sniff,
)
from sigmascope.errors import CheckpointError, WriteError
from sigmascope.files import DISK_FULL, atomic_path, free_bytes, parse_json

_MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""
LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64
_MAX_INT64 = 2**63 - 1
_DAMAGED_HINT = "The file is damaged: download it again or make it anew."

# Element types by the format's codes.
_BITS_AND_TORCH_NAME = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, "float4_e2m1fn_x2"),
}
BITS: dict[str, int] = {code: bits for code, (bits, _) in _BITS_AND_TORCH_NAME.items()}
"""Bits of one element, by safetensors code."""
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, (_, name) in _BITS_AND_TORCH_NAME.items()
    if name is not None and hasattr(torch, name)
}
"""PyTorch's type, by safetensors code, as far as the installed version has it."""
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}
"""Safetensors code, by PyTorch's type."""
_ELEMENTS_PER_TORCH_ELEMENT = {"F4": 2}  # elements that PyTorch keeps in one of its own

# How files are written.
_DEFAULT_HEADER_BYTES = 256 * 1024
_SPOOL_MEMORY_BYTES = 16 * 2**20
_MOST_BYTES_KEPT = 2 * 2**20
_MIN_DATA_TO_PADDING = 64
"""Unused room in the header may be at most 1/64 of the data; otherwise the data is moved."""
ALIGNMENT = 8
_ENTRY_BYTES = 160  # dtype, up to six sizes of seven digits, two offsets of fifteen
_COPY_BYTES = 8 * 2**20
_MOST_BYTES_OF_A_RUN = 16 * 2**20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a header says of one tensor. `begin` and `end` count bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header; `tensors` are in the order of their bytes in the file."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int

    @property
    def parameters(self) -> int:
        """Elements of all tensors together."""
        return sum(math.prod(entry.shape) for entry in self.tensors.values())


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of a safetensors file, without its tensors.

    Never allocates more than a few times the file's own size, whatever the header claims.

    Args:
        path: One `.safetensors` file.

    Returns:
        Names, element types, shapes, byte ranges and metadata.

    Raises:
        CheckpointError: The file cannot be read, is something else, is truncated or contradicts itself.
    """
    file = Path(path)
    with reading(file), file.open("rb") as stream:
        return read_header_from(stream, file)


def read_header_from(stream: BinaryIO, path: Path) -> SafetensorsHeader:
    """Read and check the header of an open file; see `read_header`."""
    file_bytes = os.fstat(stream.fileno()).st_size
    length = _header_length(stream, path, file_bytes)
    raw = stream.read(length)
    if len(raw) != length:
        _fail(path, f"the header has {length} bytes, only {len(raw)} could be read.")
    known = next((one for given, one in _LAST if given == raw), None)
    if known is not None and (known.path, known.file_bytes) == (path, file_bytes):
        return replace(known, tensors={**known.tensors}, metadata={**known.metadata})
    content = _parse(raw, path)
    metadata = _checked_metadata(content.pop("__metadata__", {}), path)
    entries = [_checked_entry(name, value, path) for name, value in content.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    data_start = LENGTH_BYTES + length
    _check_cover(entries, path, file_bytes - data_start)
    named = {entry.name: entry for entry in entries}
    _LAST[:] = []
    if length <= _MOST_BYTES_KEPT:
        _LAST.append((raw, SafetensorsHeader(path, {**named}, {**metadata}, data_start, file_bytes)))
    return SafetensorsHeader(path, named, metadata, data_start, file_bytes)


_LAST: list[tuple[bytes, SafetensorsHeader]] = []
"""What was read last and what it says: whoever watches a LoRA reads its file before it is applied and again after that."""


def _header_length(stream: BinaryIO, path: Path, file_bytes: int) -> int:
    head = stream.read(HEAD_BYTES)
    if not head:
        _fail(path, "is empty.", "Download it again or make it again.")
    error = foreign_file_error(path, sniff(head), "a safetensors file")
    if error is not None:
        raise error
    if len(head) < LENGTH_BYTES + 2:
        _fail(path, f"is not a safetensors file: it has only {len(head)} bytes.")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if head[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        _fail(path, "is not a safetensors file: no JSON header where one must begin.")
    if length > _MAX_HEADER_BYTES:
        _fail(path, f"claims a header of {length} bytes; the limit is {_MAX_HEADER_BYTES}.")
    if LENGTH_BYTES + length > file_bytes:
        _fail(
            path,
            f"is truncated: the header alone takes {LENGTH_BYTES + length} bytes, the file has {file_bytes}.",
            "Download it again.",
        )
    stream.seek(LENGTH_BYTES)
    return length


def _fail(path: Path, message: str, hint: str = _DAMAGED_HINT) -> NoReturn:
    raise CheckpointError(path, message, hint=hint)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                _fail(path, f"the header names {shortened(name)} twice.")
            found[name] = value
        return found

    try:
        content = parse_json(raw.decode("utf-8"), object_pairs_hook=unique, strict=True)
    except ValueError as error:
        _fail(path, f"the header is not valid JSON ({error}).")
    if not isinstance(content, dict):
        _fail(path, "the header is not a JSON object.")
    return content


def _checked_metadata(value: object, path: Path) -> dict[str, str]:
    if not isinstance(value, dict):
        _fail(path, "the header's __metadata__ is not an object.")
    for key, text in value.items():
        if not isinstance(text, str):
            _fail(path, f"the metadata {shortened(key)} is not a text but {shortened(text)}.")
    return value


_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


def _fail_at(path: Path, tensor: str, message: str, hint: str = _DAMAGED_HINT) -> NoReturn:
    _fail(path, f"tensor {shortened(tensor)}: {message}", hint)


def _checked_entry(name: str, value: object, path: Path) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        _fail_at(path, name, "the header must give exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _fail_at(
            path,
            name,
            f"unknown dtype {shortened(dtype)}.",
            f"Known are {', '.join(BITS)}. Convert the file, or update Sigmascope.",
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or _overflows(shape):
        _fail_at(path, name, f"the shape {shortened(shape)} is not a list of sizes.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail_at(path, name, f"data_offsets {shortened(offsets)} are not a begin and an end.")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits != (end - begin) * 8:
        takes = shortened(-(-bits // 8))
        _fail_at(
            path,
            name,
            f"{dtype} of shape {shortened(shape)} takes {takes} bytes, its range has {end - begin}.",
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_INT64 for item in value)


def _overflows(shape: list[int]) -> bool:
    """Whether sizes are too large for PyTorch, which multiplies them even if one of them is 0."""
    return 0 in shape and math.prod(size for size in shape if size) > _MAX_INT64


def _check_cover(entries: Iterable[TensorEntry], path: Path, data_bytes: int) -> None:
    """The ranges, sorted, must follow each other from 0 to the end of the file."""
    position, previous = 0, "the header"
    for entry in entries:
        name = shortened(entry.name)
        if entry.begin < position:
            _fail(path, f"tensor {name} overlaps {previous}: it begins at {entry.begin}, before {position}.")
        if entry.begin > position:
            _fail(path, f"{entry.begin - position} bytes between {previous} and {name} belong to no tensor.")
        position, previous = entry.end, name
    if position > data_bytes:
        _fail(
            path,
            f"is truncated: the header promises {position} bytes of tensors, the file has {data_bytes}.",
            "Download it again.",
        )
    if position < data_bytes:
        _fail(path, f"has {data_bytes - position} bytes after the last tensor that the header does not name.")


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

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Read several tensors; those of one type that lie side by side in the file are read at once."""
        infos = {key: self.info(key) for key in keys}
        entries = sorted((self.header.tensors[key] for key in infos), key=lambda entry: entry.begin)
        found: dict[str, Tensor] = {}
        for run in _runs(entries):
            dtype, nbytes = infos[run[0].name].dtype, run[-1].end - run[0].begin
            if len(run) == 1 or self._stream.closed:
                found[run[0].name] = self.tensor(run[0].name)
                continue
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            read_exactly(self._stream, self.path, run[0].name, self.header.data_start + run[0].begin, buffer)
            sizes = [entry.nbytes // dtype.itemsize for entry in run]
            for entry, part in zip(run, torch.split(buffer.view(dtype), sizes), strict=True):
                found[entry.name] = part.view(infos[entry.name].shape)
        return {key: found[key] for key in infos}

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


def _runs(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Those of one type that follow each other without a gap, together, as far as memory for them is no matter."""
    run: list[TensorEntry] = []
    for entry in entries:
        is_next = run and entry.begin == run[-1].end and entry.dtype == run[0].dtype
        if run and not (is_next and entry.end - run[0].begin <= _MOST_BYTES_OF_A_RUN):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


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


def save_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    private: bool = False,
) -> None:
    """Write tensors that are in memory as a safetensors file, whole or not at all.

    Args:
        path: The target.
        tensors: By key; any strides and devices; tensors that share memory are written each.
        metadata: Texts for the header.
        private: As in `sigmascope.files.atomic_path`.

    Attributes:
        look_at: Called with the whole file before it takes the target's place; what it raises leaves the target as it was.

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
    with StreamingWriter(
        path, texts, header_bytes=header_bytes, data_bytes=data_bytes, private=private
    ) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def checked_metadata(path: Path, metadata: Mapping[Any, Any]) -> dict[str, str]:
    """A copy of header metadata, whose names and values must be strings.

    Raises:
        WriteError: They are not, or UTF-8 cannot encode them.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            message = f"the metadata {key!r}: {value!r} is not a pair of strings."
            raise WriteError(
                path, message, hint="Metadata values must be strings: encode other values with json.dumps."
            )
        for text in (key, value):
            check_encodable(path, "the metadata", text)
    return dict(metadata)


def check_encodable(path: Path, what: str, text: str) -> None:
    """Refuse what UTF-8 cannot hold, such as a file name that the system could not decode.

    Raises:
        WriteError: With `what` and the text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{what} {shortened(text)} cannot be written as UTF-8."
        raise WriteError(path, message, hint="Rename it; header texts must be valid Unicode.") from error


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One tensor as the header names it; where it lies follows from the order."""

    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * BITS[self.code] // 8

    @property
    def keeps_alignment(self) -> bool:
        """Whether what follows this tensor is aligned for every element type."""
        return self.nbytes % ALIGNMENT == 0


def aligned_order(entries: Iterable[FileEntry]) -> list[FileEntry]:
    """Put tensors of odd sizes last, by falling element size, so that all are aligned; else as given."""
    return sorted(entries, key=lambda entry: (0, 0) if entry.keeps_alignment else (1, -BITS[entry.code]))


def encoded_header(entries: Iterable[FileEntry], metadata: Mapping[str, str]) -> bytes:
    """The header's JSON for tensors that follow each other in the order given, not yet padded."""
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        content[entry.name] = {
            "dtype": entry.code,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


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
        private: As in `sigmascope.files.atomic_path`.

    Attributes:
        file_bytes: Of the whole file, once the block is left.

    Raises:
        WriteError: The metadata is not valid text to text; on entering, the target cannot be written.
    """

    file_bytes = 0

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        expected: Iterable[str] | None = None,
        header_bytes: int | None = None,
        *,
        data_bytes: int | None = None,
        private: bool = False,
    ) -> None:
        self.path = Path(path)
        self.look_at: Callable[[Path], None] | None = None
        self._private = private
        self._metadata = checked_metadata(self.path, metadata or {})
        if header_bytes is None:
            header_bytes = _DEFAULT_HEADER_BYTES
            if expected is not None:
                header_bytes = estimated_header_bytes(expected, self._metadata)
        self._room = padded(LENGTH_BYTES + header_bytes)
        self._data_bytes = data_bytes
        self._written: dict[str, tuple[FileEntry, int]] = {}  # and where it begins in its stream
        self._placed: list[FileEntry] = []
        self._placed_bytes = 0
        self._waiting: dict[FileEntry, int] = {}
        self._waiting_bytes = 0

    def __enter__(self) -> "StreamingWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path, private=self._private))
            require_space(self.path, temporary.parent, self._room + (self._data_bytes or 0))
            self._temporary = temporary
            self._file = stack.enter_context(temporary.open("r+b", buffering=0))
            self._spool = stack.enter_context(
                tempfile.SpooledTemporaryFile(max_size=_SPOOL_MEMORY_BYTES, dir=str(temporary.parent))
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
        if name in self._written:
            raise WriteError(self.path, f"the tensor {shortened(name)} is written twice.")
        entry = storable_entry(self.path, name, tensor)
        if entry.keeps_alignment:
            self._written[name] = entry, self._room + self._placed_bytes
            with telling_full_disk(self.path, entry.nbytes):
                self._file.seek(self._room + self._placed_bytes)
                for piece in iter_tensor_bytes(tensor):
                    write_all(self._file, piece)
            self._placed.append(entry)
            self._placed_bytes += entry.nbytes
        else:
            with telling_full_disk(self.path, entry.nbytes):
                self._spool.seek(self._waiting_bytes)
                for piece in iter_tensor_bytes(tensor):
                    self._spool.write(piece)
            self._waiting[entry] = self._waiting_bytes
            self._written[name] = entry, self._waiting_bytes
            self._waiting_bytes += entry.nbytes

    def rewrite(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Put another value in the place of a tensor that is written already.

        Args:
            name: Its key.
            change: Gives the new value for the old one, of the same type and shape.
        """
        entry, begin = self._written[name]
        stream: IO[bytes] = self._spool if entry in self._waiting else self._file
        known = to_torch(entry.code, entry.shape)
        assert known is not None
        stream.seek(begin)
        old = torch.frombuffer(bytearray(stream.read(entry.nbytes)), dtype=known[0]).reshape(known[1])
        stream.seek(begin)
        for piece in iter_tensor_bytes(change(old).to(known[0])):
            write_all(stream, piece)

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
            if self.look_at is not None:
                self.look_at(self._temporary)

    def _place_waiting(self) -> None:
        for entry in aligned_order(self._waiting):
            with telling_full_disk(self.path, entry.nbytes):
                self._spool.seek(self._waiting[entry])
                self._file.seek(self._room + self._placed_bytes)
                copy_bytes(self._spool, self._file, entry.nbytes)
            self._placed.append(entry)
            self._placed_bytes += entry.nbytes

    def _header(self) -> tuple[bytes, int]:
        """The header, and where the data begins after it."""
        header = encoded_header(self._placed, self._metadata)
        needed = padded(LENGTH_BYTES + len(header))
        fits = needed <= self._room and self._room - needed <= self._placed_bytes // _MIN_DATA_TO_PADDING
        return header, self._room if fits else needed

    def _write_header(self) -> None:
        header, start = self._header()
        self.file_bytes = start + self._placed_bytes
        with telling_full_disk(self.path, max(0, start - self._room)):
            move_bytes(self._file, self._room, start, self._placed_bytes)
            self._file.truncate(self.file_bytes)
            self._file.seek(0)
            length = start - LENGTH_BYTES
            write_all(self._file, memoryview(length.to_bytes(LENGTH_BYTES, "little") + header.ljust(length)))


class SizeWriter(StreamingWriter):
    """Has the interface of `StreamingWriter` but only counts `file_bytes`; nothing is written."""

    def __enter__(self) -> "SizeWriter":
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Count one tensor; see `StreamingWriter.write`."""
        self._placed.append(storable_entry(self.path, name, tensor))

    def rewrite(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Another value is of the same size."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._placed = aligned_order(self._placed)
        self._placed_bytes = sum(entry.nbytes for entry in self._placed)
        self.file_bytes = self._header()[1] + self._placed_bytes


def estimated_header_bytes(names: Iterable[str], metadata: Mapping[str, str]) -> int:
    """How many bytes to reserve for a header with these names; enough for usual shapes."""
    return len(encoded_header([], metadata)) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def require_space(path: Path, folder: Path, needed: int) -> None:
    """Refuse what the disk has no room for.

    Args:
        path: The target, for the message.
        folder: Where the bytes will lie.
        needed: How many.

    Raises:
        WriteError: Fewer bytes are free.
    """
    free = free_bytes(folder)
    if free is not None and needed > free:
        raise _disk_full(path, needed, free)


def _disk_full(path: Path, needed: int, free: int | None) -> WriteError:
    there = "" if free is None else f", {free} are free"
    return WriteError(
        path,
        f"the disk is full: {needed} more bytes are needed{there}.",
        hint="Free some space or choose another disk.",
    )


def storable_entry(path: Path, name: str, tensor: Tensor) -> FileEntry:
    """What the header will say of a tensor.

    Raises:
        WriteError: The format reserves the name or cannot encode it, or has no such type of tensor.
    """
    if name == "__metadata__":
        raise WriteError(
            path, "no tensor can be named __metadata__: the safetensors format reserves that name."
        )
    check_encodable(path, "the tensor", name)
    known = to_file(tensor.dtype, tuple(tensor.shape))
    if known is None or tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        message = f"safetensors cannot hold the tensor {shortened(name)} ({kind})."
        raise WriteError(path, message, hint="Convert it to a dense tensor of a common type.")
    return FileEntry(name, *known)


@contextmanager
def telling_full_disk(path: Path, nbytes: int) -> Iterator[None]:
    """Turn a full disk into an error that says how much is missing.

    Args:
        path: The target.
        nbytes: What is written in the block.

    Raises:
        WriteError: The disk was full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _disk_full(path, nbytes, free_bytes(path.resolve().parent)) from error


def write_all(stream: IO[bytes], data: memoryview) -> None:
    """Write all of `data`: an unbuffered write may take only a part."""
    while data:
        data = data[stream.write(data) :]


def copy_bytes(source: IO[bytes], target: BinaryIO, nbytes: int) -> None:
    """Write the next `nbytes` of one file into another."""
    while nbytes > 0:
        piece = source.read(min(nbytes, _COPY_BYTES))
        write_all(target, memoryview(piece))
        nbytes -= len(piece)


def move_bytes(stream: BinaryIO, begin: int, to: int, nbytes: int) -> None:
    """Move `nbytes` inside a file; the piece that would be overwritten next goes first."""
    if begin == to:
        return
    offsets = range(0, nbytes, _COPY_BYTES)
    for offset in reversed(offsets) if to > begin else offsets:
        stream.seek(begin + offset)
        piece = stream.read(min(_COPY_BYTES, nbytes - offset))
        stream.seek(to + offset)
        write_all(stream, memoryview(piece))


def to_torch(code: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """PyTorch's type and shape of a tensor in a file; None when this PyTorch has no such type."""
    dtype = TORCH_DTYPES.get(code)
    packed = _ELEMENTS_PER_TORCH_ELEMENT.get(code, 1)
    if dtype is None or packed == 1:
        return None if dtype is None else (dtype, shape)
    if not shape or shape[-1] % packed:
        return None
    return dtype, (*shape[:-1], shape[-1] // packed)


def to_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Code and shape with which a file names a tensor; None when the format has no such type."""
    code = CODES.get(dtype)
    packed = 1 if code is None else _ELEMENTS_PER_TORCH_ELEMENT.get(code, 1)
    if code is None or (packed > 1 and not shape):
        return None
    return code, shape if packed == 1 else (*shape[:-1], shape[-1] * packed)
