"""Fingerprints of content: of one tensor, of all tensors of a checkpoint, of a file."""

import hashlib
import os
from pathlib import Path

from torch import Tensor

from sigmascope.checkpoints.bytes import iter_tensor_bytes
from sigmascope.checkpoints.checkpoint import Checkpoint
from sigmascope.checkpoints.paths import reading
from sigmascope.progress import Progress, no_progress

_DIGEST_BYTES = 16
_READ_BYTES = 4 * 2**20


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
