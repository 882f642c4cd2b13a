"""The header of a GGUF file: texts and numbers, then each tensor's name, sizes, type and place.

Read here and not by the gguf package, which follows the counts of a damaged file for as long as they say.
Layout: the format's description in the ggml project, versions 2 and 3, little-endian.
"""

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

from sigmascope.checkpoints.paths import shortened
from sigmascope.errors import CheckpointError

Value = str | int | float | bool | Sequence[object]
"""Of a field; the objects are values again."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_ALIGNMENT_KEY: Final = "general.alignment"
_DEFAULT_ALIGNMENT: Final = 32
_MOST_DIMENSIONS: Final = 8
_MOST_NESTED: Final = 4
_MOST_ELEMENTS: Final = 2**63 - 1


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
    """A header as read; places are checked once the types' sizes are known."""

    fields: Mapping[str, Value]
    tensors: tuple[GgufEntry, ...]
    data_start: int
    file_bytes: int


def read_gguf_header(stream: BinaryIO, path: Path) -> GgufHeader:
    """Read the header of an open GGUF file, in time and memory bounded by the file's size.

    Raises:
        CheckpointError: It is no GGUF file, of another version or byte order, cut short, or contradicts itself.
    """
    file_bytes = os.fstat(stream.fileno()).st_size
    reader = _Reader(path, stream, file_bytes)
    if reader.take(4, "its mark") != _MAGIC:
        reader.fail("is not a GGUF file: it does not begin with GGUF.")
    version = reader.number("I", "version")
    if version not in _VERSIONS:
        order = " (big-endian)" if version & 0xFFFF == 0 else ""
        reader.fail(f"is GGUF of version {version}{order}; known are 2 and 3, little-endian.")
    tensor_count, field_count = reader.number("Q", "count"), reader.number("Q", "count")
    fields = reader.fields(field_count)
    tensors = reader.tensors(tensor_count)
    alignment = fields.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"has the alignment {shortened(alignment)}, which is no power of two.")
    return GgufHeader(fields, tensors, -(-reader.position // alignment) * alignment, file_bytes)


@dataclass
class _Reader:
    """Takes values from the stream one after the other; never more than the file has."""

    path: Path
    stream: BinaryIO
    file_bytes: int
    position: int = 0

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(self.path, message, hint="Download it again, or get another conversion.")

    def take(self, size: int, what: str) -> bytes:
        if size > self.file_bytes - self.position:
            self.fail(
                f"is truncated or damaged: {what} takes {size} bytes, {self.file_bytes - self.position} are left."
            )
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
            self.fail(f"is damaged: {what} is no text ({error.reason}).")

    def fields(self, count: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(count):
            name = self.text("the name of a field")
            if name in found:
                self.fail(f"has the field {shortened(name)} twice.")
            found[name] = self._value(self.number("I", "a field's type"), f"the field {shortened(name)}", 0)
        return found

    def tensors(self, count: int) -> tuple[GgufEntry, ...]:
        found: dict[str, GgufEntry] = {}
        for _ in range(count):
            name = self.text("the name of a tensor")
            if name in found:
                self.fail(f"has the tensor {shortened(name)} twice.")
            dimensions = self.number("I", "a tensor's number of sizes")
            if dimensions > _MOST_DIMENSIONS:
                self.fail(f"tensor {shortened(name)}: {dimensions} sizes are too many.")
            sizes = [self.number("Q", "a tensor's sizes") for _ in range(dimensions)]
            if math.prod(size for size in sizes if size) > _MOST_ELEMENTS:
                self.fail(f"tensor {shortened(name)}: the sizes {shortened(sizes)} are too large.")
            kind, offset = self.number("I", "a tensor's type"), self.number("Q", "a tensor's place")
            found[name] = GgufEntry(name, tuple(reversed(sizes)), kind, offset)
        return tuple(found.values())

    def _scalar(self, code: str, what: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]
        return value

    def _value(self, kind: int, what: str, depth: int) -> Value:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth == _MOST_NESTED:
            self.fail(f"is damaged or too new: {what} is of the unknown type {kind}.")
        inner, count = self.number("I", what), self.number("Q", what)
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return list(
                struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"), what))
            )
        return [self._value(inner, what, depth + 1) for _ in range(count)]
