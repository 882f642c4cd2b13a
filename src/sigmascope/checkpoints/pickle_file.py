"""PyTorch's own files (`.ckpt`, `.pt`, `.pth`, `.bin`), which are pickles and could run code.

They are read with `weights_only=True`; what that refuses is refused here, with the names of what the
file asks for. Storages stay on the disk (mapped) until a tensor is read, and are read beside the mapping
where the system tells where they lie; files older than PyTorch 1.6 can only be read whole.
"""

import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints.behind_map import FileBehindMap
from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.paths import reading, shortened
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
            self._file = FileBehindMap(path)
            try:
                state = unwrap_state(_load(path), path)
                _check_sizes(state.tensors, path)
                if _is_in_own_byte_order(path):
                    self._file.look()
            except BaseException:
                self._file.close()
                raise
        self._tensors: Mapping[str, Tensor] | None = state.tensors
        infos = {
            name: TensorInfo(name, tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())
            for name, tensor in state.tensors.items()
        }
        super().__init__(path, infos, {}, state.skipped)

    def _read(self, info: TensorInfo) -> Tensor:
        return self._read_into(info, torch.empty(info.nbytes, dtype=torch.uint8))

    def _read_into(self, info: TensorInfo, buffer: Tensor) -> Tensor:
        if self._tensors is None:
            raise self._closed()
        tensor = self._tensors[info.name].detach()
        if buffer.data_ptr() % info.dtype.itemsize:  # complex128 in a buffer that is aligned for less
            buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        into = buffer.view(info.dtype).reshape(info.shape)
        offset = self._file.offset_of(tensor)
        if offset is None:
            return into.copy_(tensor)
        self._file.read(info.name, offset, buffer)
        return into

    def close(self) -> None:
        """Let go of the storages, and so of the mapped file."""
        self._tensors = None
        self._file.close()


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


def _is_in_own_byte_order(path: Path) -> bool:
    """Whether PyTorch gives the bytes of an archive as they lie there, and does not turn them round.

    Raises:
        CheckpointError: It lost its end since it was loaded.
    """
    if not _is_sound_zip(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/byteorder")]
            told = {archive.read(name).decode(errors="replace") for name in names}
    except zipfile.BadZipFile:  # PyTorch checks no sums
        return False
    if told:
        return told == {sys.byteorder}
    # Without a record the user's own setting decides.
    return sys.byteorder == "little" and torch.serialization.get_default_load_endianness() is None


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
