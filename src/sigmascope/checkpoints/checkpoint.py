"""The common interface of files of weights in any format, and how their paths and bytes are read.

`Checkpoint` is the interface: names, shapes and types are known at once, tensors are read one at a time.
`CompositeCheckpoint` joins several open ones, and `RenamedCheckpoint` gives one other keys, such as those of the model
that it is compared with. Fingerprints identify the content of a tensor, a checkpoint or a file.

Refusals by the system become a `CheckpointError` that names the path: `Path.exists` and its like raise a bare OSError
if a folder is closed to us or a name is too long. `sniff` tells a file's kind by its first bytes, not by its name.
`read_exactly` fills a buffer from any place in an open file, and `iter_tensor_bytes` gives a tensor's bytes piece by
piece, so that a strided or GPU tensor is never copied whole.
"""

import difflib
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Literal

import torch
from torch import Tensor

from sigmascope.checkpoints.rounding import Recoded, Rounding, Storage, Sums, plain_rounding
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.files import reading_hint, reason_of
from sigmascope.progress import Progress, no_progress

CheckpointFormat = Literal["safetensors", "pickle", "gguf"]


LEFT_OUT_PREFIX = "lpips_loss."
"""Training checkpoints carry a loss network, which is not part of the model."""
LEFT_OUT_REASON = "belongs to the training loss and not to the model"


# What a buffer must satisfy that tensors are read into, in bytes.
_MIN_PIECE_BYTES = 8
_BUFFER_ALIGNMENT_BYTES = 8  # of the widest element types but complex128, which no file format here has


# How fingerprints are taken.
_DIGEST_BYTES = 16
_HASHED_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


_LEAST_LIKENESS: Final = 0.6


class Checkpoint(ABC):
    """Weights on disk, read one tensor at a time. A context manager; also safe to read from threads.

    Attributes:
        path: The file, the index of a sharded one, or the diffusers folder.
        format: "safetensors", "pickle" or "gguf".
        metadata: The header's texts; empty for a pickle.
        skipped: What is in the file but not among the keys, with the reason.
        dequantised: How each quantised tensor is stored in the file, by key. Reading gives the numbers that the codes
            stand for.
        undescribed: Why nothing says how a tensor is stored, by key. Its shape is that of its codes then, each of which
            may hold several numbers.
    """

    path: Path
    format: CheckpointFormat
    metadata: Mapping[str, str]
    skipped: Mapping[str, str]
    dequantised: Mapping[str, str]
    undescribed: Mapping[str, str]

    def __init__(
        self,
        path: Path,
        infos: Mapping[str, TensorInfo],
        metadata: Mapping[str, str],
        skipped: Mapping[str, str],
        dequantised: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.metadata = dict(metadata)
        self.skipped = dict(skipped)
        self.dequantised = dict(dequantised or {})
        self.undescribed = {}
        self._infos = dict(infos)

    def keys(self) -> list[str]:
        """Names of all tensors, in the file's order."""
        return list(self._infos)

    def info(self, key: str) -> TensorInfo:
        """Shape, type and size of one tensor, without reading it.

        Raises:
            CheckpointError: There is no such key; the message has the nearest ones.
        """
        found = self._infos.get(key)
        if found is None:
            raise self._no_such_key(key)
        return found

    def tensor(self, key: str) -> Tensor:
        """Read one tensor into memory of its own, on the CPU, contiguous.

        Raises:
            CheckpointError: There is no such key, or its bytes cannot be read.
        """
        return self._read(self.info(key))

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Read several tensors, which may share memory: keep none of them without the others.

        Raises:
            CheckpointError: There is no such key, or its bytes cannot be read.
        """
        return {key: self.tensor(key) for key in keys}

    def tensor_into(self, key: str, buffer: Tensor) -> Tensor:
        """Read one tensor into a buffer that the caller reuses: fresh memory costs a page fault every 4 KiB.

        Args:
            key: The tensor's name.
            buffer: One axis of uint8 on the CPU, contiguous, at least `info(key).nbytes` long, beginning at a
                multiple of 8 bytes.

        Returns:
            The tensor with its own type and shape. It lies in the buffer where the format allows that, so it is
            lost when the buffer is used again.

        Raises:
            ConfigError: The buffer is not such a one, or too small.
            CheckpointError: There is no such key, or its bytes cannot be read.
        """
        info = self.info(key)
        _check_buffer(buffer, info)
        return self._read_into(info, buffer[: info.nbytes])

    def pieces(self, key: str, buffer: Tensor) -> Iterator[Tensor]:
        """Read one tensor a piece at a time, each into the same memory, so that it can stay in a cache.

        Args:
            key: The tensor's name.
            buffer: As for `tensor_into`, of any size from 8 bytes on; it sets the size of a piece.

        Yields:
            One axis of elements, in row-major order; lost when the next one is asked for. A format that cannot
            read in pieces reads the whole first.

        Raises:
            ConfigError: The buffer is not such a one.
            CheckpointError: There is no such key, or its bytes cannot be read.
        """
        info = self.info(key)
        _check_buffer(buffer, info, needed=_MIN_PIECE_BYTES)
        yield from self._read_pieces(info, buffer)

    def rounding(self, key: str) -> Rounding:
        """How numbers are rounded when they are stored like a tensor.

        Raises:
            CheckpointError: There is no such key, or numbers cannot be stored in its format here.
        """
        dtype = self.info(key).dtype
        if not dtype.is_floating_point:
            raise CheckpointError(
                self.path,
                f"{shortened(key)} is {str(dtype).removeprefix('torch.')} without scales: what its numbers stand for is not known.",
                hint="Use the checkpoint that it was made from (bf16 or fp16).",
            )
        return plain_rounding(dtype)

    @property
    def as_stored(self) -> "Checkpoint":
        """The tensors as the file has them, codes and scales by their own keys; open as long as this one is."""
        return self

    def storage(self, key: str) -> Storage:
        """How new numbers of a quantised tensor are stored in the file.

        Raises:
            CheckpointError: There is no such key, or numbers cannot be stored in its format here.
        """
        how = self.dequantised.get(self.info(key).name, "")
        raise CheckpointError(
            self.path,
            f"{shortened(key)} is stored as {how}, and numbers cannot be stored so here.",
            hint="Use the checkpoint that it was made from (bf16 or fp16).",
        )

    def recoded(self, key: str, sums: Sums) -> Recoded:
        """Store new numbers of a quantised tensor; nothing is written.

        Args:
            key: The tensor's.
            sums: Gives the numbers; asked for all rows twice where a scale has to be found first.

        Raises:
            CheckpointError: As of `storage`.
        """
        self.storage(key)
        raise NotImplementedError

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from, indexes too."""
        return (self.path,)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self._infos.values())

    def _read(self, info: TensorInfo) -> Tensor:
        """Read the tensor that `info` describes."""
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    @abstractmethod
    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        """Read into `buffer`, which has exactly the tensor's bytes; formats that cannot give memory of their own."""

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        """Give the elements in runs of as many as `buffer` holds; formats that can read only those."""
        most = buffer.numel() // info.dtype.itemsize or 1
        flat = self._read(info).reshape(-1)
        for start in range(0, flat.numel(), most):
            yield flat[start : start + most]

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. Reading afterwards is an error; closing twice is not."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        return key in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self)} tensors)"

    def _no_such_key(self, key: str) -> CheckpointError:
        if key in self.skipped:
            message = f"the key {key!r} cannot be read: it {self.skipped[key]}."
            return CheckpointError(self.path, message, hint="Choose one of keys().")
        near = difflib.get_close_matches(key, self._infos, n=3, cutoff=0.6)
        hint = f"Nearest keys: {', '.join(near)}." if near else f"It has {len(self)} other keys."
        return CheckpointError(self.path, f"has no key {key!r}.", hint=hint)

    def _closed(self) -> CheckpointError:
        return CheckpointError(self.path, "is closed already.", hint="Read inside the `with` block.")


def _check_buffer(buffer: Tensor, info: TensorInfo, needed: int | None = None) -> None:
    nbytes = info.nbytes if needed is None else needed
    flat = buffer.dim() == 1 and buffer.dtype == torch.uint8 and buffer.device.type == "cpu"
    if not (flat and buffer.is_contiguous() and buffer.storage_offset() % _BUFFER_ALIGNMENT_BYTES == 0):
        raise ConfigError(
            f"a buffer of {buffer.dtype}, shape {tuple(buffer.shape)}, on {buffer.device} cannot take a tensor's bytes.",
            hint="Use a contiguous one-dimensional torch.uint8 buffer on the CPU, aligned to 8 bytes.",
        )
    if buffer.numel() < nbytes:
        raise ConfigError(
            f"{info.name} takes {nbytes} bytes at once, the buffer has {buffer.numel()}.",
            hint="Make the buffer as large as the largest tensor.",
        )


class StateDict(Checkpoint):
    """Tensors in memory, as a program gives them to a loader in place of a file. Closing it closes nothing.

    Args:
        tensors: By name, on any device.
    """

    format: CheckpointFormat = "safetensors"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        infos = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())
            for name, tensor in tensors.items()
        }
        super().__init__(Path("the state dict"), infos, {}, {})

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return buffer.view(info.dtype).reshape(info.shape).copy_(self._tensors[info.name].detach())

    def close(self) -> None:
        """Nothing is open."""


class CompositeCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie in other open ones. It owns those: closing it closes them.

    Args:
        path: What it is called.
        sources: The opened checkpoints.
        places: Of each key, the source that holds it and its key there.
        metadata: The header's texts.
        skipped: What is in the sources but not among the keys, with the reason.
    """

    format: CheckpointFormat = "safetensors"

    def __init__(
        self,
        path: Path,
        sources: Iterable[Checkpoint],
        places: Mapping[str, tuple[Checkpoint, str]],
        metadata: Mapping[str, str],
        skipped: Mapping[str, str],
    ) -> None:
        self._sources = tuple(sources)
        self._places = dict(places)
        infos = {name: replace(source.info(key), name=name) for name, (source, key) in places.items()}
        how = {name: source.dequantised.get(key) for name, (source, key) in places.items()}
        dequantised = {name: words for name, words in how.items() if words is not None}
        super().__init__(path, infos, metadata, skipped, dequantised)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from."""
        return tuple(file for source in self._sources for file in source.files)

    def _read(self, info: TensorInfo) -> Tensor:
        source, key = self._places[info.name]
        return source.tensor(key)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        source, key = self._places[info.name]
        return source.tensor_into(key, buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        source, key = self._places[info.name]
        return source.pieces(key, buffer)

    def rounding(self, key: str) -> Rounding:
        """As in the source that holds the key."""
        self.info(key)
        source, own = self._places[key]
        return source.rounding(own)

    def close(self) -> None:
        """Close every source."""
        for source in self._sources:
            source.close()


class RenamedCheckpoint(CompositeCheckpoint):
    """An open checkpoint some of whose keys go by another name.

    Args:
        source: The opened checkpoint.
        names: The new name of each key that gets one. No two keys may end up with the same one.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str]) -> None:
        self.format = source.format
        places = {names.get(key, key): (source, key) for key in source}
        if len(places) != len(source):
            raise ValueError("two keys would get the same name")
        super().__init__(source.path, [source], places, source.metadata, source.skipped)


def tensor_fingerprint(tensor: Tensor) -> str:
    """Fingerprint of a tensor's element type, shape and bytes.

    Equal for equal content, whatever the device and the strides. Bytes decide: 0.0 and -0.0 differ, and
    two NaN are equal when their bits are.

    Args:
        tensor: Any dense tensor; strided and GPU tensors are read in pieces of a few MB.

    Returns:
        32 hexadecimal digits (BLAKE2b, 128 bits).
    """
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    for piece in iter_tensor_bytes(tensor):
        digest.update(piece)
    return digest.hexdigest()


def checkpoint_fingerprint(checkpoint: Checkpoint, progress: Progress = no_progress) -> str:
    """Fingerprint of all tensors of a checkpoint with their keys.

    Equal for the same weights in another format, order or number of shards.

    Args:
        checkpoint: An open checkpoint.
        progress: Called with (tensors done, tensors in all, key).

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    keys = sorted(checkpoint.keys())
    for done, key in enumerate(keys):
        progress(done, len(keys), key)
        digest.update(f"{key!r}:{tensor_fingerprint(checkpoint.tensor(key))}\n".encode())
    progress(len(keys), len(keys), "")
    return digest.hexdigest()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as download pages give it.

    Args:
        path: The file.

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = Path(path)
    digest = hashlib.sha256()
    with reading(file), file.open("rb", buffering=0) as stream:
        while piece := stream.read(_HASHED_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def is_left_out(key: str) -> bool:
    """Whether a key belongs to the training loss and not to the model."""
    return key.startswith(LEFT_OUT_PREFIX)


FileKind = Literal[
    "safetensors",
    "zip",
    "pickle",
    "lfs-pointer",
    "html",
    "gguf",
    "hdf5",
    "compressed",
    "tar",
    "text",
    "unknown",
]


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
    (b"\x1f\x8b", "compressed"),  # gzip
    (b"BZh", "compressed"),
    (b"\xfd7zXZ\0", "compressed"),
    (b"\x28\xb5\x2f\xfd", "compressed"),  # Zstandard
    (b"7z\xbc\xaf\x27\x1c", "compressed"),
    (b"Rar!\x1a\x07", "compressed"),
)
_TAR_MAGIC = slice(257, 262)
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
    "compressed": ("it is a compressed file or archive", "Unpack it, and name the checkpoint that is in it."),
    "tar": ("it is a tar archive", "Unpack it (tar -xf), and name the checkpoint that is in it."),
    "hdf5": ("it is an HDF5 (Keras) file", "Convert it to safetensors first."),
    "text": ("it is a text file", f"{_DOWNLOAD}; the text may say why the download failed."),
}


_MAX_READ_BYTES = 2**30  # Linux reads less than 2 GiB per call
_MAX_QUOTE_LENGTH = 120  # characters
CHUNK_BYTES = 8 * 2**20


_FILE_KINDS: Final = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a named pipe (FIFO)"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


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


def what_stands_at(path: Path) -> str:
    """What is at `path` where a regular file was looked for, in words that follow its name.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    mode = _mode(path)
    if mode is not None:
        return next((words for is_kind, words in _FILE_KINDS if is_kind(mode)), "is something else")
    return "is a link to something that is not there" if path.is_symlink() else "is not there"


def is_same_file(first: Path, second: Path) -> bool:
    """Whether both paths lead to one existing file or folder.

    Raises:
        CheckpointError: As of `is_existing`.
    """
    return is_existing(first) and is_existing(second) and first.samefile(second)


def near_path(path: Path) -> Path | None:
    """What is there under nearly this path: each name as it is, or else the one most like it; None if nothing is."""
    found = Path(path.anchor)
    for name in path.relative_to(path.anchor).parts:
        here = found / name
        if not is_existing(here):
            try:
                names = names_in(found)
            except CheckpointError:  # no folder, or one that may be entered but not listed
                return None
            near = difflib.get_close_matches(name, names, n=1, cutoff=_LEAST_LIKENESS)
            if not near:
                return None
            here = found / near[0]
        found = here
    return found


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
    return quoted if len(quoted) <= _MAX_QUOTE_LENGTH else f"{quoted[:_MAX_QUOTE_LENGTH]}…"


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
    if head[_TAR_MAGIC] == b"ustar":
        return "tar"
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head", b"<script")):
        return "html"
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "text"
    return "unknown"


def foreign_file_error(path: Path, kind: FileKind, wanted: str) -> CheckpointError | None:
    """The error for a file that is clearly not `wanted`; None if its first bytes do not tell."""
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
            count = _read_at(stream, view[done : done + _MAX_READ_BYTES], begin + done)
            if count == 0:
                raise CheckpointError(
                    path,
                    f"ends inside {shortened(name)}: the file was cut short while it was open.",
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
    if _needs_no_copy(tensor):
        yield _as_bytes(tensor)
    elif tensor.numel() * tensor.element_size() <= chunk_bytes or tensor.dim() == 0:
        yield _as_bytes(tensor.resolve_conj().resolve_neg().contiguous().cpu())
    else:
        rows = max(1, chunk_bytes * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
        for begin in range(0, tensor.shape[0], rows):
            # One row alone may still be too large: go down a dimension then.
            part = tensor[begin] if rows == 1 else tensor[begin : begin + rows]
            yield from iter_tensor_bytes(part, chunk_bytes)


def _needs_no_copy(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _as_bytes(tensor: Tensor) -> memoryview:
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
