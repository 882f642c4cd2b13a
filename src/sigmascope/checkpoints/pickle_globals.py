"""Which functions and classes a PyTorch checkpoint asks for, found without running any of it."""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import BinaryIO

_TEXT_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "UNICODE", "BINUNICODE8", "STRING", "SHORT_BINSTRING"}
_MEMO_OPCODES = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_PICKLES_BEFORE_STORAGES = 4  # of the older format: magic number, protocol, system, the object itself
_HARMLESS = ("torch._utils.", "torch._tensor.", "collections.OrderedDict", "torch.storage.")


def foreign_globals(path: Path) -> list[str]:
    """Names of what a checkpoint's pickle asks for beyond tensors, in order of appearance.

    Args:
        path: A zip that `torch.save` wrote, or a bare pickle.

    Returns:
        Dotted names; as many as are found before the pickle turns out to be damaged.
    """
    found: dict[str, None] = {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith(".pkl"):
                        _collect(io.BytesIO(archive.read(name)), found)
        else:
            with path.open("rb") as stream:
                for _ in range(_PICKLES_BEFORE_STORAGES):
                    _collect(stream, found)
    except (OSError, ValueError, zipfile.BadZipFile, RuntimeError, MemoryError):
        pass  # what was found so far is the answer
    return [name for name in found if not name.startswith(_HARMLESS) and not _is_torch_type(name)]


def _collect(stream: BinaryIO | io.BytesIO, found: dict[str, None]) -> None:
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in _TEXT_OPCODES:
                texts = [*texts[-1:], str(argument)]
            elif opcode.name in {"GLOBAL", "INST"}:
                found[str(argument).replace(" ", ".")] = None
            elif opcode.name == "STACK_GLOBAL" and len(texts) == 2:
                found[".".join(texts)] = None
            elif opcode.name not in _MEMO_OPCODES:
                texts = []
    except (ValueError, IndexError, OverflowError, MemoryError):
        return


def _is_torch_type(name: str) -> bool:
    """`torch.float32`, `torch.FloatStorage`, `torch.Size`: plain names of torch's top level."""
    module, _, last = name.rpartition(".")
    return module == "torch" and (last.islower() or last.endswith("Storage") or last in {"Size", "Tensor"})
