"""What a PyTorch file asks for, seen before it is loaded: code, or more memory and time than weights take.

A file that asks to run code is refused with an `UnsafeCheckpointError` that names the code; none of it is run
(`refused`).

`weights_only=True` runs no code but still allocates whatever a pickle asks for: a file of a kilobyte may ask for a
storage of terabytes, or for a key that takes years to hash. So the archive's list is checked before any member is read
(`is_sound_zip`), and the pickle is first run with stand-ins in place of all objects (`rehearse`).
"""

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

from sigmascope.checkpoints.checkpoint import shortened
from sigmascope.checkpoints.torch_writer import LOCAL_HEADER_BYTES, STORAGES
from sigmascope.errors import CheckpointError, UnsafeCheckpointError
from sigmascope.units import first_few, format_size

DAMAGED_HINT = "Download it again or make it again."
MAX_NAMED = 5
_MAX_REASON_LENGTH = 160

# Names that tensors ask for.
_TENSOR_CODE = ("torch._utils.", "torch._tensor.", "collections.OrderedDict", "torch.storage.")
INERT: Final = frozenset(
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
DAMAGE_ERRORS: Final = (
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


def is_sound_zip(path: Path) -> bool:
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
        raise CheckpointError(path, message, hint=DAMAGED_HINT) from error
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
            f"is a zip archive without a checkpoint of its own; it contains {first_few([shortened(name) for name in names], MAX_NAMED)}.",
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
        if member.header_offset + LOCAL_HEADER_BYTES + size > after:
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


def rehearse(path: Path, is_zip: bool, asked: dict[str, None]) -> None:
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
    except DAMAGE_ERRORS as error:
        damage = pickle.UnpicklingError(str(error) or type(error).__name__)
        raise refused(path, damage, asked) from error


def _is_description(member: zipfile.ZipInfo) -> bool:
    """Whether PyTorch may take it for `data.pkl`, which it looks for in any case."""
    return member.filename.lower().endswith("data.pkl") and "/data/" not in member.filename


def _stored_bytes(stream: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """A member as PyTorch reads it, whatever name and sum stand before its bytes."""
    stream.seek(member.header_offset + LOCAL_HEADER_BYTES - 4)
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
        if name in INERT or name in ("collections.OrderedDict", "collections.Counter"):
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

    def refuse_bytearray(self) -> None:
        """PyTorch reads none; Python would make room for its length, whatever the file holds of it."""
        raise pickle.UnpicklingError("a bytearray is no part of a checkpoint")

    dispatch |= {pickle.BYTEARRAY8[0]: refuse_bytearray}
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


def refused(path: Path, error: pickle.UnpicklingError, asked: Iterable[str]) -> CheckpointError:
    """The error for what `weights_only=True` refused: code, or only damage."""
    named = re.findall(r"GLOBAL ([\w.]+)", str(error))
    wanted = list(dict.fromkeys([*named, *filter(_is_foreign, asked)]))
    if not wanted:
        return damaged(path, error)
    return UnsafeCheckpointError(
        path,
        f"asks to run code that tensors do not need: {first_few(wanted, MAX_NAMED)}. Nothing was run.",
        hint="Ask its maker for a .safetensors file, or for a checkpoint with the state dict alone.",
    )


def damaged(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that is no sound pickle, with PyTorch's reason."""
    text = str(error) or type(error).__name__
    inner = re.search(r"WeightsUnpickler error: (.*)", text)
    said = inner[1].strip() if inner else text.splitlines()[0]
    if re.search(
        r"Unsupported operand 1(?:4[0-9]|5[01])\b", text
    ):  # 8c to 97, which protocols 4 and 5 brought
        return CheckpointError(
            path,
            "is pickled in protocol 4 or 5, of which PyTorch reads only a part without running code.",
            hint="Save it again without pickle_protocol, or as .safetensors.",
        )
    reason = said[:_MAX_REASON_LENGTH] or "it is not a pickle"
    return CheckpointError(path, f"is damaged or not a PyTorch checkpoint ({reason}).", hint=DAMAGED_HINT)


def _is_foreign(name: str) -> bool:
    """Whether it is a name that neither tensors nor settings beside them need."""
    return not name.startswith(_TENSOR_CODE) and name not in INERT and not _is_torch_type(name)


def _is_torch_type(name: str) -> bool:
    """`torch.float32`, `torch.FloatStorage`, `torch.Size`: plain names of torch's top level."""
    module, _, last = name.rpartition(".")
    return module == "torch" and (last.islower() or last.endswith("Storage") or last in {"Size", "Tensor"})
