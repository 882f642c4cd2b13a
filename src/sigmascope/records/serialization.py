"""Runs as JSON files: `{"schema": 2, "run": {…}}`.

The schema number is that of `migrations`. A file of a later schema is refused rather than half
understood, one of an earlier schema is migrated.
"""

import json
import os
from pathlib import Path
from typing import Any

from sigmascope.errors import NewerSchemaError, RecordError
from sigmascope.records import plain_json
from sigmascope.records.atomic import atomic_path
from sigmascope.records.migrations import CURRENT_SCHEMA, migrate
from sigmascope.records.os_errors import reading_hint, reason_of
from sigmascope.records.run import Run
from sigmascope.records.structure import run_from_plain, run_to_plain

_IN_MEMORY = "<run in memory>"
_HINT = "Choose a file written by `Run.save`."


def save_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run to `path`, whole or not at all.

    Raises:
        WriteError: The file cannot be written. What was there before stays.
        TypeError: A fact is of a type that JSON lacks; the message says which.
    """
    text = run_to_json(run)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def load_run(path: str | os.PathLike[str]) -> Run:
    """Read a run that `save_run` wrote, in this or an earlier version.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: The file cannot be read, is damaged, or is not a run.
    """
    try:
        text = Path(path).read_bytes()
    except FileNotFoundError:
        raise RecordError(Path(path), "does not exist.", hint="Check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: no path at all, with a NUL in it
        message = f"cannot be read ({reason_of(error)})."
        raise RecordError(Path(path), message, hint=reading_hint(error)) from error
    return run_from_json(text, source=path)


def run_to_json(run: Run) -> str:
    """The run as strict JSON text (ASCII, one line). NaN and infinities survive, see `plain_json`.

    Raises:
        TypeError: A fact is of a type that JSON lacks; the message says which.
    """
    return plain_json.dumps(run_to_dict(run))


def run_from_json(text: str | bytes, *, source: str | os.PathLike[str] = _IN_MEMORY) -> Run:
    """The run in JSON text.

    Args:
        text: What `run_to_json` gave, in this or an earlier version.
        source: The file that errors name.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: It is damaged or not a run; the message says where.
    """
    if not text.strip():
        raise RecordError(Path(source), "is empty.", hint=_HINT)
    try:
        document = plain_json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno} (character {error.pos})"
        raise RecordError(Path(source), f"is not whole JSON: {error.msg} at {place}.", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(Path(source), f"is not JSON: {error}.", hint=_HINT) from error
    return run_from_dict(document, source=source)


def run_to_dict(run: Run) -> dict[str, Any]:
    """The document that a file holds: `schema` and `run`, of dicts, lists and scalars."""
    return {"schema": CURRENT_SCHEMA, "run": run_to_plain(run)}


def run_from_dict(document: object, *, source: str | os.PathLike[str] = _IN_MEMORY) -> Run:
    """The run in a document of any schema up to the current one; the document stays as it is.

    Args:
        document: What `run_to_dict` gave, in this or an earlier version.
        source: The file that errors name.

    Raises:
        NewerSchemaError: A later version wrote it.
        RecordError: It is damaged or not a run; the message says where.
    """
    schema, plain = _parts(document, Path(source))
    try:
        return run_from_plain(migrate(plain, schema))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(Path(source), f"is damaged: {error}.", hint=_HINT) from error


def _parts(document: object, source: Path) -> tuple[int, dict[str, Any]]:
    """The schema number and the run of a document."""
    if not isinstance(document, dict) or not {"schema", "run"} <= document.keys():
        raise RecordError(source, "is JSON, but not a run of Sigmascope.", hint=_HINT)
    schema, plain = document["schema"], document["run"]
    if type(schema) is not int or schema < 1:
        raise RecordError(source, f"is damaged: its schema is {schema!r}, not a positive integer.")
    if schema > CURRENT_SCHEMA:
        message = f"has schema {schema}; this version of Sigmascope reads schemas up to {CURRENT_SCHEMA}."
        raise NewerSchemaError(source, message, hint="Upgrade Sigmascope.")
    if not isinstance(plain, dict):
        raise RecordError(source, "is damaged: its run is not an object.", hint=_HINT)
    return schema, plain
