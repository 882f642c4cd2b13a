"""Read PyTorch's own files (`.ckpt`, `.pt`, `.pth`, `.bin`), which are pickles and could run code.

Files are read with `weights_only=True`, after `pickle_safety` has seen what they ask for. Only the containers of settings
that Lightning keeps beside the weights (`INERT`) are let through: a plain dictionary stands in for each, and the class that
the file names is never imported. The state dict may lie bare, under `model_state_dict` or `model`, or
(Lightning) under `state_dict` with a `model.` prefix: all give the same bare keys.

Storages stay on the disk, mapped, until a tensor is read; files older than PyTorch 1.6 can only be read whole. Copying
from the mapping would have two drawbacks: touched pages count as the process's memory, so a model seems to take it
twice, and the process is killed if the file is cut short meanwhile. So on Linux, which tells which file is mapped at an
address, bytes are read with `pread`; elsewhere they are copied from the mapping.
"""

import os
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    LEFT_OUT_REASON,
    Checkpoint,
    TensorInfo,
    is_left_out,
    read_exactly,
    reading,
    shortened,
)
from sigmascope.checkpoints.pickle_safety import (
    DAMAGE_ERRORS,
    DAMAGED_HINT,
    INERT,
    MAX_NAMED,
    damaged,
    is_sound_zip,
    refused,
    rehearse,
)
from sigmascope.errors import CheckpointError
from sigmascope.units import first_few

# Where the state dict lies in what was saved.
_WRAPPERS = ("model_state_dict", "state_dict", "model")
_MOST_WRAPPERS = 3
_LIGHTNING_PREFIX = "model."
_COMPVIS_PREFIX = "model.diffusion_model."  # there `model.` is part of the weights' own names

PICKLE_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin")

_PROCESS_MAPS: Final = Path("/proc/self/maps")


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


def _load(path: Path) -> object:
    """What the file holds, without running code of it.

    The pickle is first gone through with stand-ins, which note what it asks for and refuse what would be unsafe
    (`rehearse`). Then PyTorch reads it with `weights_only`; inert containers that were asked for are allowed meanwhile
    (`_plain_containers`). What that refuses is told by its name.
    """
    is_zip = is_sound_zip(path)
    asked: dict[str, None] = {}
    rehearse(path, is_zip, asked)
    try:
        with warnings.catch_warnings():
            # An advice for the maker of the file; what cannot be read is refused below.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            containers = _plain_containers(asked)  # none as a rule: then what the host allows is not touched
            with torch.serialization.safe_globals(containers) if containers else nullcontext():
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise refused(path, error, asked) from error
    except UnicodeEncodeError as error:
        message = "cannot be read: PyTorch cannot open a path that is not valid Unicode."
        raise CheckpointError(path, message, hint="Rename the file or the folder.") from error
    except DAMAGE_ERRORS as error:
        raise damaged(path, error) from error
    except MemoryError as error:
        message = "asks for more memory than there is: it is damaged, or too large for this machine."
        raise CheckpointError(path, message, hint=DAMAGED_HINT) from error


def _plain_containers(asked: Iterable[str]) -> "list[Callable[..., Any] | tuple[Callable[..., Any], str]]":
    """What `weights_only` may make of inert containers: dictionaries. What the host has allowed stays allowed."""
    allowed = torch.serialization.get_safe_globals()
    names = {
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in allowed
    }
    return [(OrderedDict, name) for name in asked if name in INERT and name not in names]


def _check_sizes(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a tensor larger than the file: strides of 0 can make one of any size out of a number."""
    file_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > file_bytes:
            message = f"{shortened(name)} claims {nbytes} bytes in a file of {file_bytes}."
            raise CheckpointError(path, message, hint="Do not use this file unless you know its maker.")


def _is_in_own_byte_order(path: Path) -> bool:
    """Whether PyTorch gives the bytes of an archive as they lie there, and does not turn them round.

    Raises:
        CheckpointError: It lost its end since it was loaded.
    """
    if not is_sound_zip(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/byteorder")]
            told = {archive.read(name).decode(errors="replace") for name in names}
    except (zipfile.BadZipFile, ValueError):  # PyTorch checks no sums, and no names
        return False
    if told:
        return told == {sys.byteorder}
    # Without a record the user's own setting decides.
    return sys.byteorder == "little" and torch.serialization.get_default_load_endianness() is None


@dataclass(frozen=True, slots=True)
class UnwrappedState:
    """The tensors by bare key, and what was left out with the reason."""

    tensors: Mapping[str, Tensor]
    skipped: Mapping[str, str]


def unwrap_state(loaded: object, path: Path) -> UnwrappedState:
    """Find the tensors in what a checkpoint file holds.

    Args:
        loaded: The object that was saved.
        path: The file, for messages.

    Returns:
        Tensors by bare key; other entries are listed as skipped.

    Raises:
        CheckpointError: There is no tensor, or two keys become the same one.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            path,
            f"holds a {type(loaded).__name__}, not a dictionary of tensors.",
            hint="Save the model's state_dict() instead.",
        )
    state: Mapping[Any, Any] = loaded
    skipped: dict[str, str] = {}
    wrapper = None
    for _ in range(_MOST_WRAPPERS):
        inner = _wrapper_in(state, path, is_top=wrapper is None)
        if inner is None:
            break
        wrapper = inner
        skipped |= {str(key): "is not a weight" for key in state if key != wrapper}
        state = state[wrapper]
    names = [key for key in state if isinstance(key, str)]
    strip = wrapper == "state_dict" and not any(name.startswith(_COMPVIS_PREFIX) for name in names)
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        name = str(key).removeprefix(_LIGHTNING_PREFIX) if strip else str(key)
        reason = _why_skipped(key, name, value)
        if reason is not None:
            skipped[name] = reason
        elif name in tensors:
            message = f"has {shortened(name)} twice, with and without `model.` before it."
            raise CheckpointError(path, message, hint="Save the model's state_dict() alone.")
        else:
            tensors[name] = value.detach()
    if not tensors:
        _refuse_unread_kinds(path, state)
        _raise_no_tensors(path, loaded)
    return UnwrappedState(tensors, skipped)


def _wrapper_in(state: Mapping[Any, Any], path: Path, *, is_top: bool) -> str | None:
    """The key under which the state dict lies; None if it is `state` itself.

    Raises:
        CheckpointError: Weights lie under `model` and under other keys.
    """
    wrapper = next((name for name in _WRAPPERS if isinstance(state.get(name), Mapping)), None)
    if wrapper is None or ((wrapper == "model" or not is_top) and _has_weights(state)):
        return None
    holders = [str(key) for key, value in state.items() if key == wrapper or _has_weights(value)]
    if wrapper == "model" and len(holders) > 1:
        raise _several_states(path, holders)
    return wrapper


def _has_weights(value: object) -> bool:
    """Whether it is a dictionary with weights right in it: not only a loss or the state of a random generator."""
    return isinstance(value, Mapping) and any(
        isinstance(key, str) and isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 0
        for key, each in value.items()
    )


def _several_states(path: Path, keys: Sequence[str]) -> CheckpointError:
    first = shortened(keys[0])
    return CheckpointError(
        path,
        f"holds weights under several keys: {first_few([shortened(key) for key in keys], MAX_NAMED)}.",
        hint=f"Save those that you want in a file of their own: "
        f'torch.save(torch.load("{path.name}", weights_only=True)[{first}], "weights.ckpt").',
    )


_UNREAD_KINDS: Final = {
    "sparse": "Save dense tensors: tensor.to_dense().",
    "quantised": "Save tensors of a float type: tensor.dequantize().",
    "on the meta device, without values": "Save the state dict of a model whose weights are loaded.",
    "on another device": "Save it with its tensors on the CPU: tensor.cpu().",
}
"""Kinds of tensors that are not read, and what to do."""


def _unread_kind(tensor: Tensor) -> str | None:
    """The kind, in the words of `_UNREAD_KINDS`; None of a tensor that is read."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout != torch.strided:
        return "sparse"
    return None if tensor.device.type == "cpu" else "on another device"


def _refuse_unread_kinds(path: Path, state: Mapping[Any, Any]) -> None:
    """Say that there are tensors, but only of kinds that are not read."""
    kinds = {str(key): _unread_kind(value) for key, value in state.items() if isinstance(value, Tensor)}
    unread = {name: kind for name, kind in kinds.items() if kind is not None}
    if not unread:
        return
    name, kind = next(iter(unread.items()))
    raise CheckpointError(
        path,
        f"holds no tensor of a kind that is read: {shortened(name)} is {kind} "
        f"({state[name].layout}, {state[name].dtype})"
        + (f", and {len(unread) - 1} more." if len(unread) > 1 else "."),
        hint=_UNREAD_KINDS[kind],
    )


def _why_skipped(key: object, name: str, value: object) -> str | None:
    if not isinstance(key, str):
        return f"has a {type(key).__name__} for a name"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    kind = _unread_kind(value)
    if kind is not None:
        return f"is {kind}, a kind of tensor that Sigmascope cannot read ({value.layout}, {value.device}, {value.dtype})"
    return LEFT_OUT_REASON if is_left_out(name) else None


def _raise_no_tensors(path: Path, loaded: Mapping[Any, Any]) -> None:
    holders = [str(key) for key, value in loaded.items() if _has_weights(value)]
    if len(holders) > 1:
        raise _several_states(path, holders)
    top = ", ".join(str(key)[:40] for key in list(loaded)[:8])
    where = f" There are some under {shortened(holders[0])}." if holders else ""
    raise CheckpointError(
        path,
        f"has no tensors where a checkpoint keeps them; its top level holds: {top or 'nothing'}.{where}",
        hint="Save the model's state_dict() itself, or under `model_state_dict`, `state_dict` or `model`.",
    )


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
        """Find where the file is mapped now. The answer holds only as long as the caller keeps the mapping."""
        with suppress(OSError):
            # A file put in its place since it was opened is another one, whose bytes are not these.
            if os.path.samestat(os.fstat(self._stream.fileno()), self.path.stat()):
                with _PROCESS_MAPS.open("rb") as maps:
                    self._areas = tuple(areas_of(self.path, maps))

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the file a tensor's bytes begin; None if they are not in the file in the tensor's layout."""
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


@dataclass(frozen=True, slots=True)
class Area:
    """Addresses `begin` to `end` hold a file's bytes from `offset` on."""

    begin: int
    end: int
    offset: int


def areas_of(path: Path, maps: Iterable[bytes]) -> Iterator[Area]:
    """Find a file in the lines of `/proc/self/maps`; one that was deleted or replaced is not found."""
    name = os.fsencode(path.resolve()).replace(b"\n", rb"\012")
    for line in maps:
        fields = line.rstrip(b"\n").split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            begin, end = (int(address, 16) for address in fields[0].split(b"-"))
            yield Area(begin, end, int(fields[2], 16))
