"""Turn what a host hands over as a fact into plain JSON values that keep nothing alive."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_DEEPEST = 12
_LONGEST_TEXT = 500


def as_json(value: object, depth: int = 0) -> Any:
    """Return the value as str, int, float, bool, None, list or dict with str keys.

    NaN and the infinities stay: a saved run keeps them. A tensor becomes its shape, dtype and device, since
    reading its values could wait for the accelerator. What has no JSON form becomes its text, cut at 500
    characters; what is nested deeper than 12 levels (or in itself) becomes the name of its type.
    """
    plain = _scalar(value)
    if plain is not _NO_SCALAR:
        return plain
    if depth < _DEEPEST:
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            return {_key(key): as_json(item, depth + 1) for key, item in value.items()}
        if isinstance(value, AbstractSet):
            return sorted((as_json(item, depth + 1) for item in value), key=repr)
        if isinstance(value, list | tuple):
            return [as_json(item, depth + 1) for item in value]
        if isinstance(value, np.ndarray):
            if value.size > _LONGEST_TEXT:
                return f"<array {value.shape} {value.dtype}>"
            return as_json(value.tolist(), depth + 1)
    return _short(str(value)) if depth < _DEEPEST else f"<{type(value).__name__}>"


class _NoScalar:
    pass


_NO_SCALAR = _NoScalar()


def _scalar(value: object) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, np.generic):
        return as_json(value.item())
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "device": str(value.device)}
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    return _NO_SCALAR


def _key(key: object) -> str:
    return key if type(key) is str else _short(str(key))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
