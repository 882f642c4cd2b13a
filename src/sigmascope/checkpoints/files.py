"""Look at the paths of weight files, tell what a file is, and read bytes of it.

Whatever the system refuses becomes a `CheckpointError` that names the path: `Path.exists` and its like raise a bare
OSError where a folder may not be entered or a name is too long. `sniff` tells a file's kind by its first bytes and not
by its name. `read_exactly` fills memory that is there already from any place in an open file, and `iter_tensor_bytes`
gives a tensor's bytes piece by piece, so that a strided or GPU tensor is never copied whole.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from sigmascope.errors import CheckpointError
from sigmascope.files import reading_hint, reason_of

FileKind = Literal["safetensors", "zip", "pickle", "lfs-pointer", "html", "gguf", "hdf5", "text", "unknown"]

HEAD_BYTES = 512
"""What `sniff` wants of a file's beginning."""
_KIND_PREFIXES: tuple[tuple[bytes, FileKind], ...] = (
    (b"version https://git-lfs.github.com/spec/", "lfs-pointer"),
    (b"PK\x03\x04", "zip"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x03", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x80\x05", "pickle"),
    (b"GGUF", "gguf"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
)
_DOWNLOAD = "Download the file itself again"
_KIND_WORDS: dict[FileKind, tuple[str, str]] = {
    "zip": ("it is a zip archive, as torch.save writes", "If it is a PyTorch checkpoint, name it .ckpt."),
    "pickle": ("it is a pickle, as old versions of torch.save write", "If you trust it, name it .ckpt."),
    "lfs-pointer": (
        "it is a Git LFS pointer: a few lines of text in place of the weights",
        "Run `git lfs pull` in the repository it came from, or download the file itself.",
    ),
    "html": (
        "it is a web page saved under this name",
        f"{_DOWNLOAD}: use the direct link, and log in if the site asks for it.",
    ),
    "gguf": ("it is a GGUF file", "Convert it to safetensors first."),
    "hdf5": ("it is an HDF5 (Keras) file", "Convert it to safetensors first."),
    "text": ("it is a text file", f"{_DOWNLOAD}; the text may say why the download failed."),
}

_MOST_AT_ONCE = 2**30  # Linux reads less than 2 GiB per call
_LONGEST_QUOTE = 120  # characters
CHUNK_BYTES = 8 * 2**20


def is_existing(path: str | os.PathLike[str]) -> bool:
    """Whether something is at `path`, links followed.

    Raises:
        CheckpointError: The system does not say: a folder on the way may not be entered, the name is too
            long, links form a ring.
    """
    return _mode(Path(path)) is not None


def _mode(path: Path) -> int | None:
    """Type and permission bits; None when nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is at `path`, links followed.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    mode = _mode(Path(path))
    return mode is not None and stat.S_ISDIR(mode)


def is_regular_file(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file is at `path`, links followed.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    mode = _mode(Path(path))
    return mode is not None and stat.S_ISREG(mode)


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Names of all that lies in a folder, sorted.

    Raises:
        CheckpointError: It cannot be listed.
    """
    with reading(Path(folder)):
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted, not paths


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that names `path`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """The error for a path that the system refuses to open or to read."""
    return CheckpointError(path, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error))


def shortened(text: object) -> str:
    """`text` for a message: quoted, and cut when a damaged file makes it endless."""
    quoted = repr(text)
    return quoted if len(quoted) <= _LONGEST_QUOTE else f"{quoted[:_LONGEST_QUOTE]}…"


def sniff(head: bytes) -> FileKind:
    """Tell the kind of a file from its first bytes.

    Args:
        head: The first `HEAD_BYTES` bytes, or all of a shorter file.

    Returns:
        The kind; "safetensors" when a length and a JSON object start the file.
    """
    # First: the length may begin with the very bytes that begin a pickle or a zip.
    if head[4:8] == b"\0\0\0\0" and head[8:9] == b"{":
        return "safetensors"
    for prefix, kind in _KIND_PREFIXES:
        if head.startswith(prefix):
            return kind
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head", b"<script")):
        return "html"
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return "unknown"


def foreign_file_error(path: Path, kind: FileKind, wanted: str) -> CheckpointError | None:
    """The error for a file that is plainly something else than `wanted`, or None if nothing is known."""
    if kind not in _KIND_WORDS:
        return None
    what, hint = _KIND_WORDS[kind]
    return CheckpointError(path, f"is not {wanted}: {what}.", hint=hint)


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


def iter_tensor_bytes(tensor: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the elements' bytes in row-major order, whatever the strides and the device.

    A contiguous CPU tensor is yielded without a copy; any other in copies of at most `chunk_bytes`
    (or one element).

    Args:
        tensor: A strided tensor, on any device.
        chunk_bytes: How much may be copied at once.

    Yields:
        Read it before asking for the next one.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if _lies_ready(tensor):
        yield _as_bytes(tensor)
    elif tensor.numel() * tensor.element_size() <= chunk_bytes or tensor.dim() == 0:
        yield _as_bytes(tensor.resolve_conj().resolve_neg().contiguous().cpu())
    else:
        rows = max(1, chunk_bytes * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
        for begin in range(0, tensor.shape[0], rows):
            # One row alone may still be too large: go down a dimension then.
            part = tensor[begin] if rows == 1 else tensor[begin : begin + rows]
            yield from iter_tensor_bytes(part, chunk_bytes)


def _lies_ready(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _as_bytes(tensor: Tensor) -> memoryview:
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
