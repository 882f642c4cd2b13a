"""Nested state (an optimizer's, a schedule's, a generator's) as JSON and tensors, and back: nothing is pickled.

Every container becomes a mapping with one key that names its kind, so that a tuple comes back as a tuple and
an optimizer's integer keys as integers. Floats survive JSON bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigmascope.errors import CheckpointError

Packed = Any
"""JSON values."""


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Packed:
    """Turn nested state into JSON values; its tensors go to `tensors`, named after where they were.

    Args:
        value: Dicts, lists, tuples, tensors, arrays, numbers, texts, None.
        tensors: Filled.
        path: What the value is called, which its tensors' names begin with.

    Raises:
        TypeError: Names the place of anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(value.copy())
        return {"array": path}
    if isinstance(value, np.generic):
        return pack(value.item(), tensors, path)
    if isinstance(value, Mapping):
        return {"dict": [[key, pack(item, tensors, f"{path}.{key}")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{path}.{index}") for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def unpack(packed: Packed, tensors: Mapping[str, Tensor], file: str) -> Any:
    """Give back what `pack` was given.

    Args:
        packed: What it returned.
        tensors: What it filled.
        file: Named in errors.

    Raises:
        CheckpointError: A tensor is missing, or the values are not of `pack`.
    """
    if not isinstance(packed, dict):
        return packed
    kind, content = next(iter(packed.items()), (None, None))
    match kind, content:
        case "tensor" | "array", str():
            return _tensor(kind, content, tensors, file)
        case "dict", list():
            return {key: unpack(item, tensors, file) for key, item in content}
        case "list", list():
            return [unpack(item, tensors, file) for item in content]
        case "tuple", list():
            return tuple(unpack(item, tensors, file) for item in content)
    raise CheckpointError(
        file, f"holds state of an unknown kind {kind!r}.", hint="Resume from another checkpoint."
    )


def _tensor(kind: str, name: str, tensors: Mapping[str, Tensor], file: str) -> Any:
    if name not in tensors:
        raise CheckpointError(file, f"the tensor {name} is missing.", hint="Resume from another checkpoint.")
    return tensors[name] if kind == "tensor" else tensors[name].numpy()
