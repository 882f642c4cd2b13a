"""Plain values to the types of `records` and back, strictly: nothing is coerced, nothing dropped."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar

from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError
from cattrs.v import format_exception

from sigmascope.records.facts import JsonScalar
from sigmascope.records.run import Run

Record = TypeVar("Record")

_MOST: Final = 2**64
"""No counter is larger, and nothing can be reckoned with what no float holds."""


def run_to_plain(run: Run) -> dict[str, Any]:
    """The run as dicts, lists and scalars."""
    return to_plain(run)


def to_plain(record: object) -> dict[str, Any]:
    """Any dataclass of `records` as dicts, lists and scalars."""
    plain: dict[str, Any] = _converter().unstructure(record)
    return plain


def run_from_plain(plain: object) -> Run:
    """The run that plain values describe.

    Raises:
        ValueError: They do not describe a run; the message says where.
    """
    return from_plain(plain, Run, "run")


def from_plain(plain: object, kind: type[Record], name: str) -> Record:
    """The record of that type that plain values describe.

    Args:
        plain: Dicts, lists and scalars.
        kind: A dataclass of `records`.
        name: What messages call it.

    Raises:
        ValueError: They do not describe one; the message says where.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"expected an object, found {type(plain).__name__} @ {name}")
    try:
        return _converter().structure(plain, kind)
    except BaseValidationError as error:
        raise ValueError("; ".join(transform_error(error, name, _in_words)[:3])) from error


def _in_words(error: BaseException, kind: Any) -> str:
    """What is wrong with one value; a record that refuses its own values says so itself."""
    if kind is None and isinstance(error, ValueError):
        return str(error)
    return format_exception(error, kind)


@cache
def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    converter.register_structure_hook(bool, _exactly(bool))
    converter.register_structure_hook(int, _count)
    converter.register_structure_hook(str, _exactly(str))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(JsonScalar, _scalar)
    return converter


def _exactly(kind: type) -> Any:
    def check(value: object, _: object) -> object:
        if type(value) is not kind:  # a bool is an int to isinstance
            raise TypeError(f"{_shown(value)} is not of type {kind.__name__}")
        return value

    return check


def _count(value: object, _: object) -> object:
    if type(value) is not int:
        raise TypeError(f"{_shown(value)} is not of type int")
    if abs(value) > _MOST:
        raise TypeError(f"{_shown(value)} is beyond 64 bits")
    return value


def _float(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{_shown(value)} is not a number")
    return float(value)


def _scalar(value: object, _: object) -> object:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"{_shown(value)} is not a single value")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
