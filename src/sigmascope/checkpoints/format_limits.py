"""What the safetensors format can hold, and the refusal of what it cannot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigmascope.checkpoints.dtypes import to_file
from sigmascope.checkpoints.layout import FileEntry
from sigmascope.checkpoints.paths import shortened
from sigmascope.errors import WriteError


def storable_entry(path: Path, name: str, tensor: Tensor) -> FileEntry:
    """What the header will say of a tensor.

    Raises:
        WriteError: The format keeps the name or cannot hold it, or it has no such type of tensor.
    """
    if name == "__metadata__":
        raise WriteError(path, "no tensor can be named __metadata__: the format keeps the name.")
    check_encodable(path, "the tensor", name)
    known = to_file(tensor.dtype, tuple(tensor.shape))
    if known is None or tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        message = f"safetensors cannot hold the tensor {shortened(name)} ({kind})."
        raise WriteError(path, message, hint="Convert it to a dense tensor of a common type.")
    return FileEntry(name, *known)


def checked_metadata(path: Path, metadata: Mapping[Any, Any]) -> dict[str, str]:
    """A copy of header metadata that is text to text.

    Raises:
        WriteError: It is not, or UTF-8 cannot hold it.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            message = f"the metadata {key!r}: {value!r} is not text to text."
            raise WriteError(path, message, hint="Give metadata as str; put other values through json.dumps.")
        for text in (key, value):
            check_encodable(path, "the metadata", text)
    return dict(metadata)


def check_encodable(path: Path, what: str, text: str) -> None:
    """Refuse what UTF-8 cannot hold, such as a file name that the system could not decode.

    Raises:
        WriteError: With `what` and the text.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{what} {shortened(text)} cannot be written as UTF-8."
        raise WriteError(path, message, hint="Rename it; header texts must be valid Unicode.") from error
