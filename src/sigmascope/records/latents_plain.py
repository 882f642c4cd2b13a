"""An `EncodingRecord` as plain JSON values and back, losing nothing.

Sizes are in MiB at this border: a whole number of bytes over 2²⁰ is exact in a float, so that bytes come back
as they were.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from sigmascope.records.arithmetic import MIB
from sigmascope.records.latents import EncodingRecord
from sigmascope.records.structure import from_plain

_BYTES = {"nbytes": "size_mb"}
_ENDING, _MB_ENDING = "_bytes", "_mb"


def as_plain(record: EncodingRecord) -> dict[str, Any]:
    """Dicts, lists and scalars; what was called `…_bytes` is `…_mb`."""
    plain: dict[str, Any] = _plain(record)
    return plain


def encoding_record(plain: Mapping[str, Any]) -> EncodingRecord:
    """The record that `as_plain` took apart.

    Raises:
        ValueError: The values do not describe one; the message says where.
    """
    return from_plain(_in_bytes(plain), EncodingRecord, "record")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return dict(_shown(name, part) for name, part in named)
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _shown(name: str, value: Any) -> tuple[str, Any]:
    shown = _mb_name(name)
    return (name, _plain(value)) if shown is None else (shown, None if value is None else value / MIB)


def _mb_name(name: str) -> str | None:
    if name in _BYTES:
        return _BYTES[name]
    return name.removesuffix(_ENDING) + _MB_ENDING if name.endswith(_ENDING) else None


def _in_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(_read(name, part) for name, part in value.items())
    return [_in_bytes(part) for part in value] if isinstance(value, list | tuple) else value


def _read(name: str, value: Any) -> tuple[str, Any]:
    if name == "size_mb" and _is_size(value):
        return "nbytes", None if value is None else round(value * MIB)
    if name.endswith(_MB_ENDING) and _is_size(value):
        return name.removesuffix(_MB_ENDING) + _ENDING, None if value is None else round(value * MIB)
    return name, value if name in ("unavailable", "evidence") else _in_bytes(value)


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
