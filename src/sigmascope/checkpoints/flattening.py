"""Nested conditionings as named tensors.

A tensor is named by the way to it, joined by dots: the key in a mapping (a diffusers or transformers output is one),
the field of a dataclass or named tuple, the number in a list or tuple. An entry `[tensor, {…}]` of a ComfyUI
conditioning names its tensor `cond`: `[[tensor, {"pooled_output": …}]]` under `positive` becomes `positive.0.cond` and
`positive.0.pooled_output`. None is passed over. A name that is taken already gets `~2`, `~3`, ….
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.errors import ConfigError

TENSOR_KEY = "$tensor"
"""In a skeleton, `{"$tensor": name}` stands where the tensor of that name was."""

_DEEPEST = 32
_PROMPT_WORDS = ("prompt", "caption")
_NOT_THE_TEXT = ("embed", "hash", "privacy", "mask", "length", "count")


@dataclass(slots=True)
class Flattened:
    """Tensors by name, and what was around them: the nesting with its other values, as JSON has them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    skeleton: dict[str, Any] = field(default_factory=dict)


def flatten(nested: Any, redact: Callable[[str], str], *, private: bool) -> Flattened:
    """Find all tensors in a nesting and name them.

    Args:
        nested: A mapping of names to tensors, arrays or conditionings; anything else is named `tensor`.
        redact: Takes what must not be kept out of a text.
        private: Replace texts that are called prompt or caption by `<text>`.

    Returns:
        The tensors (arrays as tensors that share their memory), and for each name that was no bare tensor the
        nesting around them. Objects of no JSON kind are the name of their type.

    Raises:
        ConfigError: There is no tensor in it, or it is nested more than 32 deep.
    """
    walk = _Walk(redact, private)
    top = nested if isinstance(nested, Mapping) else {"tensor": nested}
    for key, value in top.items():
        name = redact(str(key))
        around = walk.visit(name, str(key), value, ())
        if around is not None and not _is_tensor(value):
            walk.found.skeleton[name] = around
    if not walk.found.tensors:
        raise ConfigError(
            "There is no tensor in what should be saved.", hint="Give a mapping of names to tensors."
        )
    return walk.found


def plain_metadata(
    metadata: Mapping[str, Any], redact: Callable[[str], str], *, private: bool
) -> dict[str, Any]:
    """Metadata as JSON has it, by the rules of `flatten`; of a tensor in it remain shape and type.

    Raises:
        ConfigError: It is nested more than 32 deep.
    """
    walk = _Described(redact, private)
    return {redact(key): walk.visit(key, key, value, ()) for key, value in metadata.items()}


class _Walk:
    def __init__(self, redact: Callable[[str], str], private: bool) -> None:
        self.found = Flattened()
        self._redact = redact
        self._private = private

    def visit(self, name: str, key: str, value: Any, above: tuple[int, ...]) -> Any:
        """Keep the tensors at and below `value`; give what is left of it as JSON."""
        if _is_tensor(value):
            return {TENSOR_KEY: self._keep(name, value)}
        children = _children(value)
        if children is None:
            return self._plain(key, value)
        if id(value) in above:
            return f"<{type(value).__name__} in itself>"
        if len(above) >= _DEEPEST:
            raise ConfigError(
                f"{name} is nested more than {_DEEPEST} deep.", hint="Save the tensors in it by name."
            )
        inside = (*above, id(value))
        if _is_comfyui_entry(value):
            return [
                self.visit(f"{name}.cond", "cond", value[0], inside),
                self.visit(name, key, value[1], inside),
            ]
        named = _is_named(value)
        visited = []
        for child, item in children:
            label = self._redact(child)
            # A text in a list called `prompts` is a prompt as well.
            visited.append((label, self.visit(f"{name}.{label}", child if named else key, item, inside)))
        return dict(visited) if named else [item for _, item in visited]

    def _keep(self, name: str, value: Tensor | NDArray[Any]) -> str:
        """Take a tensor in under a free name."""
        unique, number = name, 1
        while unique in self.found.tensors:
            number += 1
            unique = f"{name}~{number}"
        self.found.tensors[unique] = value if isinstance(value, Tensor) else _as_tensor(value)
        return unique

    def _plain(self, key: str, value: Any) -> Any:
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str | PurePath):
            return "<text>" if self._private and _names_a_prompt(key) else self._redact(str(value))
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        return f"<{type(value).__name__}>"


class _Described(_Walk):
    """The same walk where tensors are described and not kept."""

    def visit(self, name: str, key: str, value: Any, above: tuple[int, ...]) -> Any:
        if _is_tensor(value):
            return f"<{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}>"
        return super().visit(name, key, value, above)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # text, dates, negative strides, the other byte order
        native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
        try:
            return torch.from_numpy(native)
        except TypeError as error:
            raise ConfigError(
                f"An array of {array.dtype} cannot be saved.", hint="Convert it to numbers."
            ) from error


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What is inside, by key; None for what has no inside."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(map(str, value._fields), value, strict=True))
    if isinstance(value, list | tuple):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, np.ndarray):
        return [(str(index), item) for index, item in enumerate(value.ravel().tolist())]
    if isinstance(value, AbstractSet):
        return [(str(index), item) for index, item in enumerate(sorted(value, key=repr))]
    return None


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) or is_dataclass(value) or hasattr(value, "_fields")


def _is_comfyui_entry(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and not hasattr(value, "_fields")
        and len(value) == 2
        and _is_tensor(value[0])
        and isinstance(value[1], Mapping)
    )


def _names_a_prompt(key: str) -> bool:
    lowered = key.lower()
    return any(word in lowered for word in _PROMPT_WORDS) and not any(
        word in lowered for word in _NOT_THE_TEXT
    )
