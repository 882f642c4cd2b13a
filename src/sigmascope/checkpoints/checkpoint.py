"""What every opened file of weights offers, whatever its format.

`Checkpoint` is the interface: names, shapes and types are known at once, tensors are read one at a time.
`RenamedCheckpoint` gives an opened file other keys, such as those of the model that it is compared with. Below are the
fingerprints of content: of one tensor, of all tensors of a checkpoint, and of a file's bytes.
"""

import difflib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from sigmascope.checkpoints.files import iter_tensor_bytes, reading
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.progress import Progress, no_progress

CheckpointFormat = Literal["safetensors", "pickle", "gguf"]

LEFT_OUT_PREFIX = "lpips_loss."
"""Training checkpoints carry a loss network that is no part of the model."""
LEFT_OUT_REASON = "belongs to the training loss and not to the model"

# What a buffer must satisfy that tensors are read into, in bytes.
_SMALLEST_PIECE = 8
_BUFFER_ALIGNMENT = 8  # of the widest element types but complex128, which no file format here has

# How fingerprints are taken.
_DIGEST_BYTES = 16
_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Checkpoint(ABC):
    """Weights on disk, read one tensor at a time. A context manager; also safe to read from threads.

    Attributes:
        path: The file, the index of a sharded one, or the diffusers folder.
        format: "safetensors", "pickle" or "gguf".
        metadata: The header's texts; empty for a pickle.
        skipped: What is in the file but not among the keys, with the reason.
        dequantised: How the tensors that are quantised in the file are stored there, by key. They are given as
            the numbers that they stand for.
    """

    path: Path
    format: CheckpointFormat
    metadata: Mapping[str, str]
    skipped: Mapping[str, str]
    dequantised: Mapping[str, str]

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
        self._infos = dict(infos)

    def keys(self) -> list[str]:
        """Names of all tensors, in the order in which they lie in the file."""
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

    def tensor_into(self, key: str, buffer: Tensor) -> Tensor:
        """Read one tensor into memory that the caller keeps for many: fresh memory costs a fault a page.

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
        _check_buffer(buffer, info, needed=_SMALLEST_PIECE)
        yield from self._read_pieces(info, buffer)

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
        """Let go of the file. Reading afterwards is an error; closing twice is none."""

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
    if not (flat and buffer.is_contiguous() and buffer.storage_offset() % _BUFFER_ALIGNMENT == 0):
        raise ConfigError(
            f"a buffer of {buffer.dtype}, shape {tuple(buffer.shape)}, on {buffer.device} cannot be read into.",
            hint="Use a contiguous torch.uint8 buffer of one axis on the CPU that begins at a multiple of 8 bytes.",
        )
    if buffer.numel() < nbytes:
        raise ConfigError(
            f"{info.name} takes {nbytes} bytes at once, the buffer has {buffer.numel()}.",
            hint="Make it as large as the largest tensor that is read into it.",
        )


class RenamedCheckpoint(Checkpoint):
    """An open checkpoint some of whose keys go by another name. It owns the other: closing closes both.

    Args:
        source: The opened checkpoint.
        names: The new name of each key that gets one. No two keys may end up with the same one.
    """

    def __init__(self, source: Checkpoint, names: Mapping[str, str]) -> None:
        self.format = source.format
        self._source = source
        self._original = {names.get(key, key): key for key in source}
        if len(self._original) != len(source):
            raise ValueError("two keys would have one name")
        infos = {name: replace(source.info(key), name=name) for name, key in self._original.items()}
        dequantised = {names.get(key, key): how for key, how in source.dequantised.items()}
        super().__init__(source.path, infos, source.metadata, source.skipped, dequantised)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights are read from."""
        return self._source.files

    def _read(self, info: TensorInfo) -> Tensor:
        return self._source.tensor(self._original[info.name])

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        return self._source.tensor_into(self._original[info.name], buffer)

    def _read_pieces(self, info: TensorInfo, buffer: Tensor) -> Iterator[Tensor]:
        return self._source.pieces(self._original[info.name], buffer)

    def close(self) -> None:
        """Close the checkpoint behind it."""
        self._source.close()


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


def file_sha256(path: str | os.PathLike[str], progress: Progress = no_progress) -> str:
    """SHA-256 of a file's bytes, as download pages give it.

    Args:
        path: The file.
        progress: Called with (bytes done, bytes in all, file name).

    Returns:
        64 hexadecimal digits.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = Path(path)
    digest = hashlib.sha256()
    with reading(file), file.open("rb", buffering=0) as stream:
        total, done = os.fstat(stream.fileno()).st_size, 0
        while piece := stream.read(_READ_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(done, total, file.name)
    return digest.hexdigest()


def is_left_out(key: str) -> bool:
    """Whether a key belongs to the training loss and not to the model."""
    return key.startswith(LEFT_OUT_PREFIX)
