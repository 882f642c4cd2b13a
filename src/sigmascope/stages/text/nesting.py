"""Tensors and plain values in any nesting of mappings, sequences, named tuples and dataclasses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DEEPEST, _MOST_TENSORS = 12, 4096


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor and the names and indices on the way to it."""

    path: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The innermost name on the way to it; indices are no names."""
        return next((part for part in reversed(self.path) if not part.isdigit()), "")


def as_tensor(thing: object) -> Tensor | None:
    """The tensor that a thing is; an array becomes one. None for anything else."""
    if isinstance(thing, np.ndarray):
        return _of_array(thing)
    return thing if isinstance(thing, Tensor) else None


def _of_array(array: NDArray[Any]) -> Tensor | None:
    """The same memory, or a copy where PyTorch does not take it over as it lies; None for other things than numbers."""
    try:
        if array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0:
            return torch.from_numpy(array)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError:
        return None


def leaves_of(thing: object) -> Iterator[Leaf]:
    """Every tensor in a nesting with the names on the way to it; each object is entered once."""
    todo: list[tuple[tuple[str, ...], object]] = [((), thing)]
    seen: set[int] = set()
    given = 0
    while todo and given < _MOST_TENSORS:
        path, item = todo.pop()
        tensor = as_tensor(item)
        if tensor is not None:
            given += 1
            yield Leaf(path, tensor)
        elif len(path) < _DEEPEST and id(item) not in seen:
            seen.add(id(item))
            todo += [((*path, name), inner) for name, inner in reversed(_items(item))]


def _items(thing: object) -> list[tuple[str, object]]:
    if isinstance(thing, Mapping):
        return [(str(key), value) for key, value in thing.items()]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return list(zip(thing._fields, thing, strict=False))
    if isinstance(thing, list | tuple):
        return [(str(index), value) for index, value in enumerate(thing)]
    if is_dataclass(thing) and not isinstance(thing, type):
        return [(one.name, getattr(thing, one.name)) for one in fields(thing)]
    return []


def plain_values(thing: object) -> dict[str, Any]:
    """The named scalars of a conditioning: strength, area, start and end of its schedule, guidance and so on."""
    if not isinstance(thing, Mapping):
        return {}
    return {str(name): value for name, value in thing.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 64 and all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bool | int | float)
