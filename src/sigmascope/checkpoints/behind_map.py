"""Read what lies in a mapped file without touching the mapping.

Pages that are touched through a mapping count as the process's memory until the system takes them back, so
that copying a model out of a mapped file seems to take it twice, and a file that is cut short meanwhile kills
the process. Where the system tells which file an address belongs to (Linux), the bytes are read with `pread`
instead; elsewhere nothing is found, and the caller copies from the mapping.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from sigmascope.checkpoints.pread import read_exactly

_MAPS: Final = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Area:
    """Addresses `begin` to `end` hold a file's bytes from `offset` on."""

    begin: int
    end: int
    offset: int


class FileBehindMap:
    """An open file, some of whose bytes are mapped into memory.

    Args:
        path: The file; it is opened at once, and mapped by the caller afterwards.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("rb", buffering=0)
        self._areas: tuple[Area, ...] = ()

    def look(self) -> None:
        """Find where the file is mapped now. Only for as long as the caller keeps it so."""
        with suppress(OSError):
            # A file put in its place since it was opened is another one, whose bytes are not these.
            if os.path.samestat(os.fstat(self._stream.fileno()), self.path.stat()):
                with _MAPS.open("rb") as maps:
                    self._areas = tuple(areas_of(self.path, maps))

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the file a tensor's bytes begin; None if they do not lie there as the tensor has them."""
        if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        area = next((each for each in self._areas if each.begin <= begin and end <= each.end), None)
        return None if area is None else area.offset + begin - area.begin

    def read(self, name: str, offset: int, buffer: Tensor) -> None:
        """Fill a buffer of uint8 from a place in the file.

        Raises:
            CheckpointError: It ends before, or cannot be read.
        """
        read_exactly(self._stream, self.path, name, offset, buffer)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def areas_of(path: Path, maps: Iterable[bytes]) -> Iterator[Area]:
    """Find a file in the lines of `/proc/self/maps`; one that was deleted or replaced is not found."""
    name = os.fsencode(path.resolve()).replace(b"\n", rb"\012")
    for line in maps:
        fields = line.rstrip(b"\n").split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            begin, end = (int(address, 16) for address in fields[0].split(b"-"))
            yield Area(begin, end, int(fields[2], 16))
