"""How a safetensors file is laid out: the order of its tensors and the bytes of its header."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sigmascope.checkpoints.dtypes import BITS

ALIGNMENT = 8
LENGTH_BYTES = 8
_ENTRY_BYTES = 160  # dtype, up to six sizes of seven digits, two offsets of fifteen


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


def estimated_header_bytes(names: Iterable[str], metadata: Mapping[str, str]) -> int:
    """Room that a header of these names will fit in, whatever the shapes are likely to be."""
    return len(encoded_header([], metadata)) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
