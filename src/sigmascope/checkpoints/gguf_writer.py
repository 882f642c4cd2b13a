"""Write a GGUF file again with some tensors changed (`GgufRewriter`): its fields byte for byte, and texts beside them."""

import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from torch import Tensor

from sigmascope.checkpoints.checkpoint import iter_tensor_bytes
from sigmascope.checkpoints.gguf import GgufCheckpoint
from sigmascope.checkpoints.safetensors import require_space, telling_full_disk, write_all
from sigmascope.errors import WriteError
from sigmascope.files import atomic_path

_MAGIC: Final = b"GGUF"
_STRING: Final = 8


class GgufRewriter:
    """Writes all tensors of a GGUF file, one at a time and in any order, of the same shapes in the same order.

    Leaving the block without an exception renames the file over the target; with one (Ctrl-C too) nothing is left.

    Args:
        target: The file to write.
        source: The open file that it is made from.
        kinds: The gguf package's new element types of tensors that get another one.
        added_bytes: By how many bytes tensors change their size; of others it stays.
        texts: Fields to add or to replace.

    Attributes:
        file_bytes: Of the whole file.

    Raises:
        WriteError: On entering, if the target cannot be written or the disk has no room for it.
    """

    def __init__(
        self,
        target: Path,
        source: GgufCheckpoint,
        kinds: Mapping[str, int],
        added_bytes: Mapping[str, int],
        texts: Mapping[str, str],
    ) -> None:
        header = source.header
        sizes = {key: source.place_of(key)[1] + added_bytes.get(key, 0) for key in source}
        aligned = {key: -(-size // header.alignment) * header.alignment for key, size in sizes.items()}
        in_file = sorted(header.tensors, key=lambda entry: entry.offset)
        offsets: dict[str, int] = {}
        position = 0
        for entry in in_file:
            offsets[entry.name] = position
            position += aligned[entry.name]
        infos = b"".join(
            _text(entry.name)
            + struct.pack(
                f"<I{len(entry.shape)}QIQ",
                len(entry.shape),
                *reversed(entry.shape),
                kinds.get(entry.name, entry.kind),
                offsets[entry.name],
            )
            for entry in header.tensors
        )
        with source.path.open("rb") as stream:
            kept = []
            for name, (begin, end) in header.spans.items():
                if name not in texts:
                    stream.seek(begin)
                    kept.append(stream.read(end - begin))
        fields = [
            *kept,
            *(_text(name) + struct.pack("<I", _STRING) + _text(text) for name, text in texts.items()),
        ]
        head = (
            _MAGIC
            + struct.pack("<IQQ", header.version, len(header.tensors), len(fields))
            + b"".join(fields)
            + infos
        )
        start = -(-len(head) // header.alignment) * header.alignment
        self._target, self._head, self._sizes = target, head.ljust(start, b"\0"), sizes
        self._offsets = {key: start + offset for key, offset in offsets.items()}
        self.file_bytes = start + position

    def __enter__(self) -> "GgufRewriter":
        with ExitStack() as stack:
            temporary = stack.enter_context(atomic_path(self._target))
            require_space(self._target, temporary.parent, self.file_bytes)
            self._file = stack.enter_context(temporary.open("r+b", buffering=0))
            with telling_full_disk(self._target, self.file_bytes):
                self._file.truncate(self.file_bytes)
                write_all(self._file, memoryview(self._head))
            self._stack = stack.pop_all()
        return self

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one tensor as its bytes are in memory.

        Raises:
            WriteError: It has another size than was said, or the disk is full.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes != self._sizes[key]:
            raise WriteError(self._target, f"{key} takes {nbytes} bytes, not {self._sizes[key]}.")
        with telling_full_disk(self._target, nbytes):
            self._file.seek(self._offsets[key])
            for piece in iter_tensor_bytes(tensor):
                write_all(self._file, piece)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded
