"""Read and write PyTorch's own files (`.ckpt`, `.pt`, `.pth`, `.bin`), which are pickles and could run code.

A file that asks to run code is refused with an `UnsafeCheckpointError` that names the code; none of it is run
(`_refused`). Files are read with `weights_only=True`. Only the containers of settings that Lightning keeps beside the
weights (`_INERT`) are let through: a plain dictionary stands in for each, and the class that the file names is never
imported. The state dict may lie bare, under `model_state_dict` or `model`, or
(Lightning) under `state_dict` with a `model.` prefix: all give the same bare keys.

`weights_only=True` runs no code but still allocates whatever a pickle asks for: a file of a kilobyte may ask for a
storage of terabytes, or for a key that takes years to hash. So the archive's list is checked before any member is read,
and the pickle is first run with stand-ins in place of all objects (`_Rehearsal`).

Storages stay on the disk, mapped, until a tensor is read; files older than PyTorch 1.6 can only be read whole. Copying
from the mapping would have two drawbacks: touched pages count as the process's memory, so a model seems to take it
twice, and the process is killed if the file is cut short meanwhile. So on Linux, which tells which file is mapped at an
address, bytes are read with `pread`; elsewhere they are copied from the mapping.

`torch.save` needs the whole state dict in memory. Its file is an uncompressed zip with a pickle that describes the
tensors (`data.pkl`) and a member for the bytes of each (`data/0`, `data/1`, …). `StreamingTorchWriter` knows names, types
and shapes beforehand, so it writes the description first and the bytes as they come.
"""

import io
import math
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import (
    LEFT_OUT_REASON,
    Checkpoint,
    TensorInfo,
    is_left_out,
    iter_tensor_bytes,
    read_exactly,
    reading,
    shortened,
)
from sigmascope.errors import CheckpointError, UnsafeCheckpointError, WriteError
from sigmascope.files import atomic_path, reason_of, writing_hint
from sigmascope.units import first_few, format_size

_DAMAGED_HINT = "Download it again or make it again."
_MAX_NAMED = 5
_MAX_REASON_LENGTH = 160

# Where the state dict lies in what was saved.
_WRAPPERS = ("model_state_dict", "state_dict", "model")
_MOST_WRAPPERS = 3
_LIGHTNING_PREFIX = "model."
_COMPVIS_PREFIX = "model.diffusion_model."  # there `model.` is part of the weights' own names

# Names that tensors ask for.
_TENSOR_CODE = ("torch._utils.", "torch._tensor.", "collections.OrderedDict", "torch.storage.")

PICKLE_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin")
_INERT: Final = frozenset(
    {
        "argparse.Namespace",
        "diffusers.configuration_utils.FrozenDict",
        "lightning.fabric.utilities.data.AttributeDict",
        "lightning.pytorch.utilities.parsing.AttributeDict",
        "lightning_fabric.utilities.data.AttributeDict",
        "pytorch_lightning.utilities.parsing.AttributeDict",
    }
)
"""What Lightning's `save_hyperparameters` writes beside the weights: containers of settings."""

# Whatever a damaged archive makes PyTorch stumble over; `weights_only` has an error of its own for what it refuses.
_DAMAGE_ERRORS: Final = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    OverflowError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)

# What a sound file stays below. A tensor takes some 40 opcodes and 80 bytes of the archive's list.
_MAX_LIST_BYTES: Final = 16 << 20
_MAX_RECORD_BYTES: Final = 64 << 20  # of a member that is not a storage
_MAX_OPCODES: Final = 600_000  # of 15,000 tensors; a million take two seconds to count on a slow machine
_MAX_EXTRA_BYTES: Final = 64 << 20  # beyond the file's own size
_MAX_DIMENSIONS: Final = 64
_PICKLES_OF_LEGACY_FILE: Final = 5  # those named below, and the storages' names
_MAX_ARCHIVE_END_BYTES: Final = 22 + 0xFFFF  # the end of an archive, with the longest remark

_PROCESS_MAPS: Final = Path("/proc/self/maps")

# The archive that `StreamingTorchWriter` writes.
_ALIGNMENT: Final = 64  # torch.save's own: a mapped file can then be computed with as it lies
_LOCAL_HEADER_BYTES: Final = 30
_ZIP64_BYTES: Final = 20
_FIELD_HEADER_BYTES: Final = 4
_PADDING_ID: Final = b"FB"
STORAGES: Final = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The types that such a file can hold."""
_PROTOCOL: Final = 2  # the one that `weights_only=True` reads


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
    (`_rehearse`). Then PyTorch reads it with `weights_only`; inert containers that were asked for are allowed meanwhile
    (`_plain_containers`). What that refuses is told by its name (`_refused`).
    """
    is_zip = _is_sound_zip(path)
    asked: dict[str, None] = {}
    _rehearse(path, is_zip, asked)
    try:
        with warnings.catch_warnings():
            # An advice for the maker of the file; what cannot be read is refused below.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            containers = _plain_containers(asked)  # none as a rule: then what the host allows is not touched
            with torch.serialization.safe_globals(containers) if containers else nullcontext():
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refused(path, error, asked) from error
    except UnicodeEncodeError as error:
        message = "cannot be read: PyTorch cannot open a path that is not valid Unicode."
        raise CheckpointError(path, message, hint="Rename the file or the folder.") from error
    except _DAMAGE_ERRORS as error:
        raise _damaged(path, error) from error
    except MemoryError as error:
        message = "asks for more memory than there is: it is damaged, or too large for this machine."
        raise CheckpointError(path, message, hint=_DAMAGED_HINT) from error


def _plain_containers(asked: Iterable[str]) -> "list[Callable[..., Any] | tuple[Callable[..., Any], str]]":
    """What `weights_only` may make of inert containers: dictionaries. What the host has allowed stays allowed."""
    allowed = torch.serialization.get_safe_globals()
    names = {
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in allowed
    }
    return [(OrderedDict, name) for name in asked if name in _INERT and name not in names]


def _is_sound_zip(path: Path) -> bool:
    """Whether the file is a zip as `torch.save` writes; False for the older format.

    Raises:
        CheckpointError: A zip that lacks its end, or a compressed one, which cannot be mapped; or its list declares
            what no checkpoint has.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return False
        _check_list_size(stream, path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            list_begin = archive.start_dir
            names = archive.namelist()
            compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        message = f"is truncated or damaged: the list at the archive's end is missing ({error})."
        raise CheckpointError(path, message, hint=_DAMAGED_HINT) from error
    _refuse_other_archives(names, path)
    if compressed:
        raise CheckpointError(
            path,
            "is a compressed archive, which torch.save never writes.",
            hint="Unpack it if it contains a checkpoint, or load it and save it again with torch.save.",
        )
    _check_members(members, list_begin, path)
    return True


def _refuse_other_archives(names: Sequence[str], path: Path) -> None:
    """Refuse the archives that are no `torch.save`'s: programs, and what has no description of tensors.

    Raises:
        CheckpointError: Says what it is, and how to get a checkpoint out of it.
    """
    inside = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inside or any(name.startswith("code/") for name in inside):
        raise CheckpointError(
            path,
            "is a TorchScript program (torch.jit.save) and no checkpoint.",
            hint="If you trust it, export its weights: "
            'torch.save(torch.jit.load("program.pt").state_dict(), "weights.ckpt").',
        )
    if "archive_format" in inside or "serialized_exported_program.json" in {*inside, *names}:
        raise CheckpointError(
            path,
            "is an exported program (torch.export.save) and no checkpoint.",
            hint="If you trust it, export its weights: "
            'torch.save(torch.export.load("program.pt2").state_dict, "weights.ckpt").',
        )
    if names and not any(name.lower().endswith("data.pkl") for name in names):
        raise CheckpointError(
            path,
            f"is a zip archive without a checkpoint of its own; it contains {first_few([shortened(name) for name in names], _MAX_NAMED)}.",
            hint="If one of these is a checkpoint, unpack the archive and name that.",
        )


def _check_list_size(stream: BinaryIO, path: Path) -> None:
    """Refuse an archive whose list of members would fill the memory; one without an end is told by `zipfile`."""
    file_bytes = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, file_bytes - _MAX_ARCHIVE_END_BYTES))
    end = stream.read()
    place = end.rfind(b"PK\5\6")
    if place < 0 or len(end) < place + 22:
        return
    size = int.from_bytes(end[place + 12 : place + 16], "little")
    locator = end[max(0, place - 20) : place]
    if locator.startswith(b"PK\6\7"):
        stream.seek(min(int.from_bytes(locator[8:16], "little"), file_bytes))
        size = max(size if size != 0xFFFFFFFF else 0, int.from_bytes(stream.read(56)[40:48], "little"))
    if size > _MAX_LIST_BYTES:
        raise _bomb(
            path,
            f"its list of members takes {format_size(size)}; the limit is {format_size(_MAX_LIST_BYTES)}",
        )


def _check_members(members: Sequence[zipfile.ZipInfo], list_begin: int, path: Path) -> None:
    """Refuse members that share bytes or reach beyond the file, and texts of the size of weights."""
    ordered = sorted(members, key=lambda member: member.header_offset)
    begins = [*(member.header_offset for member in ordered[1:]), list_begin]
    for member, after in zip(ordered, begins, strict=False):  # an empty list begins after no member
        name, size = shortened(member.filename), max(member.file_size, member.compress_size)
        if member.header_offset + _LOCAL_HEADER_BYTES + size > after:
            raise _bomb(path, f"{name} declares {format_size(size)}, which overlaps the next member")
        if "/data/" not in member.filename and size > _MAX_RECORD_BYTES:
            limit = format_size(_MAX_RECORD_BYTES)
            raise _bomb(
                path,
                f"{name} takes {format_size(size)}; the limit for a member that is not a tensor is {limit}",
            )


def _bomb(path: Path, reason: str) -> CheckpointError:
    hint = "Download it again if it was cut short; do not use it unless you know its maker."
    return CheckpointError(path, f"would take more memory or time than weights do: {reason}.", hint=hint)


def _rehearse(path: Path, is_zip: bool, asked: dict[str, None]) -> None:
    """Run a file's pickles with nothing behind them, to see what loading it would make.

    Args:
        path: The file.
        is_zip: Whether it is an archive.
        asked: Takes the names that the pickles ask for, in order of appearance.

    Raises:
        CheckpointError: They would take more than a file of this size can be worth, or are damaged.
        UnsafeCheckpointError: They are damaged, and ask for code.
    """
    file_bytes = path.stat().st_size
    try:
        with path.open("rb") as stream:
            if not is_zip:
                for _ in range(_PICKLES_OF_LEGACY_FILE):
                    _Rehearsal(_Counted(stream, file_bytes), file_bytes, asked).load()
                return
            with zipfile.ZipFile(stream) as archive:
                for member in filter(_is_description, archive.infolist()):
                    data = _stored_bytes(stream, member)
                    _Rehearsal(_Counted(io.BytesIO(data), len(data)), file_bytes, asked).load()
    except _TooMuch as error:
        raise _bomb(path, str(error)) from error
    except _DAMAGE_ERRORS as error:
        damage = pickle.UnpicklingError(str(error) or type(error).__name__)
        raise _refused(path, damage, asked) from error


def _is_description(member: zipfile.ZipInfo) -> bool:
    """Whether PyTorch may take it for `data.pkl`, which it looks for in any case."""
    return member.filename.lower().endswith("data.pkl") and "/data/" not in member.filename


def _stored_bytes(stream: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """A member as PyTorch reads it, whatever name and sum stand before its bytes."""
    stream.seek(member.header_offset + _LOCAL_HEADER_BYTES - 4)
    stream.seek(sum(struct.unpack("<HH", stream.read(4))), os.SEEK_CUR)
    return stream.read(member.file_size)


class _TooMuch(Exception):
    """Says what a pickle asks for."""


class _Counted:
    """A pickle's bytes, no more than the file has, and no more opcodes than a checkpoint needs."""

    def __init__(self, stream: BinaryIO | io.BytesIO, file_bytes: int) -> None:
        self._stream, self._file_bytes, self._opcodes = stream, file_bytes, 0
        self.readline = stream.readline

    def read(self, size: int) -> bytes:
        if size == 1:
            self._opcodes += 1
            if self._opcodes > _MAX_OPCODES:
                raise _TooMuch(f"its pickle has more than {_MAX_OPCODES:,} steps")
        elif size > self._file_bytes:
            raise EOFError(f"a value of {format_size(size)} is cut short")
        return self._stream.read(size)


@dataclass(eq=False, slots=True)
class _StandIn:
    """Stands for a name or for the result of calling it: a tensor of `elements`, or an object that takes no memory."""

    name: str
    elements: int = 0


class _Rehearsal(pickle._Unpickler):
    """Run a pickle as PyTorch's `weights_only` would, and add up what its calls would make."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: _Counted, file_bytes: int, asked: dict[str, None]) -> None:
        super().__init__(stream, encoding="latin1")
        self._asked = asked
        self._file_bytes = file_bytes
        self._left = file_bytes + _MAX_EXTRA_BYTES
        self._storages: set[str | bytes] = set()
        self._declared = 0

    def find_class(self, module: str, name: str) -> _StandIn:
        self._asked[f"{module}.{name}"] = None
        return _StandIn(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _StandIn:
        kind, key, numbers = (
            (pid[1], pid[2], pid[4]) if isinstance(pid, tuple) and len(pid) > 4 else (None, 0, 0)
        )
        if isinstance(kind, _StandIn) and isinstance(key, str | bytes) and isinstance(numbers, int):
            declared = numbers * _ITEM_BYTES.get(kind.name, 1)
            self._declared += 0 if key in self._storages else declared
            self._storages.add(key)
            if max(declared, self._declared) > self._file_bytes:
                raise _TooMuch(f"the storage {shortened(key)} declares {shortened(declared)} bytes")
        return _StandIn("storage")

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _StandIn) or not isinstance(arguments, tuple):
            raise TypeError(f"a {type(function).__name__} is called")
        self.stack.append(self._made(function.name, arguments))

    def _made(self, name: str, arguments: tuple[Any, ...]) -> object:
        if name.startswith("torch._utils._rebuild_tensor"):
            return _StandIn(name, _product(arguments[2]))
        if name.startswith("torch._utils._rebuild_parameter"):
            return arguments[0]
        if name == "torch._tensor._rebuild_from_type_v2" and isinstance(arguments[0], _StandIn):
            return self._made(arguments[0].name, tuple(arguments[2]))
        if name in _INERT or name in ("collections.OrderedDict", "collections.Counter"):
            if not arguments:
                return {}
            if name != "collections.Counter":
                self._check_items(name, arguments)
        if name in _ALLOCATING_CALLS or name.endswith(("Tensor", "Storage")):
            self._take(name, arguments)
        return _StandIn(
            name, max((each.elements for each in arguments if isinstance(each, _StandIn)), default=0)
        )

    def _take(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count a call whose result may be larger than its arguments."""
        wanted = _product(arguments)
        for argument in arguments:
            if isinstance(argument, _StandIn):
                wanted += argument.elements
            elif isinstance(argument, str | bytes):
                wanted += len(argument)
            elif isinstance(argument, tuple):
                wanted += _product(argument)
            elif isinstance(argument, list):
                wanted += len(argument)
                if not all(map(_is_plain_key, argument)):
                    raise _TooMuch(f"{name} is called with nested values")
        self._left -= wanted
        if self._left < 0:
            raise _TooMuch(f"{name} is called for {shortened(wanted)} values and more")

    def _check_items(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Refuse a dictionary made of items, as Python 2 wrote an `OrderedDict`, if a key of theirs is nested."""
        items = arguments[0] if len(arguments) == 1 else None
        pairs = items if isinstance(items, list) else [None]
        if not all(isinstance(pair, list | tuple) and pair and _is_plain_key(pair[0]) for pair in pairs):
            raise _TooMuch(f"{name} is made of keys that are nested")

    def build(self) -> None:
        """Take an object's attributes, as a dictionary whose keys were checked when they were set."""
        attributes = self.stack.pop()
        if isinstance(self.stack[-1], dict) and not isinstance(attributes, dict):
            raise _TooMuch("the attributes of a dictionary are not a dictionary")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise TypeError(f"an item is set in a {type(self.stack[-1]).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_plain_key(key) and not (isinstance(key, tuple) and all(map(_is_plain_key, key))):
                raise _TooMuch("a key of its dictionaries is nested")
            self.stack[-1][key] = value

    dispatch |= dict.fromkeys((pickle.REDUCE[0], pickle.NEWOBJ[0]), call)
    dispatch |= {pickle.BUILD[0]: build, pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items}


_ITEM_BYTES: Final = {f"torch.{kind.__name__}": dtype.itemsize for dtype, kind in STORAGES.items()}
_ALLOCATING_CALLS: Final = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "collections.Counter",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._utils._rebuild_qtensor",
        "torch.nn.parameter.Parameter",
    }
)


def _product(sizes: object) -> int:
    """The number of elements that sizes mean; 0 of what holds none."""
    if not isinstance(sizes, tuple) or len(sizes) > _MAX_DIMENSIONS:
        return 0
    numbers = [abs(size) for size in sizes if type(size) is int]
    return math.prod(numbers) if numbers else 0


def _is_plain_key(key: object) -> bool:
    return key is None or isinstance(key, str | bytes | int | float | _StandIn)


def _refused(path: Path, error: pickle.UnpicklingError, asked: Iterable[str]) -> CheckpointError:
    """The error for what `weights_only=True` refused: code, or only damage."""
    named = re.findall(r"GLOBAL ([\w.]+)", str(error))
    wanted = list(dict.fromkeys([*named, *filter(_is_foreign, asked)]))
    if not wanted:
        return _damaged(path, error)
    return UnsafeCheckpointError(
        path,
        f"asks to run code that tensors do not need: {first_few(wanted, _MAX_NAMED)}. Nothing was run.",
        hint="Ask its maker for a .safetensors file, or for a checkpoint with the state dict alone.",
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = str(error) or type(error).__name__
    inner = re.search(r"WeightsUnpickler error: (.*)", text)
    said = inner[1].strip() if inner else text.splitlines()[0]
    reason = said[:_MAX_REASON_LENGTH] or "it is not a pickle"
    return CheckpointError(path, f"is damaged or not a PyTorch checkpoint ({reason}).", hint=_DAMAGED_HINT)


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
    if not _is_sound_zip(path):
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


def _is_foreign(name: str) -> bool:
    """Whether it is a name that neither tensors nor settings beside them need."""
    return not name.startswith(_TENSOR_CODE) and name not in _INERT and not _is_torch_type(name)


def _is_torch_type(name: str) -> bool:
    """`torch.float32`, `torch.FloatStorage`, `torch.Size`: plain names of torch's top level."""
    module, _, last = name.rpartition(".")
    return module == "torch" and (last.islower() or last.endswith("Storage") or last in {"Size", "Tensor"})


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
        f"holds weights under several keys: {first_few([shortened(key) for key in keys], _MAX_NAMED)}.",
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


def save_torch(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` with `torch.save`: to a temporary file, flushed, renamed over the target.

    Args:
        path: The target (`.ckpt`, `.pt`).
        state: Tensors, numbers, texts and containers of them, so that `weights_only=True` reads it.

    Raises:
        WriteError: The target cannot be written; it is as it was before.
    """
    with atomic_path(path) as temporary, temporary.open("r+b") as stream:
        try:
            torch.save(dict(state), stream)
        except RuntimeError as error:
            # After a refused write PyTorch finds its archive unfinished, and hides the reason behind that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor that is still to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize


class StreamingTorchWriter:
    """Write a state dict as `torch.save` would, with one tensor in memory at a time.

        with StreamingTorchWriter("out.ckpt", specs) as writer:
            for name in specs:
                writer.write(name, compute(name))

    The file is a dictionary of contiguous tensors, bare or under the name `wrapper`; `torch.load` reads it with
    `weights_only=True` and with `mmap=True`. Leaving the block without an exception flushes it to
    the disk and renames it over the target; with one (Ctrl-C too) the temporary file is removed and the target stays as
    it was. The same tensors give the same bytes.

    Args:
        path: The target.
        specs: What will be written, in the order that the dictionary shall have.
        wrapper: The key of an outer dictionary that holds only this one, such as "state_dict"; None for no outer one.

    Raises:
        WriteError: A type that such a file cannot hold; on entering, the target cannot be written; on leaving,
            tensors are missing.
    """

    def __init__(
        self, path: str | os.PathLike[str], specs: Mapping[str, TensorSpec], wrapper: str | None = None
    ) -> None:
        self.path = Path(path)
        self._wrapper = wrapper
        self._numbers = {name: number for number, name in enumerate(specs)}
        self._specs = dict(specs)
        for name, spec in specs.items():
            if spec.dtype not in STORAGES:
                raise WriteError(
                    self.path,
                    f"the tensor {shortened(name)} is of {spec.dtype}, which this writer does not support.",
                    hint="Convert it to a common type, or write .safetensors.",
                )

    def __enter__(self) -> "StreamingTorchWriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self.path))
            self._file = stack.enter_context(temporary.open("r+b"))
            self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
            stack.callback(_close_unfinished, self._archive)
            self._put("data.pkl", description(self._specs, self._wrapper))
            self._put("byteorder", sys.byteorder.encode())
            self._stack = stack.pop_all()
        self._left = set(self._specs)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the bytes of one tensor; its memory may be freed afterwards.

        Args:
            name: One of the names in `specs`, not written before; in any order.
            tensor: Of the type and shape in `specs`; any strides and device.

        Raises:
            WriteError: The tensor does not match `specs`, or the disk refused it.
        """
        if name not in self._left:
            raise WriteError(
                self.path,
                f"the tensor {shortened(name)} was not in the list of tensors to write, or is written twice.",
            )
        spec = self._specs[name]
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            message = (
                f"the tensor {shortened(name)} is {tensor.dtype} {list(tensor.shape)}, "
                f"but the list says {spec.dtype} {list(spec.shape)}."
            )
            raise WriteError(self.path, message)
        try:
            with self._archive.open(self._member(f"data/{self._numbers[name]}", spec.nbytes), "w") as stream:
                for piece in iter_tensor_bytes(tensor):
                    stream.write(piece)
        except OSError as error:
            message = f"cannot be written ({reason_of(error)})."
            raise WriteError(self.path, message, hint=writing_hint(error)) from error
        self._left.remove(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if self._left:
                message = f"{len(self._left)} tensors were not written, first {shortened(min(self._left))}."
                raise WriteError(self.path, message)
            self._put("version", b"3\n")
            self._archive.close()
            self._file.flush()

    def _put(self, name: str, content: bytes) -> None:
        with self._archive.open(self._member(name, len(content)), "w") as stream:
            stream.write(content)

    def _member(self, name: str, nbytes: int) -> zipfile.ZipInfo:
        """The next member, padded such that its bytes begin aligned; without a date, so that files are equal."""
        member = zipfile.ZipInfo(f"archive/{name}")
        member.file_size = nbytes
        is_large = nbytes * 1.05 > zipfile.ZIP64_LIMIT  # zipfile's own rule for the long header
        begin = self._file.tell() + _LOCAL_HEADER_BYTES + len(member.filename) + _FIELD_HEADER_BYTES
        padding = -(begin + (_ZIP64_BYTES if is_large else 0)) % _ALIGNMENT
        member.extra = _PADDING_ID + padding.to_bytes(2, "little") + b"Z" * padding
        return member


def _close_unfinished(archive: zipfile.ZipFile) -> None:
    """Close an archive; what that says of one that is not finished is about a file that goes anyway."""
    with suppress(OSError, ValueError):
        archive.close()


def description(specs: Mapping[str, TensorSpec], wrapper: str | None = None) -> bytes:
    """The content of `data.pkl`: a dictionary of contiguous tensors on the CPU, the bytes of the n-th in `data/n`.

    Args:
        specs: By name, in the order that the dictionary shall have; of the types in `STORAGES`.
        wrapper: The key of an outer dictionary; None for no outer one.
    """
    stream = io.BytesIO()
    state = {
        name: _TensorToCome(_StorageToCome(str(number), spec))
        for number, (name, spec) in enumerate(specs.items())
    }
    _Describer(stream, protocol=_PROTOCOL).dump(state if wrapper is None else {wrapper: state})
    return stream.getvalue()


@dataclass(frozen=True)
class _StorageToCome:
    key: str
    spec: TensorSpec


@dataclass(frozen=True)
class _TensorToCome:
    storage: _StorageToCome


class _Describer(pickle.Pickler):
    """Pickle tensors that are still to come exactly as PyTorch pickles tensors that are there."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageToCome):
            return None
        return ("storage", STORAGES[value.spec.dtype], value.key, "cpu", value.spec.numel)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _TensorToCome):
            return NotImplemented
        shape = value.storage.spec.shape
        rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor_v2
        return rebuild, (
            value.storage,
            0,
            shape,
            torch.empty(shape, device="meta").stride(),
            False,
            OrderedDict(),
        )
