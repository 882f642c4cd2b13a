"""Runs from one store to another: a file of JSON lines, each a record with its tags and notes. Nothing of a run is lost.

A line is what `Run.save` writes, with one key more; so each line alone can be shown and compared, too.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from sigmascope.errors import ConfigError, OtherRunError, RecordError
from sigmascope.files import atomic_path, reading_hint, reason_of
from sigmascope.history.location import STORE, is_there
from sigmascope.history.references import checked_tag
from sigmascope.history.row import moment_in_utc
from sigmascope.history.store import KeptRun, Store
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Run
from sigmascope.records.serialization import dumps, load_run, loads, run_from_dict, run_to_dict

KEPT: Final = "kept"
"""The key of a line under which `source`, `tags` and `notes` stand."""
LINES: Final = ".jsonl"
_SOURCE: Final = "import"
_OF_SQLITE: Final = b"SQLite format 3\0"
"""How its files begin."""


class Exchanged(NamedTuple):
    """A run on its way, with what the store knows beside its record."""

    run: Run
    source: str
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    placed_at: str | None = None


@dataclass(frozen=True, slots=True)
class TakenIn:
    """What an import did.

    Attributes:
        added: Ids of runs that are in the store now.
        known: Ids of runs that were there already.
        refused: Why a file or run was not taken in, by its name.
        files: The files of which every run is in the store now.
    """

    added: tuple[str, ...]
    known: tuple[str, ...]
    refused: dict[str, str]
    files: tuple[Path, ...]


def write_runs(store: Store, runs: Sequence[KeptRun], path: Path) -> None:
    """Write runs to a file, whole or not at all; only its owner can read it.

    Raises:
        WriteError: The file cannot be written.
        StoreError: A record is damaged.
    """
    with atomic_path(path, private=True) as temporary, temporary.open("w", encoding="utf-8") as file:
        for kept in runs:
            file.write(
                f"{line_of(Exchanged(store.record(kept.number), kept.source, kept.tags, kept.notes, kept.placed_at))}\n"
            )


def line_of(exchanged: Exchanged) -> str:
    """The run as one line of JSON."""
    kept = {
        "source": exchanged.source,
        "tags": list(exchanged.tags),
        "notes": list(exchanged.notes),
        "placed_at": exchanged.placed_at,
    }
    return dumps({**run_to_dict(exchanged.run), KEPT: kept})


def from_line(text: str, source: str) -> Exchanged:
    """The run that a line holds.

    Raises:
        RecordError: It is damaged, or of a later version.
    """
    try:
        document = loads(text)
    except ValueError as error:
        raise RecordError(source, f"is not JSON ({error}).", hint="Export the runs again.") from error
    run = run_from_dict(document, source=source)
    kept: Any = document.get(KEPT, {})
    if not isinstance(kept, dict):
        raise RecordError(source, f"is damaged: {KEPT} is no object.", hint="Export the runs again.")
    tags, notes = (
        [value for value in kept.get(name) or () if isinstance(value, str)] for name in ("tags", "notes")
    )
    source_of_run = str(kept.get("source") or _SOURCE)
    return Exchanged(
        run, source_of_run, tuple(map(checked_tag, tags)), tuple(notes), _moment(kept.get("placed_at"))
    )


def _moment(value: object) -> str | None:
    """As the store writes it; None: it is none."""
    with suppress(ValueError, OverflowError):
        return moment_in_utc(datetime.fromisoformat(value)) if isinstance(value, str) else None
    return None


def take_in(
    store: Store, paths: Sequence[Path], *, new_ids: bool = False, progress: Progress = no_progress
) -> TakenIn:
    """Add the runs of files to the store: each that can be read; what cannot is in the answer.

    Args:
        store: Where they go.
        paths: Files of `write_runs` or `Run.save`, or folders of them.
        new_ids: Whether each run gets an id of its own, so that it is added beside one that has its id.
        progress: Told after each run how many are in the store now.

    Raises:
        StoreError: The store cannot be written.
        RecordError: A path does not exist.
    """
    added, known, refused, whole = list[str](), list[str](), dict[str, str](), list[Path]()
    for file in [file for path in paths for file in _files(path)]:
        is_whole = True
        try:
            for exchanged in runs_in(file):
                run = replace(exchanged.run, id=uuid.uuid4().hex) if new_ids else exchanged.run
                try:
                    is_new = store.add(
                        run,
                        exchanged.source,
                        tags=exchanged.tags,
                        notes=exchanged.notes,
                        imported=True,
                        placed_at=exchanged.placed_at,
                    )
                except OtherRunError as error:
                    refused[f"{file}: {run.id}"] = str(error)
                    is_whole = False
                else:
                    (added if is_new else known).append(run.id)
                    progress(len(added) + len(known), 0, file.name)
        except (RecordError, ConfigError) as error:
            refused[str(file)] = str(error)
            is_whole = False
        if is_whole:
            whole.append(file)
    return TakenIn(tuple(added), tuple(known), refused, tuple(whole))


def runs_in(file: Path) -> Iterator[Exchanged]:
    """The runs of a file.

    Raises:
        RecordError: It cannot be read, is damaged, or is a store; runs before that place have been given.
    """
    _refuse_store(file)
    if file.suffix != LINES:
        yield Exchanged(load_run(file), _SOURCE)
        return
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from_line(line, f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error)
        raise RecordError(file, f"cannot be read ({reason}).", hint=reading_hint(error)) from error


def _refuse_store(file: Path) -> None:
    """Refuse the store of another machine, which is a file, too.

    Raises:
        RecordError: It is one.
    """
    with suppress(OSError), file.open("rb") as opened:  # reading it tells
        if opened.read(len(_OF_SQLITE)) == _OF_SQLITE:
            raise RecordError(
                file,
                "is a store, not a file of runs.",
                hint=f"Export its runs first: {STORE}={file} sigmascope runs export runs.jsonl",
            )


def _files(path: Path) -> list[Path]:
    if os.path.isdir(path):  # noqa: PTH112 - False where a folder is closed, where `Path` raises
        try:
            return sorted(file for file in path.iterdir() if file.suffix in (".json", LINES))
        except OSError as error:
            raise RecordError(
                path, f"cannot be read ({reason_of(error)}).", hint=reading_hint(error)
            ) from error
    if not is_there(path):
        raise RecordError(path, "does not exist.", hint="Check the path.")
    return [path]
