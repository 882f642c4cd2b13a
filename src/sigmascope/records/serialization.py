"""Runs as JSON files: `{"schema": 2, "run": {…}}`, or 3 where earlier stages are folded.

A schema is the shape of the `run` object in the file. A file of a later schema is refused rather than half
understood. One of an earlier schema is migrated: each step is a pure function on plain dicts from one version
to the next, so that a run of any age passes through all of them. Whoever changes a type in `records` in a way
that shows in the file raises `CURRENT_SCHEMA` and adds the step.

* Schema 2: the first.
* Schema 3: `folded`, the sums of earlier stages. A run without is written in schema 2, which it is word for word.

Plain values become the types of `records`, and these plain values, strictly: nothing is coerced, nothing
dropped.

JSON has no NaN and no infinity. `dumps` writes them as an object with the one key `$float`, whose value is
"nan", "inf" or "-inf". An object of the caller's that looks so is marked with one more `$`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.v import format_exception

from sigmascope.errors import ConfigError, NewerSchemaError, RecordError
from sigmascope.files import atomic_path, parse_json, reading_hint, reason_of
from sigmascope.records.recorded import Recorded, run_of
from sigmascope.records.run import MOST_LEVELS, JsonScalar, Run, levels_of, short_repr
from sigmascope.units import format_size

_IN_MEMORY = "<run in memory>"
_HINT = "Choose a file written by `Run.save`."
_MOST_BYTES = 128 << 20

CURRENT_SCHEMA = 3
_WITHOUT_FOLDED: Final = 2
Plain = dict[str, Any]

Record = TypeVar("Record")
_LARGEST_NUMBER: Final = 2**64
"""No counter is larger, and nothing can be reckoned with what no float holds."""

_DEEPEST: Final = 128  # levels: what is read can be written again, which takes three calls a level

# How JSON text holds the floats that JSON lacks.
_TAG = "$float"
_TAG_OR_ESCAPED = re.compile(r"\$+float")
_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def save_run(run: Recorded, path: str | os.PathLike[str]) -> None:
    """Write a run, or that of a `Watch`, to `path` atomically; only its owner can read it (mode 0600).

    Raises:
        ConfigError: What is given has no run, or one with more stages inside each other than can be read again.
        WriteError: The file cannot be written. What was there before stays.
        TypeError: A fact is of a type that JSON lacks; the message says which.
    """
    text = run_to_json(run_of(run))
    with atomic_path(path, private=True) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run that `save_run` wrote, in this or an earlier version.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: The file cannot be read, is damaged, or is not a run.
    """
    try:
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        if size > _MOST_BYTES:
            message = (
                f"is too large for a run ({format_size(size)}; {format_size(_MOST_BYTES)} are the limit)."
            )
            raise RecordError(Path(path), message, hint=_HINT)
        text = Path(path).read_bytes()
    except FileNotFoundError:
        what = "is a link to a file that does not exist." if Path(path).is_symlink() else "does not exist."
        raise RecordError(Path(path), what, hint="Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: no path at all, with a NUL in it
        message = f"cannot be read ({reason_of(error)})."
        raise RecordError(Path(path), message, hint=reading_hint(error)) from error
    return run_from_json(text, source=path)


def run_to_json(run: Run) -> str:
    """The run as strict JSON text (ASCII, one line). NaN and infinities survive, see `dumps`.

    Raises:
        TypeError: A fact is of a type that JSON lacks; the message says which.
    """
    return dumps(run_to_dict(run))


def run_from_json(text: str | bytes, *, source: str | os.PathLike[str] = _IN_MEMORY) -> Run:
    """The run in JSON text.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: It is damaged or not a run; the message says where.
    """
    if not text.strip():
        raise RecordError(Path(source), "is empty.", hint=_HINT)
    try:
        document = loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos})"
        what = error.msg.removesuffix(" at")  # where Python's own message would go on
        raise RecordError(Path(source), f"is not whole JSON: {what} at {place}.", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise RecordError(Path(source), "is not JSON: it is no text in UTF-8.", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(Path(source), f"is not JSON: {error}.", hint=_HINT) from error
    return run_from_dict(document, source=source)


def run_to_dict(run: Run) -> dict[str, Any]:
    """The document that a file holds: `schema` and `run`, of dicts, lists and scalars."""
    schema = _WITHOUT_FOLDED if run.folded is None else CURRENT_SCHEMA
    return {"schema": schema, "run": run_to_plain(run)}


def run_from_dict(document: object, *, source: str | os.PathLike[str] = _IN_MEMORY) -> Run:
    """The run in a document of any schema up to the current one; the document stays as it is.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: It is damaged or not a run; the message says where.
    """
    schema, plain = _schema_and_run(document, Path(source))
    try:
        return run_from_plain(migrate(plain, schema))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(Path(source), f"is damaged: {error}.", hint=_HINT) from error


def _schema_and_run(document: object, source: Path) -> tuple[int, dict[str, Any]]:
    """The schema number and the run of a document."""
    if not isinstance(document, dict) or not {"schema", "run"} <= document.keys():
        raise RecordError(source, "is JSON, but not a run of Sigmascope.", hint=_HINT)
    schema, plain = document["schema"], document["run"]
    oldest = min(MIGRATIONS)
    if type(schema) is not int or schema < oldest:
        raise RecordError(source, f"is damaged: its schema is {schema!r}, not {oldest} to {CURRENT_SCHEMA}.")
    if schema > CURRENT_SCHEMA:
        message = f"has schema {schema}; this version of Sigmascope reads schemas up to {CURRENT_SCHEMA}."
        raise NewerSchemaError(source, message, hint="Upgrade Sigmascope.")
    if not isinstance(plain, dict):
        raise RecordError(source, "is damaged: its run is not an object.", hint=_HINT)
    return schema, plain


def migrate(run: Plain, schema: int) -> Plain:
    """The run in the current schema.

    Raises:
        KeyError: That version cannot be migrated.
        TypeError, ValueError, AttributeError: The run is not of the shape its version says.
    """
    for version in range(schema, CURRENT_SCHEMA):
        run = MIGRATIONS[version](run)
    return run


def nothing_folded(run: Plain) -> Plain:
    """From schema 2 to 3: all stages are there one by one."""
    return run


MIGRATIONS: Mapping[int, Callable[[Plain], Plain]] = MappingProxyType({2: nothing_folded})
"""The step from each older schema to the next."""


def run_to_plain(run: Run) -> dict[str, Any]:
    """The run as dicts, lists and scalars.

    Raises:
        ConfigError: More stages lie inside each other than can be read again.
    """
    if (levels := levels_of(run)) > MOST_LEVELS:
        message = f"The run {run.name!r} has {levels} stages inside each other; {MOST_LEVELS} are the limit."
        raise ConfigError(message, hint="Give it fewer levels.")
    return to_plain(run)


def run_from_plain(plain: object) -> Run:
    """The run that plain values describe.

    Raises:
        ValueError: They do not describe a run; the message says where.
    """
    return from_plain(plain, Run, "run")


def to_plain(record: object) -> dict[str, Any]:
    """Any dataclass of `records` as dicts, lists and scalars."""
    plain: dict[str, Any] = _converter().unstructure(record)
    return plain


def from_plain(plain: object, kind: type[Record], name: str) -> Record:
    """The record of that type that plain values describe.

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
    of_store = override(omit=True)
    plain_run = make_dict_unstructure_fn(
        Run, converter, folded=override(omit_if_default=True), place=of_store
    )
    converter.register_unstructure_hook(Run, plain_run)
    run_of_plain = make_dict_structure_fn(Run, converter, _cattrs_forbid_extra_keys=True, place=of_store)
    converter.register_structure_hook(Run, run_of_plain)
    return converter


def _exactly(kind: type) -> Any:
    def check(value: object, _: object) -> object:
        if type(value) is not kind:  # a bool is an int to isinstance
            raise TypeError(f"{short_repr(value)} is not of type {kind.__name__}")
        return value

    return check


def _count(value: object, _: object) -> object:
    if type(value) is not int:
        raise TypeError(f"{short_repr(value)} is not of type int")
    if abs(value) > _LARGEST_NUMBER:
        raise TypeError(f"{short_repr(value)} is beyond 64 bits")
    return value


def _float(value: object, _: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{short_repr(value)} is not a number")
    return float(value)


def _scalar(value: object, _: object) -> object:
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"{short_repr(value)} is not a single value")
    return value


def dumps(value: object) -> str:
    """JSON text of plain values: mappings with string keys, sequences, strings, numbers, bools, None.

    Raises:
        TypeError: A value of another kind, with the place where it is.
    """
    return json.dumps(_encode(value, "$"), allow_nan=False, separators=(",", ":"))


def _encode(value: object, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: _float_name(value)}
    if isinstance(value, Mapping):
        encoded = {_key(key, place): _encode(item, f"{place}.{key}") for key, item in value.items()}
        return {f"${key}": item for key, item in encoded.items()} if _looks_tagged(encoded) else encoded
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{place} is of type {type(value).__name__}, which JSON lacks")


def _float_name(value: float) -> str:
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{place} has a key of type {type(key).__name__}, which JSON lacks")
    return key


def _looks_tagged(mapping: Mapping[str, Any]) -> bool:
    return len(mapping) == 1 and _TAG_OR_ESCAPED.fullmatch(next(iter(mapping))) is not None


def loads(text: str | bytes) -> Any:
    """The plain values in JSON text that `dumps` wrote.

    Raises:
        ValueError: It is not JSON (`json.JSONDecodeError`), not UTF-8, holds a bare NaN, or more values or
            deeper ones than any run.
    """
    return _decode(parse_json(text, strict=True))


def _decode(value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: _decode(item, depth + 1) for key, item in value.items()}
    if not _looks_tagged(decoded):
        return decoded
    [(key, item)] = decoded.items()
    if key != _TAG:
        return {key.removeprefix("$"): item}
    if not isinstance(item, str) or item not in _BY_NAME:
        raise ValueError(f"{item!r} is not the name of a float")
    return _BY_NAME[item]
