"""Strict JSON that keeps every float.

JSON has no NaN and no infinity. They are written as an object with the one key `$float`, whose value is
"nan", "inf" or "-inf". An object of the caller's that looks so is marked with one more `$`.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_TAG = "$float"
_TAG_OR_ESCAPED = re.compile(r"\$+float")
_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dumps(value: object) -> str:
    """JSON text of plain values: mappings with string keys, sequences, strings, numbers, bools, None.

    Raises:
        TypeError: A value of another kind, with the place where it is.
    """
    return json.dumps(_encode(value, "$"), allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """The plain values in JSON text that `dumps` wrote.

    Raises:
        ValueError: It is not JSON (`json.JSONDecodeError`), not UTF-8, or holds a bare NaN.
        RecursionError: It is nested deeper than any run.
    """
    return _decode(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _encode(value: object, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: _name_of(value)}
    if isinstance(value, Mapping):
        encoded = {_key(key, place): _encode(item, f"{place}.{key}") for key, item in value.items()}
        return {f"${key}": item for key, item in encoded.items()} if _looks_tagged(encoded) else encoded
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{place} is of type {type(value).__name__}, which JSON lacks")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: _decode(item) for key, item in value.items()}
    if not _looks_tagged(decoded):
        return decoded
    [(key, item)] = decoded.items()
    if key != _TAG:
        return {key.removeprefix("$"): item}
    if item not in _BY_NAME:
        raise ValueError(f"{item!r} is not the name of a float")
    return _BY_NAME[item]


def _looks_tagged(mapping: Mapping[str, Any]) -> bool:
    return len(mapping) == 1 and _TAG_OR_ESCAPED.fullmatch(next(iter(mapping))) is not None


def _key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{place} has a key of type {type(key).__name__}, which JSON lacks")
    return key


def _name_of(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
