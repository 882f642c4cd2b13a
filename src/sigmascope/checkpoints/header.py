"""The header of a safetensors file, read and checked before anything else is believed.

A file is: 8 bytes little-endian header length, that many bytes of JSON (which may end in spaces), then
the tensors' bytes. The JSON gives each tensor's element type, shape and byte range; the ranges must
cover the data exactly, without overlap or hole (format description of the safetensors project).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sigmascope.checkpoints.dtypes import BITS
from sigmascope.checkpoints.paths import reading, shortened
from sigmascope.checkpoints.sniff import HEAD_BYTES, foreign_file_error, sniff
from sigmascope.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63 - 1
_DAMAGED = "The file is damaged: download it again or make it anew."


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

    Never allocates more than the file's own size, whatever the header claims.

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
    content = _parse(raw, path)
    metadata = _checked_metadata(content.pop("__metadata__", {}), path)
    entries = [_checked_entry(name, value, path) for name, value in content.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    data_start = _LENGTH_BYTES + length
    _check_cover(entries, path, file_bytes - data_start)
    return SafetensorsHeader(path, {entry.name: entry for entry in entries}, metadata, data_start, file_bytes)


def _fail(path: Path, message: str, hint: str = _DAMAGED) -> NoReturn:
    raise CheckpointError(path, message, hint=hint)


def _header_length(stream: BinaryIO, path: Path, file_bytes: int) -> int:
    head = stream.read(HEAD_BYTES)
    if not head:
        _fail(path, "is empty.", "Download it again or make it anew.")
    error = foreign_file_error(path, sniff(head), "a safetensors file")
    if error is not None:
        raise error
    if len(head) < _LENGTH_BYTES + 2:
        _fail(path, f"is not a safetensors file: it has only {len(head)} bytes.")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        _fail(path, "is not a safetensors file: no JSON header where one must begin.")
    if length > MAX_HEADER_BYTES:
        _fail(path, f"claims a header of {length} bytes; {MAX_HEADER_BYTES} is the limit.")
    if _LENGTH_BYTES + length > file_bytes:
        _fail(
            path,
            f"is truncated: the header alone takes {_LENGTH_BYTES + length} bytes, the file has {file_bytes}.",
            "Download it again.",
        )
    stream.seek(_LENGTH_BYTES)
    return length


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                _fail(path, f"the header names {shortened(name)} twice.")
            found[name] = value
        return found

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
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


def _checked_entry(name: str, value: object, path: Path) -> TensorEntry:
    where = f"tensor {shortened(name)}:"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{where} the header must give exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _fail(
            path,
            f"{where} unknown dtype {shortened(dtype)}.",
            f"Known are {', '.join(BITS)}. Convert the file, or update Sigmascope.",
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or _overflows(shape):
        _fail(path, f"{where} the shape {shortened(shape)} is not a list of sizes.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"{where} data_offsets {shortened(offsets)} are not a begin and an end.")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits != (end - begin) * 8:
        takes = shortened(-(-bits // 8))
        _fail(
            path,
            f"{where} {dtype} of shape {shortened(shape)} takes {takes} bytes, its range has {end - begin}.",
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def _overflows(shape: list[int]) -> bool:
    """Whether sizes are too large for PyTorch, which multiplies them beside a 0 too."""
    return 0 in shape and math.prod(size for size in shape if size) > _MAX_SIZE


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
