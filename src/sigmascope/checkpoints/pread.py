"""Read bytes from a place in an open file into memory that is there already."""

import os
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from sigmascope.checkpoints.paths import shortened
from sigmascope.errors import CheckpointError

_MOST_AT_ONCE = 2**30  # Linux reads less than 2 GiB per call


def read_exactly(stream: BinaryIO, path: Path, name: str, begin: int, buffer: Tensor) -> None:
    """Fill a buffer from a place in a file; threads may do so at once.

    Args:
        stream: The open file, unbuffered.
        path: Its path, for messages.
        name: What is read, for messages.
        begin: Where it begins in the file.
        buffer: One axis of uint8 on the CPU.

    Raises:
        CheckpointError: The file ends before the buffer is full, or cannot be read.
    """
    view, done = buffer.numpy().data, 0
    try:
        while done < len(view):
            count = _read_at(stream, view[done : done + _MOST_AT_ONCE], begin + done)
            if count == 0:
                raise CheckpointError(
                    path,
                    f"ends inside {shortened(name)}: it was cut short while it was open.",
                    hint="Make sure that nothing writes to it, and start again.",
                )
            done += count
    except OSError as error:
        message = f"{shortened(name)} cannot be read ({error.strerror or error})."
        raise CheckpointError(path, message, hint="Check the disk.") from error


def _read_at(stream: BinaryIO, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset` on; gives the number of bytes read, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(stream.fileno(), [into], offset)
    with open(stream.name, "rb", buffering=0) as own:  # noqa: PTH123 - Windows has no pread: a place of its own
        own.seek(offset)
        return own.readinto(into)
