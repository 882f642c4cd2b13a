"""PyTorch's own files (`.ckpt`, `.pt`, `.pth`, `.bin`), which are pickles and could run code.

They are read with `weights_only=True`; what that refuses is refused here, with the names of what the
file asks for. Storages stay on the disk (mapped) until a tensor is read, except in files older than
PyTorch 1.6, which can only be read whole.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import Checkpoint, TensorInfo
from sigmascope.checkpoints.unwrap import unwrap_state
from sigmascope.errors import CheckpointError, UnsafeCheckpointError


class PickleCheckpoint(Checkpoint):
    """One file that `torch.save` wrote."""

    format = "pickle"

    def __init__(self, path: Path) -> None:
        state = unwrap_state(_load(path), path)
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

    def close(self) -> None:
        """Let go of the storages, and so of the mapped file."""
        self._tensors = None


def _load(path: Path) -> object:
    is_zip = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror or error}).") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        # Whatever a damaged archive makes PyTorch stumble over.
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(
            path,
            f"is damaged or no PyTorch checkpoint ({reason}).",
            hint="Download it again or make it anew.",
        ) from error


def _refused(path: Path, error: Exception) -> CheckpointError:
    wanted = re.findall(r"GLOBAL ([\w.]+)", str(error))
    names = ", ".join(dict.fromkeys(wanted))
    if not names:
        reason = str(error).splitlines()[0][:200] if str(error) else "no pickle"
        return CheckpointError(
            path,
            f"is damaged or no PyTorch checkpoint ({reason}).",
            hint="Download it again or make it anew.",
        )
    return UnsafeCheckpointError(
        path,
        f"asks to run code when it is loaded ({names}). Nothing was run.",
        hint="Ask its maker for a .safetensors file, or for the plain state dict.",
    )
