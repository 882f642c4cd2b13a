"""GGUF files: their tensors under their own names, dequantised with the gguf package.

The header is read here because the gguf package trusts the counts in it, even those of a damaged file. The layout is
that of the ggml project's description of the format, versions 2 and 3, little-endian: texts and numbers, then each
tensor's name, sizes, type and place.
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    Checkpoint,
    TensorInfo,
    read_exactly,
    reading,
    shortened,
)
from sigmascope.checkpoints.rounding import Recoded, Rounding, Storage, Sums, recoded_rows
from sigmascope.errors import CheckpointError
from sigmascope.installation import install_extra

_ORIGINAL_SHAPE: Final = "comfy.gguf.orig_shape."
_PLAIN_TYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}

_BLOCK: Final = 32
"""Numbers in a block of the types that are written: Q4_0 to Q8_0 and MXFP4."""
_BLOCKS_PER_CALL: Final = 1 << 15  # of 32 to 256 numbers: a few tens of MiB of the package's working memory
_STORED_HINT: Final = "It stores Q8_0, Q5_1, Q5_0, Q4_1, Q4_0 and MXFP4."
_OTHER_FILE_HINT: Final = "Get a file in one of the common types (Q8_0, Q4_K, …) or in safetensors."

Value = str | int | float | bool | Sequence[object]
"""Of a field; the objects are values again."""

# The header's layout: numbers of types, and what no sound file exceeds.
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_ALIGNMENT_KEY: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 8
_MAX_ARRAY_DEPTH: Final = 4
_MAX_ELEMENTS: Final = 2**63 - 1
_MAX_TENSORS: Final = 1 << 16
_MAX_VALUES: Final = 1_000_000  # in all fields except plain numbers: vocabularies have 300,000 texts
_MAX_KEPT_ITEMS: Final = 64  # of an array: shapes are, vocabularies are not looked at


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """What a header says of one tensor.

    Attributes:
        name: Its key.
        shape: Sizes in PyTorch's order; the file has them reversed.
        kind: The number of its element type.
        offset: First byte, counted from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A header as read; places are checked once the types' sizes are known.

    Attributes:
        fields: By name.
        tensors: In the header's order.
        data_start: Where the data begins.
        file_bytes: Size of the file.
        version: Of the format.
        alignment: Of the data of each tensor.
        spans: First byte of each field in the file, and the byte behind its last.
    """

    fields: Mapping[str, Value]
    tensors: tuple[GgufEntry, ...]
    data_start: int
    file_bytes: int
    version: int
    alignment: int
    spans: Mapping[str, tuple[int, int]]


class GgufCheckpoint(Checkpoint):
    """A `.gguf` file. Quantised tensors are given in float32, the others in their own type.

    Shapes are in PyTorch's order. If a tensor was reshaped to be quantised, its original shape is restored from the
    note that ComfyUI-GGUF leaves (`comfy.gguf.orig_shape.<key>`).

    Args:
        path: The file.
        keep_unread: Keep tensors of types that cannot be read, or all if the package is not installed, with their names
            and shapes; reading one is an error then.
    """

    format = "gguf"

    def __init__(self, path: Path, *, keep_unread: bool = False) -> None:
        self._gguf: ModuleType | None = None
        self._unread: dict[str, CheckpointError] = {}
        with reading(path):
            stream = path.open("rb")
            try:
                header = self.header = read_gguf_header(stream, path)
                self._kinds = self._types(header, path, keep_unread)
                self._places = self._checked_places(header, path)
                infos = {entry.name: self._info(header, entry, path) for entry in header.tensors}
            except BaseException:
                stream.close()
                raise
        self._stream = stream
        metadata = {name: str(value) for name, value in header.fields.items() if not isinstance(value, list)}
        quantised = {
            name: f"GGUF {kind.name}" for name, kind in self._kinds.items() if kind.name not in _PLAIN_TYPES
        } | dict.fromkeys(self._unread, "GGUF")
        super().__init__(path, infos, metadata, {}, quantised)

    @property
    def _package(self) -> ModuleType:
        return self._gguf or _gguf_package(self.path)

    def _types(self, header: GgufHeader, path: Path, keep_unread: bool) -> dict[str, Any]:
        """The element type of each tensor that can be read."""
        kinds: dict[str, Any] = {}
        for entry in header.tensors:
            try:
                self._gguf = self._gguf or _gguf_package(path)
                kinds[entry.name] = _type_of(self._gguf, path, entry)
            except CheckpointError as error:
                if not keep_unread:
                    raise
                self._unread[entry.name] = error
        return kinds

    def _checked_places(self, header: GgufHeader, path: Path) -> dict[str, tuple[int, int]]:
        """First byte in the file and number of bytes of each tensor."""
        places: dict[str, tuple[int, int]] = {}
        position, previous = header.data_start, "the header"
        for entry in sorted(header.tensors, key=lambda entry: entry.offset):
            begin, name = header.data_start + entry.offset, shortened(entry.name)
            if entry.name in self._unread:  # how many bytes it has is not known
                continue
            if begin < position:
                raise _damaged(path, f"tensor {name} overlaps {previous}.")
            block, block_bytes = self._package.GGML_QUANT_SIZES[self._kinds[entry.name]]
            if entry.elements % block or (entry.shape and entry.shape[-1] % block):
                raise _damaged(
                    path, f"tensor {name} of shape {entry.shape} does not divide into blocks of {block}."
                )
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
                path,
                f"{shortened(entry.name)} of shape {entry.shape} does not hold shape {shortened(shape)}.",
            )
        kind = self._kinds.get(entry.name)
        dtype = torch.float32 if kind is None else _PLAIN_TYPES.get(kind.name, torch.float32)
        return TensorInfo(entry.name, tuple(integers), dtype, entry.elements * dtype.itemsize)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if self._stream.closed:
            raise self._closed()
        if info.name in self._unread:
            raise self._unread[info.name]
        begin, size = self._places[info.name]
        tensor = buffer.view(info.dtype).reshape(info.shape)
        if info.name not in self.dequantised:
            read_exactly(self._stream, self.path, info.name, begin, buffer)
            return tensor
        raw = torch.empty(size, dtype=torch.uint8)
        read_exactly(self._stream, self.path, info.name, begin, raw)
        kind = self._kinds[info.name]
        _, block_bytes = self._package.GGML_QUANT_SIZES[kind]
        numbers, blocks = tensor.view(-1), raw.numpy().reshape(-1, block_bytes)
        done = 0
        for start in range(0, len(blocks), _BLOCKS_PER_CALL):
            # One row, as long as all blocks together: the package works on rows, few are faster than many.
            row = blocks[start : start + _BLOCKS_PER_CALL].reshape(1, -1)
            part = torch.from_numpy(_dequantised(self._package, row, kind)).view(-1)
            numbers[done : done + part.numel()] = part
            done += part.numel()
        return tensor

    def rounding(self, key: str) -> Rounding:
        """See `Checkpoint.rounding`. The package quantises Q4_0 to Q8_0, not the K-quants."""
        if key in self._unread:
            raise self._unread[key]
        if key not in self.dequantised:
            return super().rounding(key)
        kind = self._kinds[key]
        block, block_bytes = self._package.GGML_QUANT_SIZES[kind]
        try:
            self._package.quants.quantize(np.zeros((1, block), dtype=np.float32), kind)
        except NotImplementedError as error:
            message = f"numbers cannot be stored as {kind.name}: the gguf package only reads it."
            raise CheckpointError(self.path, message, hint=_STORED_HINT) from error

        def again(_: Tensor, rows: Tensor) -> Tensor:
            codes = self._package.quants.quantize(rows.numpy().reshape(-1, block), kind)
            numbers = _dequantised(self._package, codes.reshape(-1, block_bytes), kind)
            return torch.from_numpy(numbers).reshape(rows.shape)

        return Rounding(self.dequantised[key], again)

    @property
    def as_stored(self) -> Checkpoint:
        """Each tensor as its bytes in the file."""
        return _GgufBytes(self)

    def kind_of(self, key: str) -> Any:
        """The gguf package's element type of a tensor.

        Raises:
            CheckpointError: It is not known.
        """
        if key in self._unread:
            raise self._unread[key]
        return self._kinds[self.info(key).name]

    def place_of(self, key: str) -> tuple[int, int]:
        """First byte in the file and number of bytes of a tensor."""
        self.kind_of(key)
        return self._places[key]

    def new_kind_of(self, key: str) -> Any:
        """The element type for new numbers of a tensor: Q8_0 in place of those that the package only reads."""
        kind = self.kind_of(key)
        return kind if self._is_written(kind) else type(kind)["Q8_0"]

    def _is_written(self, kind: Any) -> bool:
        block, _ = self._package.GGML_QUANT_SIZES[kind]
        if kind.name in _PLAIN_TYPES:
            return True
        if block != _BLOCK:
            return False
        try:
            self._package.quants.quantize(np.zeros((1, block), dtype=np.float32), kind)
        except NotImplementedError:
            return False
        return True

    def storage(self, key: str) -> Storage:
        """See `Checkpoint.storage`."""
        kind = self.new_kind_of(key)
        block, block_bytes = self._package.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(self.info(key).shape) // block * block_bytes
        return Storage(f"GGUF {kind.name}", (key,), nbytes - self._places[key][1])

    def recoded(self, key: str, sums: Sums) -> Recoded:
        """See `Checkpoint.recoded`. Blocks of 32 numbers end with the last of any 128 rows."""
        kind, shape = self.new_kind_of(key), self.info(key).shape
        block, block_bytes = self._package.GGML_QUANT_SIZES[kind]
        rows = shape[0]
        columns = math.prod(shape[1:])
        codes = np.empty((rows * columns // block, block_bytes), dtype=np.uint8)

        def blocks(some: slice) -> np.ndarray:
            return codes[some.start * columns // block : some.stop * columns // block]

        def numbers(some: slice) -> Tensor:
            read = _dequantised(self._package, blocks(some), kind)
            return torch.from_numpy(read).reshape(-1, columns)

        for some in recoded_rows(rows, columns):
            values = sums(some).numpy().reshape(-1, block)
            with np.errstate(all="ignore"):  # scales that overflow: the numbers that are read tell
                blocks(some)[:] = self._package.quants.quantize(values, kind).reshape(-1, block_bytes)
        return Recoded({key: torch.from_numpy(codes).view(-1)}, numbers)

    def read_bytes(self, key: str, buffer: Tensor) -> Tensor:
        """Read a tensor as it is stored."""
        if self._stream.closed:
            raise self._closed()
        read_exactly(self._stream, self.path, key, self._places[key][0], buffer)
        return buffer

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class _GgufBytes(Checkpoint):
    """The tensors of an open GGUF file as bytes."""

    format = "gguf"

    def __init__(self, source: GgufCheckpoint) -> None:
        self._source = source
        sizes = {key: source.place_of(key)[1] for key in source}
        infos = {key: TensorInfo(key, (size,), torch.uint8, size) for key, size in sizes.items()}
        super().__init__(source.path, infos, source.metadata, source.skipped)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return self._source.read_bytes(info.name, buffer)

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def _gguf_package(path: Path) -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError as error:
        message = "is a GGUF file, and the gguf package is not installed."
        raise CheckpointError(path, message, hint=f"Install it with: {install_extra('gguf')}") from error
    return gguf


def _type_of(gguf: ModuleType, path: Path, entry: GgufEntry) -> Any:
    """The element type as the package knows it, if it can turn it into numbers."""
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN_TYPES:
            _dequantised(gguf, np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        message = f"tensor {shortened(entry.name)} has the type {_type_name(gguf, entry.kind)}, which Sigmascope cannot read."
        raise CheckpointError(path, message, hint=_OTHER_FILE_HINT) from error
    return kind


def _dequantised(gguf: ModuleType, blocks: np.ndarray, kind: Any) -> np.ndarray:
    with np.errstate(all="ignore"):  # scales that are NaN or overflow: the numbers tell
        numbers: np.ndarray = gguf.quants.dequantize(blocks, kind)
    return numbers


def _type_name(gguf: ModuleType, kind: int) -> str:
    known: dict[int, str] = {member.value: member.name for member in gguf.GGMLQuantizationType}
    return known.get(kind, f"number {kind}")


def _damaged(path: Path, message: str) -> CheckpointError:
    return CheckpointError(path, message, hint="Download it again, or get another conversion.")


def read_gguf_header(stream: BinaryIO, path: Path) -> GgufHeader:
    """Read the header of an open GGUF file, in time and memory bounded by the file's size.

    Raises:
        CheckpointError: It is not a GGUF file, has another version or byte order, is cut short, or contradicts itself.
    """
    file_bytes = os.fstat(stream.fileno()).st_size
    reader = _HeaderReader(path, stream, file_bytes)
    if reader.take(4, "its mark") != _MAGIC:
        reader.fail("is not a GGUF file: it does not begin with GGUF.")
    version = reader.number("I", "version")
    if version not in _VERSIONS:
        order = " (big-endian)" if version & 0xFFFF == 0 else ""
        reader.fail(
            f"is GGUF of version {version}{order}; only versions 2 and 3, little-endian, can be read."
        )
    tensor_count, field_count = reader.number("Q", "count"), reader.number("Q", "count")
    fields = reader.fields(field_count)
    tensors = reader.tensors(tensor_count)
    alignment = fields.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"has the alignment {shortened(alignment)}, which is not a power of two.")
    start = -(-reader.position // alignment) * alignment
    return GgufHeader(fields, tensors, start, file_bytes, version, alignment, reader.spans)


@dataclass
class _HeaderReader:
    """Takes values from the stream one after the other; never more than the file has."""

    path: Path
    stream: BinaryIO
    file_bytes: int
    position: int = 0
    values: int = 0
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(self.path, message, hint="Download it again, or get another conversion.")

    def skip(self, size: int, what: str) -> None:
        self._require(size, what)
        self.position += size
        self.stream.seek(self.position)

    def _require(self, size: int, what: str) -> None:
        if size > self.file_bytes - self.position:
            self.fail(
                f"is truncated or damaged: {what} takes {size} bytes, {self.file_bytes - self.position} are left."
            )

    def take(self, size: int, what: str) -> bytes:
        self._require(size, what)
        self.position += size
        taken = self.stream.read(size)
        if len(taken) != size:
            self.fail(f"ends inside {what}: it was cut short while it was read.")
        return taken

    def number(self, code: str, what: str) -> int:
        return int(self._scalar(code, what))

    def text(self, what: str) -> str:
        raw = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"is damaged: {what} is not valid text ({error.reason}).")

    def fields(self, count: int) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for _ in range(count):
            begin = self.position
            name = self.text("the name of a field")
            if name in values:
                self.fail(f"has the field {shortened(name)} twice.")
            values[name] = self._value(self.number("I", "a field's type"), f"the field {shortened(name)}", 0)
            self.spans[name] = begin, self.position
        return values

    def tensors(self, count: int) -> tuple[GgufEntry, ...]:
        if count > _MAX_TENSORS:
            self.fail(f"declares {count:,} tensors; the limit is {_MAX_TENSORS:,}.")
        entries: dict[str, GgufEntry] = {}
        for _ in range(count):
            name = self.text("the name of a tensor")
            if name in entries:
                self.fail(f"has the tensor {shortened(name)} twice.")
            dimensions = self.number("I", "a tensor's number of sizes")
            if dimensions > _MAX_DIMENSIONS:
                self.fail(f"tensor {shortened(name)}: {dimensions} sizes are too many.")
            sizes = [self.number("Q", "a tensor's sizes") for _ in range(dimensions)]
            if math.prod(size for size in sizes if size) > _MAX_ELEMENTS:
                self.fail(f"tensor {shortened(name)}: the sizes {shortened(sizes)} are too large.")
            kind, offset = self.number("I", "a tensor's type"), self.number("Q", "a tensor's place")
            entries[name] = GgufEntry(name, tuple(reversed(sizes)), kind, offset)
        return tuple(entries.values())

    def _scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]
        return value

    def _value(self, kind: int, what: str, depth: int) -> Value:
        self.values += 1
        if self.values > _MAX_VALUES:
            self.fail(f"has more than {_MAX_VALUES:,} texts and numbers in its fields.")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            self.fail(f"is damaged or too new: {what} is of the unknown type {kind}.")
        inner, count = self.number("I", what), self.number("Q", what)
        if inner in _SCALARS:
            code = _SCALARS[inner]
            size = count * struct.calcsize(f"<{code}")
            if count > _MAX_KEPT_ITEMS:
                self.skip(size, what)
                return []
            return list(struct.unpack(f"<{count}{code}", self.take(size, what)))
        if self.values + count > _MAX_VALUES:
            self.fail(f"{what} has {count:,} texts; the limit is {_MAX_VALUES:,}.")
        kept = [self._value(inner, what, depth + 1) for _ in range(min(count, _MAX_KEPT_ITEMS))]
        for _ in range(count - len(kept)):
            self._value(inner, what, depth + 1)
        return kept
