"""Bytes into an open file, on a disk that may be full."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from sigmascope.errors import WriteError
from sigmascope.records.os_errors import DISK_FULL

_COPY_BYTES = 8 * 2**20


def write_all(stream: BinaryIO, data: memoryview) -> None:
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


def require_space(path: Path, folder: Path, needed: int) -> None:
    """Refuse what the disk has no room for.

    Args:
        path: The target, for the message.
        folder: Where the bytes will lie.
        needed: How many.

    Raises:
        WriteError: Fewer bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _disk_full(path, needed, free)


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
        raise _disk_full(path, nbytes, shutil.disk_usage(path.resolve().parent).free) from error


def _disk_full(path: Path, needed: int, free: int) -> WriteError:
    return WriteError(
        path,
        f"the disk is full: {needed} more bytes are needed, {free} are free.",
        hint="Free some space or choose another disk.",
    )
