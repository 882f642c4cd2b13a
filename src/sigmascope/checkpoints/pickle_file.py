"""PyTorch's own files (`.ckpt`, `.pt`, `.pth`, `.bin`), which are pickles and could run code.

They are read with `weights_only=True`; what that refuses is refused here, with the names of what the
file asks for. Storages stay on the disk (mapped) until a tensor is read, except in files older than
PyTorch 1.6, which can only be read whole.
"""

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.header import shortened
from sigmascope.checkpoints.paths import reading
from sigmascope.checkpoints.pickle_globals import foreign_globals
from sigmascope.checkpoints.unwrap import unwrap_state
from sigmascope.errors import CheckpointError, UnsafeCheckpointError

_AGAIN = "Download it again or make it anew."
_NAMES_SHOWN = 5
_REASON_LENGTH = 160


class PickleCheckpoint(Checkpoint):
    """One file that `torch.save` wrote."""

    format = "pickle"

    def __init__(self, path: Path) -> None:
        with reading(path):
            state = unwrap_state(_load(path), path)
            _check_sizes(state.tensors, path)
        self._tensors: Mapping[str, Tensor] | None = state.tensors
        infos = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())
            for name, tensor in state.tensors.items()
        }
        super().__init__(path, infos, {}, state.skipped)

    def _read(self, info: TensorInfo) -> Tensor:
        if self._tensors is None:
            raise self._closed()
        # A copy: the caller may change it, and the mapped pages stay clean and can be dropped.
        return self._tensors[info.name].detach().clone(memory_format=torch.contiguous_format)

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if self._tensors is None:
            raise self._closed()
        if info.dtype.itemsize > 8:  # complex128: the buffer need not be aligned for it
            return self._read(info)
        return buffer.view(info.dtype).reshape(info.shape).copy_(self._tensors[info.name].detach())

    def close(self) -> None:
        """Let go of the storages, and so of the mapped file."""
        self._tensors = None


def _check_sizes(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a tensor larger than the file: strides of 0 can make one of any size out of a number."""
    file_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > file_bytes:
            message = f"{shortened(name)} claims {nbytes} bytes in a file of {file_bytes}."
            raise CheckpointError(path, message, hint="Do not use this file unless you know its maker.")


def _load(path: Path) -> object:
    is_zip = _is_sound_zip(path)
    try:
        with warnings.catch_warnings():
            # An advice for the maker of the file; what cannot be read is refused below.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except UnicodeEncodeError as error:
        message = "cannot be read: PyTorch cannot open a path that is not valid Unicode."
        raise CheckpointError(path, message, hint="Rename the file or the folder.") from error
    except (
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        AssertionError,
        OverflowError,
        struct.error,
    ) as error:
        # Whatever a damaged archive makes PyTorch stumble over.
        raise _damaged(path, error) from error
    except MemoryError as error:
        message = "asks for more memory than there is: it is damaged, or too large for this machine."
        raise CheckpointError(path, message, hint=_AGAIN) from error


def _is_sound_zip(path: Path) -> bool:
    """Whether the file is a zip as `torch.save` writes; False for the older format.

    Raises:
        CheckpointError: A zip that lacks its end, or a compressed one, which cannot be mapped.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        message = f"is truncated or damaged: the list at the archive's end is missing ({error})."
        raise CheckpointError(path, message, hint=_AGAIN) from error
    if compressed:
        raise CheckpointError(
            path,
            "is a compressed archive, which torch.save never writes.",
            hint="Load it and save it again with torch.save, or unpack it if a checkpoint is inside.",
        )
    return True


def _refused(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    """The error for what `weights_only=True` refused: code, or only damage."""
    named = re.findall(r"GLOBAL ([\w.]+)", str(error))
    wanted = list(dict.fromkeys([*named, *foreign_globals(path)]))
    if not wanted:
        return _damaged(path, error)
    more = f" and {len(wanted) - _NAMES_SHOWN} more" if len(wanted) > _NAMES_SHOWN else ""
    return UnsafeCheckpointError(
        path,
        f"asks to run code that is no part of tensors: {', '.join(wanted[:_NAMES_SHOWN])}{more}. Nothing was run.",
        hint="Ask its maker for a .safetensors file, or for a checkpoint with the state dict alone.",
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = str(error) or type(error).__name__
    inner = re.search(r"WeightsUnpickler error: (.*)", text)
    said = inner[1].strip() if inner else text.splitlines()[0]
    reason = said[:_REASON_LENGTH] or "it is no pickle"
    return CheckpointError(path, f"is damaged or no PyTorch checkpoint ({reason}).", hint=_AGAIN)
