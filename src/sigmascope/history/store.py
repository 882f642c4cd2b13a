"""The store of runs: an SQL database that any number of processes write to and read from.

`open_store` opens it, makes it where there is none, and brings an older one up to date (alembic). SQLite works in WAL mode,
in which readers and a writer do not wait for each other; on a network file system, which has no shared memory, with a
rollback journal. Each run is one transaction: it is in the store as a whole, or not at all.

Runs stand in the order in which they were kept, and no clock turns it over: not one that was wrong for a day, nor those of two
machines. Each run has a place, a moment that never lies before the one of a run that was kept earlier (`_place_of`). A run
that was imported stands where it ended.

Whatever the database refuses becomes a `StoreError` that says why in a word: locked, full, damaged, read-only, newer.
"""

import itertools
import json
import os
import random
import sqlite3
import stat
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import psutil
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Select,
    bindparam,
    create_engine,
    delete,
    event,
    exists,
    func,
    insert,
    make_url,
    or_,
    select,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from sigmascope.errors import (
    ConfigError,
    NoSuchRunError,
    OtherRunError,
    RecordError,
    SigmascopeError,
    StoreError,
)
from sigmascope.files import reason_of
from sigmascope.history.location import KEEP, STORE, file_of, is_there, store_url
from sigmascope.history.row import Row, moment_in_utc, row_of
from sigmascope.history.tables import LORAS, NOTES, RECORDS, REVISION, RUNS, TAGS
from sigmascope.installation import install_extra
from sigmascope.plain_text import printable
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_from_json, run_to_json
from sigmascope.threads import ForkFirst, importing, is_fork_waiting

Key = TypeVar("Key", int, str)

MOST_RUNS: Final = 10_000
MOST_BYTES: Final = 1_000_000_000
"""Of records, compressed."""
_WAIT_SECONDS: Final = 10.0
"""For another process that writes."""
_READ_ONLY: Final = "readonly"
"""Of SQLite's words: it may not write."""
_UNABLE: Final = "unable to open"
"""Of SQLite's words: of a file that is there, it may not make the ones beside it that readers share."""
_BACKENDS: Final = (("sqlite", ""), ("sqlite", "pysqlite"), ("postgresql", "psycopg"))
"""Databases and drivers that a store can be of."""
_NO_ROOM_TO_SHARE: Final = "SQLITE_IOERR_SHMSIZE"
"""What SQLite calls a full disk where it makes the file beside the store that readers share."""
_INTERRUPTED: Final = "SQLITE_INTERRUPT"
"""What SQLite calls the end of a query by Ctrl-C."""
_LOCKED: Final = "is locked"
"""Of SQLite's words: another process has the lock."""
_PREPARING: Final = 7305
"""The number of PostgreSQL's lock under which tables are made."""
_MIGRATIONS: Final = Path(__file__).with_name("migrations")
_OF_PROMPT_S_ID: Final = 8
"""Letters of a ComfyUI prompt's id that are in its run's name."""
_LARGEST_RECORD: Final = 256 << 20
"""Bytes of JSON: what a compressed record may become."""
_NETWORK: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "cvmfs",
        "davfs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "gfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs3",
        "nfs4",
        "ocfs2",
        "panfs",
        "pvfs2",
        "smb",
        "smb2",
        "smb3",
        "smbfs",
        "virtiofs",
        "vboxsf",
        "webdav",
    ]
)
"""File systems on which processes share no memory, and locks may be those of one machine alone."""
_SQLITE_SELECT, _SQLITE_READ, _SQLITE_FUNCTION, _SQLITE_RECURSIVE = 21, 20, 31, 33
"""What SQLite's authorizer calls the parts of a query."""
_STEPS_BETWEEN_LOOKS: Final = 1_000_000
"""Of SQLite's machine, some 10 ms."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which runs: all conditions hold; None or empty: any.

    Attributes:
        pipeline: A part of the pipeline's class, in any case of letters.
        model: A part of the model's name or folder.
        lora: A part of the name of a LoRA.
        recipe: The beginning of the recipe's digest.
        outcome: How the run ended.
        tag: One of its tags.
        source: What kept it, such as "watch".
        since: The earliest start, in UTC as the store has it.
        until: The start of the first run that is too late.
    """

    pipeline: str | None = None
    model: str | None = None
    lora: str | None = None
    recipe: str | None = None
    outcome: str | None = None
    tag: str | None = None
    source: str | None = None
    since: str | None = None
    until: str | None = None


class KeptRun(NamedTuple):
    """A run as the store lists it, without its record.

    Attributes:
        number: Its key: of two runs of the same place, the later one has the larger.
        placed_at: Its place among all runs.
    """

    number: int
    row: Row
    kept_at: str
    source: str
    record_bytes: int
    tags: tuple[str, ...]
    notes: tuple[str, ...]
    placed_at: str

    @property
    def place(self) -> tuple[str, int]:
        """By which runs are sorted, the oldest first."""
        return self.placed_at, self.number

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            **self.row.columns(),
            "loras": list(self.row.loras),
            "tags": list(self.tags),
            "notes": list(self.notes),
            "kept_at": self.kept_at,
            "placed_at": self.placed_at,
            "source": self.source,
            "record_bytes": self.record_bytes,
        }


class Point(NamedTuple):
    """One column of a run.

    Attributes:
        value: Of the column; None where it is NULL.
        kind: What the run did: the values of `COMPARABLE`, and its recipe.
    """

    number: int
    id: str
    started_at: str
    seconds: float
    placed_at: str
    value: int | float | None
    kind: tuple[Any, ...]

    @property
    def place(self) -> tuple[str, int]:
        """By which runs are sorted, the oldest first."""
        return self.placed_at, self.number


@contextmanager
def open_store(url: str | None = None, *, create: bool = True) -> Iterator["Store"]:
    """Open the store for a block.

    Args:
        url: SQLAlchemy's; None: as the environment says.
        create: Whether to make it where there is none.

    Raises:
        StoreError: It is not there, or cannot be used.
        ConfigError: The URL makes no sense, or needs a package that is not installed.
    """
    store = Store(url or store_url())
    try:
        store.prepare(create=create)
        yield store
    finally:
        store.close()


class Store:
    """An open store. Use `open_store`.

    Attributes:
        name: What to call it in a message: the file, or the URL without its password.
        is_new: Whether `prepare` has just made it.
    """

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
        self.file = file_of(url)
        self.name = str(self.file) if self.file is not None else _without_password(self._url)
        self.is_new = False
        self._identity: tuple[int, int] | None = None
        self._engine = self._made_engine()

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of its own."""
        return self._url.get_backend_name() == "sqlite"

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _made_engine(self) -> Engine:
        arguments = {"timeout": _WAIT_SECONDS} if self.is_sqlite else {}
        try:
            with importing():  # the driver
                engine = create_engine(self._url, connect_args=arguments)
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"The store {self.name} needs {missing.name}, which is not installed.",
                hint=f"Install it with: {install_extra('postgres')}",
            ) from missing
        except ArgumentError:
            raise _no_store(_UNREADABLE) from None
        if self.is_sqlite:
            event.listen(engine, "connect", self._set_up)
            event.listen(engine, "begin", _begin)
        return engine

    def _set_up(self, connection: Any, _record: object) -> None:
        """Settings of one connection to SQLite. Transactions are begun by us: the driver would begin them late."""
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        wanted = "delete" if self.file is None or is_on_network(self.file) else "wal"
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
            with suppress(
                Exception
            ):  # another process is at work: the mode it found goes on, and the next sets it
                connection.execute(f"PRAGMA journal_mode = {wanted}")

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._told(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """A transaction that holds SQLite's lock from its beginning, so that it cannot fail in its middle."""
        with (
            self._told(),
            self._engine.connect().execution_options(writes=True) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise self._refusal(error) from error
        except (UnicodeError, OverflowError) as error:  # a name in another encoding, a number beyond any
            raise ConfigError(
                f"The store of runs cannot be asked for this ({printable(str(error))}).",
                hint="Check what you typed.",
            ) from error

    def _refusal(self, error: SQLAlchemyError) -> StoreError:
        """The reason in a word, and what to do."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        words = printable(" ".join(str(cause).split()))
        if getattr(cause, "sqlite_errorname", None) == _NO_ROOM_TO_SHARE:
            words = f"{words}: disk is full"
        for part, reason, hint in _REASONS:
            if part in words:
                closed = self._closed_files() if part in (_READ_ONLY, _UNABLE) else ""
                if closed:
                    reason = "is read-only"
                    hint = f"Check the permissions of {closed}; or copy the store to where you may write, and name the copy."
                return StoreError(f"The store of runs {self.name} {reason} ({words}).", hint=hint)
        return StoreError(f"The store of runs {self.name} cannot be used ({words}).", hint="Check the store.")

    def _closed_files(self) -> str:
        """Which of the files of an SQLite store cannot be written: those that readers share may be closed alone."""
        if self.file is None:
            return ""
        files = [
            self.file.parent,
            *(self.file.with_name(self.file.name + end) for end in ("", "-wal", "-shm")),
        ]
        return ", ".join(str(file) for file in files if os.path.exists(file) and not os.access(file, os.W_OK))  # noqa: PTH110 - as in `prepare`

    def prepare(self, *, create: bool) -> None:
        """Make the tables, or bring them up to date.

        Raises:
            StoreError: There is no store and none is to be made, it is of a later version, or it cannot be used.
        """
        if self.file is not None and not is_there(self.file):
            if not create:
                raise StoreError(
                    f"No run is kept yet: there is no {self.name}.",
                    hint="Make one with sigmascope watch SCRIPT, or take files in: sigmascope runs import.",
                )
            self._make_file(self.file)
        elif self.file is not None:
            self._require_regular(self.file)
        self._identity = self._file_now()
        with self._reading() as connection:
            revision = _revision(connection)
        if revision == REVISION:
            return
        with self._writing() as connection:
            if not self.is_sqlite:  # whose transactions exclude each other from their beginning
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_PREPARING})"))
            revision = _revision(connection)  # another process may have been quicker
            if revision != REVISION:
                self._migrate(connection, revision)
                self.is_new = revision is None

    def _require_regular(self, file: Path) -> None:
        """Refuse what is no file, or lies where one may not look.

        Raises:
            StoreError: It is so.
        """
        try:
            mode = os.stat(file).st_mode  # noqa: PTH116 - where `Path` raises, too
        except (OSError, ValueError) as error:
            raise StoreError(
                f"The store of runs {self.name} cannot be opened ({reason_of(error)}).",
                hint=f"Check the path and its permissions, or name another: {STORE}=/path/runs.db",
            ) from error
        if not stat.S_ISREG(mode):
            raise StoreError(
                f"The store of runs {self.name} is {'a folder' if stat.S_ISDIR(mode) else 'no file'}.",
                hint=f"Name a file: {STORE}=/path/runs.db. To keep no runs: {KEEP}=0",
            )

    def _file_now(self) -> tuple[int, int] | None:
        """What tells the file from another one of its name; None: there is none."""
        if self.file is None:
            return None
        with suppress(OSError):
            facts = os.stat(self.file)  # noqa: PTH116 - as above
            return facts.st_dev, facts.st_ino
        return None

    def _require_file(self) -> None:
        """Refuse a write that went into a file which nobody finds any more.

        Raises:
            StoreError: The file was deleted, or another took its place, since it was opened.
        """
        if self._file_now() != self._identity:
            raise StoreError(
                f"The store of runs {self.name} was deleted or replaced while it was open.",
                hint="Open it again; a new one is made.",
            )

    def _make_file(self, file: Path) -> None:
        """An empty file that only its owner reads; SQLite gives the files beside it the same mode."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError as error:
            message = f"The store of runs {self.name} cannot be made ({reason_of(error)})."
            raise StoreError(message, hint="Name another place: SIGMASCOPE_STORE=/path/runs.db") from error

    def _migrate(self, connection: Connection, revision: str | None) -> None:
        with importing():
            from alembic.config import Config
            from alembic.runtime.environment import EnvironmentContext
            from alembic.script import ScriptDirectory
            from alembic.util import CommandError

        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        script = ScriptDirectory.from_config(config)
        try:
            if revision is not None:
                script.get_revision(revision)
            with EnvironmentContext(
                config, script, fn=lambda now, _: script._upgrade_revs(REVISION, now)
            ) as step:
                step.configure(connection=connection, transaction_per_migration=False)
                step.run_migrations()
        except CommandError as error:
            raise StoreError(
                f"The store of runs {self.name} is of a later version of Sigmascope (its revision is {revision!r}).",
                hint="Upgrade Sigmascope, or name another store: SIGMASCOPE_STORE=/path/runs.db",
            ) from error

    # Writing

    def add(
        self,
        run: Run,
        source: str,
        *,
        tags: Iterable[str] = (),
        notes: Iterable[str] = (),
        prune: bool = False,
        imported: bool = False,
        placed_at: str | None = None,
    ) -> bool:
        """Keep a run, in one transaction.

        Args:
            run: Any.
            source: What made it, such as "watch".
            tags: Of it.
            notes: Of it.
            prune: Whether to drop the oldest runs above `MOST_RUNS` and `MOST_BYTES`, but for those with a tag.
            imported: Whether it comes from elsewhere. Otherwise it ended just now.
            placed_at: Of an imported run, its place there; None: it stands where it ended.

        Returns:
            False: this very run was there already.

        Raises:
            OtherRunError: Another run has its id.
            StoreError: The store cannot be written, or its file is gone.
            ConfigError: The run holds impossible times.
            TypeError: A fact of the run is of a type that JSON lacks.
        """
        row = row_of(run)
        content = zlib.compress(run_to_json(run).encode("ascii"), 6)
        with self._writing() as connection:
            known = connection.execute(_RECORD_OF_ID, {"of": row.id}).scalar()
            if known is not None:
                if _is_record_of(run, known):
                    return False
                raise OtherRunError(
                    f"Another run with the id {row.id} is in the store.",
                    hint="Take it in with a new one: sigmascope runs import --new-id",
                )
            now = _now()
            values = {
                "kept_at": now,
                "placed_at": min(placed_at or ended_at(row), now) if imported else _place_of(connection, now),
                "source": source,
                "record_bytes": len(content),
                **row.columns(),
            }
            number = connection.execute(_ADD_RUN, values).scalar_one()
            connection.execute(_ADD_RECORD, {"run": number, "content": content})
            _insert_all(connection, LORAS, [{"run": number, "lora": lora} for lora in row.loras])
            _insert_all(connection, TAGS, [{"run": number, "tag": tag} for tag in dict.fromkeys(tags)])
            _insert_all(
                connection, NOTES, [{"run": number, "written_at": _now(), "note": note} for note in notes]
            )
            if prune and self.is_sqlite:
                _prune(connection, MOST_RUNS, MOST_BYTES)
        self._require_file()
        return True

    def tag(self, numbers: Sequence[int], tag: str) -> None:
        """Give runs a tag; one that has it keeps it."""
        with self._writing() as connection:
            has = set(connection.execute(select(TAGS.c.run).where(TAGS.c.tag == tag)).scalars())
            _insert_all(connection, TAGS, [{"run": run, "tag": tag} for run in numbers if run not in has])

    def untag(self, numbers: Sequence[int], tag: str) -> None:
        """Take a tag from runs."""
        with self._writing() as connection:
            for some in _in_parts(numbers):
                connection.execute(delete(TAGS).where(TAGS.c.tag == tag, TAGS.c.run.in_(some)))

    def note(self, numbers: Sequence[int], note: str) -> None:
        """Add a note to runs."""
        with self._writing() as connection:
            _insert_all(
                connection, NOTES, [{"run": run, "written_at": _now(), "note": note} for run in numbers]
            )

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove runs, with all that belongs to them."""
        with self._writing() as connection:
            for some in _in_parts(numbers):
                connection.execute(delete(RUNS).where(RUNS.c.number.in_(some)))

    def prune(self, most_runs: int, most_bytes: int) -> int:
        """Remove the oldest runs without a tag, until there are no more than these; and give the space back.

        Returns:
            How many were removed.
        """
        with self._writing() as connection:
            removed = _prune(connection, most_runs, most_bytes)
        if removed and self.is_sqlite:
            # A reader may be in its way: the space is used again by later runs then.
            with self._told(), suppress(sqlite3.Error), self._engine.connect() as connection:
                connection.connection.driver_connection.execute("VACUUM")  # type: ignore[union-attr]
        return removed

    # Reading

    def count(self, filters: Filters | None = None) -> int:
        """How many runs there are."""
        with self._reading() as connection:
            return int(connection.execute(_chosen(select(func.count(RUNS.c.number)), filters)).scalar_one())

    def runs(
        self, filters: Filters | None = None, *, limit: int | None = None, offset: int = 0
    ) -> list[KeptRun]:
        """The runs without their records, the newest first."""
        chosen = _chosen(select(RUNS), filters).order_by(*_NEWEST_FIRST)
        return self._listed(chosen.limit(None if limit is None else min(limit, sys.maxsize)).offset(offset))

    def runs_of_id(self, beginning: str, *, limit: int) -> list[KeptRun]:
        """The runs whose id begins so; one whose id is just that comes alone.

        If there is none, prompts of ComfyUI's: their names begin with what ComfyUI's ids do.
        """
        of_prompt = f"ComfyUI {beginning[:_OF_PROMPT_S_ID]}"
        for is_meant in (
            RUNS.c.id.startswith(beginning, autoescape=True),
            RUNS.c.name.startswith(of_prompt, autoescape=True),
        ):
            found = self._listed(select(RUNS).where(is_meant).order_by(RUNS.c.number).limit(limit))
            if found:
                return [run for run in found if run.row.id == beginning] or found
        return []

    def runs_of_numbers(self, numbers: Sequence[int]) -> list[KeptRun]:
        """The runs with these keys that are there, the oldest first."""
        chosen = select(RUNS).where(RUNS.c.number.in_(numbers))
        return self._listed(chosen.order_by(RUNS.c.placed_at, RUNS.c.number))

    def kept(self, run: Run) -> KeptRun:
        """What is kept of a run that is in the store.

        Raises:
            StoreError: It is not.
        """
        found = self._listed(select(RUNS).where(RUNS.c.id == row_of(run).id))
        if not found:
            raise StoreError(
                f"The run {run.id} is not in the store {self.name}.", hint="List the runs again."
            )
        return found[0]

    def comparable_before(self, run: KeptRun, *, limit: int) -> list[KeptRun]:
        """The last whole runs before one that did the same kind of work on the same device, the newest first."""
        before = or_(
            RUNS.c.placed_at < run.placed_at,
            (RUNS.c.placed_at == run.placed_at) & (RUNS.c.number < run.number),
        )
        if (
            run.number == _NOT_KEPT
        ):  # its own clock is all there is: also those that a clock which was wrong put later
            before = or_(before, RUNS.c.kept_at < run.placed_at)
        same = (RUNS.c[name].is_not_distinct_from(getattr(run.row, name)) for name in COMPARABLE)
        chosen = select(RUNS).where(before, RUNS.c.outcome == "ok", *same)
        return self._listed(chosen.order_by(*_NEWEST_FIRST).limit(limit))

    def placed(self, rows: Sequence[Row]) -> list[KeptRun]:
        """Runs where they stand in the store; one that is not kept, where it would stand if it were taken in now."""
        ids = [row.id for row in rows]
        kept = {
            run.row.id: run
            for some in _in_parts(ids)
            for run in self._listed(select(RUNS).where(RUNS.c.id.in_(some)))
        }
        return [kept.get(row.id) or KeptRun(_NOT_KEPT, row, "", "", 0, (), (), ended_at(row)) for row in rows]

    def points(
        self, column: str, filters: Filters | None = None, *, like: KeptRun | None = None
    ) -> list[Point]:
        """One column of whole runs beside what tells which of them are comparable, the oldest first.

        Args:
            column: A number of the table `runs`, such as "seconds".
            filters: Which runs.
            like: Only those of the same kind of work as this one.
        """
        same = [RUNS.c[name].is_not_distinct_from(getattr(like.row, name)) for name in COMPARABLE if like]
        kind = (RUNS.c[name] for name in (*COMPARABLE, "recipe"))
        first = [RUNS.c[name] for name in ("number", "id", "started_at", "seconds", "placed_at", column)]
        chosen = _chosen(select(*first, *kind), filters).where(RUNS.c.outcome == "ok", *same)
        with self._reading() as connection:
            points = [Point._make((*row[:6], tuple(row[6:]))) for row in connection.execute(chosen)]
        return sorted(points, key=lambda point: point.place)

    def _listed(self, chosen: Select[Any]) -> list[KeptRun]:
        with self._reading() as connection:
            rows = connection.execute(chosen).mappings().all()
            numbers = [row["number"] for row in rows]
            loras = _of_runs(connection, LORAS, "lora", numbers)
            tags = _of_runs(connection, TAGS, "tag", numbers)
            notes = _of_runs(connection, NOTES, "note", numbers)
        names = [field.name for field in fields(Row) if field.name != "loras"]
        return [
            KeptRun(
                row["number"],
                Row(**{name: row[name] for name in names}, loras=loras.get(row["number"], ())),
                row["kept_at"],
                row["source"],
                row["record_bytes"],
                tags.get(row["number"], ()),
                notes.get(row["number"], ()),
                row["placed_at"],
            )
            for row in rows
        ]

    def record(self, number: int) -> Run:
        """The record of a run, with its place among the others.

        Raises:
            NoSuchRunError: It is gone.
            StoreError: It is damaged.
        """
        with self._reading() as connection:
            found = connection.execute(
                select(RECORDS.c.content, RUNS.c.placed_at)
                .join(RUNS, RUNS.c.number == RECORDS.c.run)
                .where(RECORDS.c.run == number)
            ).first()
        if found is None:
            raise NoSuchRunError(
                f"The run {number} is no longer in the store {self.name}.", hint="List the runs again."
            )
        try:
            run = run_from_json(_unpacked(found.content), source=f"run {number} of {self.name}")
            return replace(run, place=(found.placed_at, number))
        except (zlib.error, ValueError) as error:
            raise StoreError(
                f"The record of run {number} in the store {self.name} is damaged ({error}).",
                hint="Remove it with sigmascope runs rm.",
            ) from error

    def query(self, sql: str, *, limit: int | None = None) -> tuple[list[str], list[tuple[Any, ...]]]:
        """What an SQL query gives: the names of its columns, and its rows. It cannot change anything.

        Raises:
            ConfigError: The database refuses the query.
            KeyboardInterrupt: Ctrl-C ended it.
        """
        with self._engine.connect() as connection:
            try:
                if self.is_sqlite:
                    raw = cast(Any, connection.connection.driver_connection)
                    raw.set_authorizer(_only_reads)
                    # Ctrl-C is heard where Python runs, which it does not within a query that has no end.
                    raw.set_progress_handler(_go_on, _STEPS_BETWEEN_LOOKS)
                    try:
                        return _answer(raw.execute(sql), limit)
                    finally:
                        raw.set_authorizer(None)
                        raw.set_progress_handler(None, 0)
                with connection.begin():
                    connection.execute(text("SET TRANSACTION READ ONLY"))
                    raw = cast(Any, connection.connection.driver_connection)
                    # A prepared statement is one statement: no second one could end the transaction and write.
                    return _answer(raw.execute(sql, prepare=True), limit)
            except SigmascopeError:
                raise
            except Exception as error:  # the driver's own errors, which differ by driver
                drivers = ("sqlite3", "psycopg")
                known = (SQLAlchemyError, UnicodeError)
                if not isinstance(error, known) and not type(error).__module__.startswith(drivers):
                    raise
                cause = error.orig if isinstance(error, DBAPIError) else error
                if getattr(cause, "sqlite_errorname", None) == _INTERRUPTED:
                    raise KeyboardInterrupt from None
                raise ConfigError(
                    f"The query failed: {printable(' '.join(str(cause).split())).rstrip('.')}.",
                    hint="The tables are in docs/history.md; a query can only read.",
                ) from error


COMPARABLE: Final = (
    "pipeline",
    "model",
    "work",
    "width",
    "height",
    "num_frames",
    "batch_size",
    "steps",
    "generations",
    "device",
    "hardware",
)
"""Columns that are equal in runs of the same kind of work: their times can be compared."""
_NOT_KEPT: Final = 2**31 - 1
"""The number of a run that is not in the store: the largest that PostgreSQL gives one."""
_NEWEST_FIRST: Final = (RUNS.c.placed_at.desc(), RUNS.c.number.desc())

# What each run that is kept takes, made once: SQLAlchemy takes as long to make a statement as to send it.
_RECORD_OF_ID: Final = (
    select(RECORDS.c.content)
    .join(RUNS, RUNS.c.number == RECORDS.c.run)
    .where(RUNS.c.id == bindparam("of", type_=RUNS.c.id.type))
)
_ADD_RUN: Final = insert(RUNS).returning(RUNS.c.number)
_ADD_RECORD: Final = insert(RECORDS)
_NEWEST: Final = select(func.max(RUNS.c.placed_at))
_SIZE: Final = select(func.count(RUNS.c.number), func.coalesce(func.sum(RUNS.c.record_bytes), 0))

_REASONS: Final = (
    (_LOCKED, "is locked by another process", "Try again once that is done."),
    (
        "disk is full",
        "has no room",
        "Free some space on its disk, or name another: SIGMASCOPE_STORE=/path/runs.db",
    ),
    ("disk I/O error", "cannot be read or written", "Check the disk."),
    (_READ_ONLY, "is read-only", "Check its permissions, or name another: SIGMASCOPE_STORE=/path/runs.db"),
    ("not a database", "is damaged, or no store", "Move it away; a new one is made."),
    ("malformed", "is damaged", "Move it away; a new one is made. What sqlite3 .recover saves can be read."),
    ("no such table", "is damaged, or no store", "Move it away; a new one is made."),
    ("no such column", "is damaged, or no store", "Move it away; a new one is made."),
    (_UNABLE, "cannot be opened", "Check the path and its permissions."),
    ("authentication failed", "refuses the login", f"Check the user and the password in {STORE}."),
    ("no password supplied", "refuses the login", f"Give the password in {STORE}, or in ~/.pgpass."),
    ("no pg_hba.conf entry", "refuses the login", "Ask its administrator to let this machine in."),
    (
        "permission denied",
        "may not be used by this user",
        "Ask the owner of the database for the right to create tables in it.",
    ),
    ('role "', "refuses the login", f"Check the user in {STORE}."),
    ('database "', "is not there", "Make the database with createdb, or check its name."),
    ("failed to resolve host", "does not answer", "Check the name of the server."),
    ("timeout expired", "does not answer", "Check that the server runs."),
    ("could not connect", "does not answer", "Check that the server runs."),
    ("connection failed", "does not answer", "Check that the server runs."),
    ("connection is bad", "does not answer", "Check that the server runs."),
)
"""Words of a database, what they mean, and what to do."""
_UNREADABLE: Final = "it cannot be read as a URL"


def _checked(url: str) -> URL:
    """The URL of a file of SQLite, or of PostgreSQL by psycopg: nothing else keeps runs."""
    if file_of(url) is None and url.partition("://")[2].partition(":")[2].count("@") > 1:
        raise _no_store("an @ of a password is %40 in a URL")  # half of it would be taken for the host
    try:
        checked = make_url(url)
        if checked.drivername in ("postgres", "postgresql"):
            checked = checked.set(drivername="postgresql+psycopg")
        backend = checked.get_backend_name()
        with importing():
            checked.get_dialect()
    except NoSuchModuleError as error:
        raise _no_store(error) from error
    except (
        ArgumentError,
        ValueError,
    ):  # their words, and those of what they came from, may hold the password
        raise _no_store(_UNREADABLE) from None
    if (backend, checked.drivername.partition("+")[2]) not in _BACKENDS:
        raise _no_store(f"{checked.drivername} is neither SQLite nor PostgreSQL by psycopg")
    if backend == "sqlite":
        if "?" in url:
            raise _no_store("the URL of an SQLite file ends with its path; a ? of the path is %3F there")
        file = file_of(url)
        if file is None:
            raise _no_store("what is in memory is gone with the process")
        checked = checked.set(database=str(file))  # SQLAlchemy before 2.1 decodes nothing
    return checked


def _without_password(url: URL) -> str:
    """The URL for a message; what follows its ? may hold a password, too."""
    return url.set(query={}).render_as_string(hide_password=True)


def _no_store(why: object) -> ConfigError:
    return ConfigError(
        f"SIGMASCOPE_STORE is no store ({' '.join(str(why).split())}).",
        hint="Give the path of an SQLite file, or postgresql+psycopg://user@host/database",
    )


def is_on_network(file: Path) -> bool:
    """Whether the file's folder lies on a file system of another machine; False where the system does not say."""
    try:
        folder = file.parent.resolve()
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except (OSError, RuntimeError):
        return False
    kind = next((mounts[place] for place in (folder, *folder.parents) if place in mounts), "")
    return kind.lower() in _NETWORK


def _begin(connection: Connection) -> None:
    """Begin a transaction; one that writes takes SQLite's lock now.

    SQLite itself asks for the lock ten times a second. Among several writers that are never idle, one may ask in vain for a
    minute. So we ask more often, at random moments: then each has the same chance whenever the lock is free.
    """
    if not connection.get_execution_options().get("writes", False):
        connection.exec_driver_sql("BEGIN")
        return
    until = time.monotonic() + _WAIT_SECONDS
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                return
            except OperationalError as error:
                if _LOCKED not in str(error) or time.monotonic() > until:
                    raise
                if is_fork_waiting():
                    raise ForkFirst from error
                time.sleep(random.uniform(0.001, 0.01))
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(1000 * _WAIT_SECONDS)}")


def _answer(cursor: Any, limit: int | None) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns, and the rows."""
    names = [str(column[0]) for column in cursor.description or ()]
    if not names:
        raise ConfigError("The query is empty.", hint="Write one: sigmascope runs query 'SELECT * FROM runs'")
    return names, list(itertools.islice(cursor, None if limit is None else min(limit, sys.maxsize)))


def _go_on() -> int:
    """SQLite asks now and then: 0 lets the query go on."""
    return 0


def _only_reads(action: int, *_: object) -> int:
    """SQLite asks for each part of a query: 0 allows it, 1 refuses the whole."""
    return 0 if action in (_SQLITE_SELECT, _SQLITE_READ, _SQLITE_FUNCTION, _SQLITE_RECURSIVE) else 1


def _revision(connection: Connection) -> str | None:
    """Of the tables that are there; None: there are none."""
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def _now() -> str:
    return moment_in_utc(datetime.now(UTC))


def _insert_all(connection: Connection, table: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), list(rows))


def _in_parts(keys: Sequence[Key], size: int = 500) -> Iterator[Sequence[Key]]:
    """In parts that fit a statement."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _of_runs(
    connection: Connection, table: Any, column: str, numbers: Sequence[int]
) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for some in _in_parts(numbers):
        order = table.c.number if "number" in table.c else table.c[column]
        rows = connection.execute(
            select(table.c.run, table.c[column]).where(table.c.run.in_(some)).order_by(order)
        )
        for run, value in rows:
            found[run] = (*found.get(run, ()), value)
    return found


def _chosen(query: Select[Any], filters: Filters | None) -> Select[Any]:
    """The query with what the filters say."""
    if filters is None:
        return query
    conditions: list[ColumnElement[bool]] = []
    for column, part in ((RUNS.c.pipeline, filters.pipeline), (RUNS.c.model, filters.model)):
        if part:
            conditions.append(column.icontains(part, autoescape=True))
    if filters.lora:
        with_it = select(LORAS.c.run).where(LORAS.c.lora.icontains(filters.lora, autoescape=True))
        conditions.append(RUNS.c.number.in_(with_it))
    if filters.tag:
        conditions.append(RUNS.c.number.in_(select(TAGS.c.run).where(TAGS.c.tag == filters.tag)))
    if filters.recipe:
        conditions.append(RUNS.c.recipe.startswith(filters.recipe, autoescape=True))
    for column, value in ((RUNS.c.outcome, filters.outcome), (RUNS.c.source, filters.source)):
        if value:
            conditions.append(column == value)
    if filters.since:
        conditions.append(RUNS.c.started_at >= filters.since)
    if filters.until:
        conditions.append(RUNS.c.started_at < filters.until)
    return query.where(*conditions)


def _prune(connection: Connection, most_runs: int, most_bytes: int) -> int:
    """Remove the oldest runs without a tag, until there are no more than these; how many that were."""
    count, nbytes = connection.execute(_SIZE).one()
    if count <= most_runs and nbytes <= most_bytes:
        return 0
    untagged = ~exists().where(TAGS.c.run == RUNS.c.number)
    oldest = (
        select(RUNS.c.number, RUNS.c.record_bytes).where(untagged).order_by(RUNS.c.placed_at, RUNS.c.number)
    )
    removed: list[int] = []
    for number, size in connection.execute(oldest):
        if count - len(removed) <= most_runs and nbytes <= most_bytes:
            break
        removed.append(number)
        nbytes -= size
    for some in _in_parts(removed):
        connection.execute(delete(RUNS).where(RUNS.c.number.in_(some)))
    return len(removed)


def _is_record_of(run: Run, content: bytes) -> bool:
    """Whether a record is that of a run, whichever version wrote it. One that is damaged is not."""
    with suppress(zlib.error, ValueError, RecordError):
        text, written = run_to_json(run), _unpacked(content).decode()
        return text == written or json.loads(text) == json.loads(run_to_json(run_from_json(written)))
    return False


def _place_of(connection: Connection, now: str) -> str:
    """The place of a run that ended just now: behind all that were kept before, whatever this machine's clock says."""
    newest = connection.execute(_NEWEST).scalar()
    return now if newest is None else max(now, newest)


def ended_at(row: Row) -> str:
    """When a run ended, by its own clock: the place of one that comes from elsewhere."""
    try:
        return moment_in_utc(datetime.fromisoformat(row.started_at) + timedelta(seconds=row.seconds))
    except OverflowError:  # beyond the last year
        return row.started_at


def _unpacked(content: bytes) -> bytes:
    """The JSON of a record.

    Raises:
        ValueError: It is larger than any record.
        zlib.error: It is damaged.
    """
    unpacking = zlib.decompressobj()
    written = unpacking.decompress(content, _LARGEST_RECORD)
    if unpacking.unconsumed_tail:
        raise ValueError("it is larger than any record")
    if not unpacking.eof:
        raise ValueError("its end is missing")
    return written
