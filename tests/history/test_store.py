"""What the store keeps, finds and drops, and what it says of a database that it cannot use."""

import json
import os
import sqlite3
import stat
import threading
import zlib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import psutil
import pytest
from sqlalchemy.exc import OperationalError
from tests.history.kept_runs import kept_run

from sigmascope.errors import ConfigError, OtherRunError, StoreError
from sigmascope.history import store as store_module
from sigmascope.history.live import live_runs
from sigmascope.history.location import STORE, file_of, store_url
from sigmascope.history.references import runs_of
from sigmascope.history.row import row_of
from sigmascope.history.store import Filters, Store, is_on_network, open_store
from sigmascope.history.tables import METADATA
from sigmascope.records.failures import OK
from sigmascope.records.serialization import run_to_json


def ids(store: Store, **filters: str) -> list[str]:
    return [run.row.id for run in store.runs(Filters(**filters))]


def test_a_run_comes_back_as_it_was(store: Store) -> None:
    run = kept_run(facts={"odd": [float("inf"), {"$float": "x"}, "\ud800\0"]})
    assert store.add(run, "watch", tags=["before"], notes=["new driver", "again"])
    [kept] = store.runs()
    assert store.record(kept.number) == run
    assert (kept.source, kept.tags, kept.notes) == ("watch", ("before",), ("new driver", "again"))
    assert kept.row.outcome == OK


def test_the_same_run_is_kept_once_and_another_of_its_id_is_refused(store: Store) -> None:
    run = kept_run(id="a")
    assert store.add(run, "watch")
    assert not store.add(run, "watch")
    with pytest.raises(OtherRunError, match="id a"):
        store.add(kept_run(id="a", seconds=3.0), "watch")
    assert store.count() == 1


def test_the_run_that_was_kept_last_comes_first(store: Store) -> None:
    for day in (2, 3, 1):
        store.add(kept_run(id=str(day), started_at=f"2026-03-0{day}T00:00:00+00:00"), "watch")
    assert ids(store) == ["1", "3", "2"]


def test_an_imported_run_stands_where_it_ended(store: Store) -> None:
    for id, day, seconds in (("b", 2, 10.0), ("c", 3, 10.0), ("a", 1, 10.0), ("long", 1, 3 * 86_400.0)):
        run = kept_run(id=id, started_at=f"2026-03-0{day}T00:00:00+00:00", seconds=seconds)
        store.add(run, "import", imported=True)
    store.add(kept_run(id="now", started_at="2026-03-01T00:00:00+00:00"), "watch")
    assert ids(store) == ["now", "long", "c", "b", "a"]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"pipeline": "flux"}, ["a"]),
        ({"pipeline": "%"}, []),
        ({"model": "XL"}, ["b"]),
        ({"lora": "style"}, ["b"]),
        ({"outcome": "failed"}, ["c"]),
        ({"tag": "before"}, ["a"]),
        ({"tag": "bef"}, []),
        ({"source": "bench"}, ["c"]),
        ({"since": "2026-03-02"}, ["c", "b"]),
        ({"until": "2026-03-02"}, ["a"]),
        ({"since": "2026-03-02", "outcome": "ok"}, ["b"]),
    ],
)
def test_filters(store: Store, filters: dict[str, str], found: list[str]) -> None:
    lora = {"unet.x": {"file": "Style.safetensors"}}
    store.add(kept_run(id="a", started_at="2026-03-01T00:00:00+00:00"), "watch", tags=["before"])
    store.add(
        kept_run(id="b", started_at="2026-03-02T00:00:00+00:00", pipeline="SDXL", source="sdxl", loras=lora),
        "watch",
    )
    store.add(
        kept_run(
            id="c", started_at="2026-03-03T00:00:00+00:00", pipeline="Wan", source=None, error="ValueError"
        ),
        "bench",
    )
    assert ids(store, **filters) == found
    assert store.count(Filters(**filters)) == len(found)


def test_a_recipe_is_found_by_its_beginning(store: Store) -> None:
    store.add(kept_run(id="a"), "watch")
    store.add(kept_run(id="b", steps=9), "watch")
    digest = next(run.row.recipe for run in store.runs() if run.row.id == "a")
    assert digest is not None
    assert ids(store, recipe=digest[:6]) == ["a"]


def test_tags_and_notes_are_added_and_taken_off(store: Store) -> None:
    for name in "ab":
        store.add(kept_run(id=name), "watch")
    numbers = [run.number for run in store.runs()]
    store.tag(numbers, "x")
    store.tag(numbers[:1], "x")
    store.note(numbers[:1], "slow")
    store.untag(numbers[1:], "x")
    assert [(run.tags, run.notes) for run in store.runs()] == [(("x",), ("slow",)), ((), ())]


def test_nothing_is_left_of_a_removed_run(store: Store) -> None:
    store.add(kept_run(loras={"unet.x": {}}), "watch", tags=["x"], notes=["y"])
    store.remove([run.number for run in store.runs()])
    for table in ("runs", "records", "loras", "tags", "notes"):
        assert store.query(f"SELECT count(*) FROM {table}")[1] == [(0,)]


def test_the_oldest_are_dropped_but_for_those_with_a_tag(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_RUNS", 3)
    for day in range(1, 7):
        run = kept_run(id=str(day), started_at=f"2026-03-0{day}T00:00:00+00:00")
        store.add(run, "watch", tags=["first"] if day == 1 else [], prune=True)
    assert ids(store) == ["6", "5", "1"]


def test_records_take_no_more_than_their_share_of_the_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(kept_run(id="1"), "watch")
    size = store.runs()[0].record_bytes
    monkeypatch.setattr(store_module, "MOST_BYTES", int(2.5 * size))
    for day in range(2, 6):
        store.add(kept_run(id=str(day), started_at=f"2026-03-0{day}T12:00:00+00:00"), "watch", prune=True)
    assert ids(store) == ["5", "4"]


def test_pruning_gives_the_space_back(store: Store, file: Path) -> None:
    noise = {"noise": os.urandom(200_000).hex()}
    for day in range(1, 5):
        store.add(kept_run(id=str(day), started_at=f"2026-03-0{day}T12:00:00+00:00", facts=noise), "watch")
    assert store.prune(1, 10**9) == 3
    assert ids(store) == ["4"]
    with closing(sqlite3.connect(file)) as reader:
        pages = reader.execute("PRAGMA page_count").fetchone()[0] * 4096
    assert pages < 500_000


def test_comparable_runs_did_the_same_work_on_the_same_device_before(store: Store) -> None:
    def add(id: str, day: int, **other: object) -> None:
        store.add(kept_run(id=id, started_at=f"2026-03-{day:02}T00:00:00+00:00", **other), "watch")  # type: ignore[arg-type]

    add("first", 1)
    add("other size", 2, size=(512, 512))
    add("other device", 3, device="cpu")
    add("failed", 4, error="ValueError")
    add("other steps", 5, steps=9)
    add("second", 6, prompt="1" * 64)
    add("now", 7)
    add("later", 8)
    now = next(run for run in store.runs() if run.row.id == "now")
    assert [run.row.id for run in store.comparable_before(now, limit=9)] == ["second", "first"]


def test_only_its_owner_can_read_the_store(store: Store, file: Path) -> None:
    store.add(kept_run(), "watch")
    with closing(sqlite3.connect(file)) as reader:
        reader.execute("SELECT * FROM runs").fetchall()  # so that the files beside it are there
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
    assert modes == {"runs.db": 0o600, "runs.db-wal": 0o600, "runs.db-shm": 0o600}


def test_a_reader_does_not_hold_up_a_writer(store: Store, file: Path) -> None:
    with closing(sqlite3.connect(file)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM runs").fetchall()
        assert store.add(kept_run(), "watch")


def test_a_network_file_system_gets_a_rollback_journal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [SimpleNamespace(mountpoint=str(file.parent.parent), fstype="nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert is_on_network(file)
    with open_store() as store:
        store.add(kept_run(), "watch")
        assert store.query("SELECT count(*) FROM runs")[1] == [(1,)]
    with closing(sqlite3.connect(file)) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_the_tables_are_those_that_migrations_make(store: Store) -> None:
    names = [table.name for table in METADATA.sorted_tables]
    made = {name: [row[:4] for row in store_columns(store, name)] for name in names}
    wanted = {}
    for table in METADATA.sorted_tables:
        wanted[table.name] = [
            (column.name, str(column.type), int(not column.nullable)) for column in table.columns
        ]
    assert {name: [(row[1], row[2], row[3]) for row in rows] for name, rows in made.items()} == wanted


def store_columns(store: Store, table: str) -> list[tuple[object, ...]]:
    assert store.file is not None
    with closing(sqlite3.connect(store.file)) as reader:
        return reader.execute(f"PRAGMA table_info({table})").fetchall()


def test_a_query_reads(store: Store) -> None:
    store.add(kept_run(), "watch")
    names, rows = store.query("SELECT pipeline, count(*) AS runs FROM runs GROUP BY pipeline")
    assert (names, rows) == (["pipeline", "runs"], [("FluxPipeline", 1)])


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM runs",
        "DROP TABLE runs",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA writable_schema = 1",
        "ATTACH DATABASE '/tmp/x.db' AS x",
        "VACUUM INTO '/tmp/x.db'",
        "SELECT load_extension('x')",
        "SELECT 1; DELETE FROM runs",
        "WITH x AS (SELECT 1) DELETE FROM runs",
        "nonsense",
        "",
    ],
)
def test_a_query_does_nothing_else(store: Store, sql: str) -> None:
    store.add(kept_run(), "watch")
    if sql:
        with pytest.raises(ConfigError, match="query failed"):
            store.query(sql)
    assert store.count() == 1


def refusal(url: str | None = None) -> StoreError:
    with pytest.raises(StoreError) as refused, open_store(url) as store:
        store.add(kept_run(), "watch")
    return refused.value


def test_ctrl_c_ends_a_query(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it where it runs itself, which SQLite lets it now and then."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sigmascope.history.store._go_on", interrupted)
    long = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 500000) SELECT max(i) FROM n"
    with pytest.raises(KeyboardInterrupt):
        store.query(long)
    monkeypatch.undo()
    assert store.query(long)[1] == [(500000,)]


def test_a_store_of_a_later_version_is_left_alone(store: Store, file: Path) -> None:
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("UPDATE alembic_version SET version_num = '99'")
        writer.commit()
    assert "later version" in refusal().message


def test_garbage_is_no_store(file: Path) -> None:
    file.parent.mkdir()
    with file.open("wb") as garbage:
        garbage.write(b"garbage" * 1000)
        garbage.truncate(10 << 30)  # sparse
    assert "damaged" in refusal().message
    assert file.stat().st_size == 10 << 30


def test_another_program_s_database_is_no_store(file: Path) -> None:
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("CREATE TABLE alembic_version (version_num TEXT)")
        writer.execute("INSERT INTO alembic_version VALUES ('1')")
        writer.commit()
    assert "no store" in refusal().message


def test_a_folder_is_no_store(file: Path) -> None:
    file.mkdir(parents=True)
    assert "is a folder" in refusal().message


@pytest.mark.parametrize("folder", ["x" * 300, "runs.json/inside"])
def test_a_place_where_nobody_may_look_is_not_taken_for_an_empty_one(tmp_path: Path, folder: str) -> None:
    """As a closed folder is one, which no folder is to who runs these tests as root."""
    (tmp_path / "runs.json").touch()
    url = f"sqlite:///{tmp_path}/{folder}/runs.db"
    for create in (False, True):
        with pytest.raises(StoreError, match="cannot be opened"), open_store(url, create=create):
            pass
    assert live_runs(url) == []


def test_a_device_is_no_store() -> None:
    assert "is no file" in refusal("sqlite:////dev/null").message


def test_a_closed_file_beside_the_store_is_named(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a closed store leaves a closed file for sharing, which stays closed when the store is opened again."""
    shared = file.with_name(f"{file.name}-shm")
    shared.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != shared)
    with pytest.raises(StoreError) as refused, store._told():
        raise OperationalError("", {}, sqlite3.OperationalError("attempt to write a readonly database"))
    assert f"Check the permissions of {shared};" in str(refused.value.hint)


def test_a_store_on_a_disk_that_is_mounted_read_only_says_so(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite cannot make the file that readers share there, and only says that it is unable to open the store."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match="is read-only") as refused, store._told():
        raise OperationalError("", {}, sqlite3.OperationalError("unable to open database file"))
    assert str(file) in str(refused.value.hint)
    assert "copy" in str(refused.value.hint)


def test_a_disk_without_room_for_what_readers_share_is_full(store: Store) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
    with pytest.raises(StoreError, match="has no room"), store._told():
        raise OperationalError("", {}, error)


def test_a_read_only_store_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up = Store._set_up

    def read_only(self: Store, connection: sqlite3.Connection, record: object) -> None:
        set_up(self, connection, record)
        connection.execute(
            "PRAGMA query_only = ON"
        )  # SQLite's words are those for a file that it may only read

    monkeypatch.setattr(Store, "_set_up", read_only)
    assert "read-only" in refusal().message


def test_a_store_of_whose_disk_nothing_is_left_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up = Store._set_up

    def small(self: Store, connection: sqlite3.Connection, record: object) -> None:
        set_up(self, connection, record)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    monkeypatch.setattr(Store, "_set_up", small)
    large = kept_run(facts={"noise": os.urandom(99_000).hex()})
    with open_store() as opened, pytest.raises(StoreError, match="has no room"):
        opened.add(large, "watch")
    assert store.count() == 0


def test_a_locked_store_says_so(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_WAIT_SECONDS", 0.05)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert "locked" in refusal().message


def test_a_store_that_is_not_there_is_not_made_by_reading(file: Path) -> None:
    with pytest.raises(StoreError, match="No run is kept yet"), open_store(create=False):
        pass
    assert not file.exists()


def test_many_threads_may_make_it_at_once(file: Path) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait()
            with open_store() as store:
                store.add(kept_run(id=f"{number}"), "watch")
        except BaseException as failure:  # noqa: BLE001 - told below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with open_store() as store:
        assert store.count() == 4


@pytest.mark.parametrize(
    "url",
    [
        "nonsense://x",
        "postgresql+nonsense://x",
        "://",
        "sqlite://host/x.db",
        "mysql://me@host/x",
        "postgresql+psycopg2://me@host/x",
        "sqlite+aiosqlite:////x.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:////x.db?mode=ro",
        "sqlite:////x.db?ro",
        "sqlite:///file:/x.db?uri=true",  # whose file everybody could read
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="SIGMASCOPE_STORE"), open_store(url):
        pass


@pytest.mark.parametrize("folder", ["what?", "100%", "a%20b", "a b#c&d=e", "%3F", "ü:é", "C:"])
@pytest.mark.parametrize("named_by", ["a path", "a URL", "the data folder"])
def test_a_store_lies_at_its_own_path_whatever_is_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, named_by: str
) -> None:
    file = tmp_path / folder / "runs.db"
    url = f"sqlite:///{tmp_path}/{quote(folder)}/runs.db"
    monkeypatch.setattr("sigmascope.history.location.data_folder", lambda: file.parent)
    monkeypatch.setenv(STORE, {"a path": str(file), "a URL": url, "the data folder": ""}[named_by])
    with open_store() as store:
        store.add(kept_run(), "watch")
        assert store.name == str(file)
    assert file_of(store_url()) == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with closing(sqlite3.connect(file)) as reader:
        assert reader.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    assert [path.name for path in tmp_path.iterdir()] == [folder]
    assert [path for path in file.parent.iterdir() if not path.name.startswith("runs.db")] == []


def test_a_path_from_a_folder_with_a_percent_sign_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "50%41").mkdir()
    monkeypatch.chdir(tmp_path / "50%41")
    assert file_of(store_url({STORE: "runs.db"})) == tmp_path / "50%41/runs.db"
    assert file_of(store_url({STORE: "sqlite:///runs%20x.db"})) == tmp_path / "50%41/runs x.db"


def kept_by_a_clock(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int, *moments: str, source: str = "watch"
) -> None:
    """Keep runs that began and were kept at these moments, and no more than so many of them."""
    monkeypatch.setattr(store_module, "MOST_RUNS", most)
    for moment in moments:
        monkeypatch.setattr(store_module, "_now", lambda moment=moment: f"{moment}T00:00:01.000000+00:00")
        store.add(kept_run(id=moment, started_at=f"{moment}T00:00:00+00:00"), source, prune=True)


def test_a_clock_that_was_set_back_costs_no_new_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ("2026-03-01", "2026-03-02", "2026-03-03")
    kept_by_a_clock(store, monkeypatch, 3, *right, "1970-01-01", "1970-01-02")  # a board without a battery
    assert set(ids(store)) == {"2026-03-03", "1970-01-01", "1970-01-02"}
    kept_by_a_clock(store, monkeypatch, 3, "2026-03-04")
    assert set(ids(store)) == {"1970-01-01", "1970-01-02", "2026-03-04"}


def test_a_run_of_a_clock_that_was_set_forward_goes_in_its_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_by_a_clock(store, monkeypatch, 2, "2099-03-01", "2026-03-01", "2026-03-02", "2026-03-03")
    assert ids(store) == ["2026-03-03", "2026-03-02"]


@pytest.mark.parametrize(
    "moments",
    [
        ("2026-03-01", "2099-03-01", "2026-03-02"),
        ("2026-03-01", "2026-03-02", "1970-01-01"),
        ("2026-03-02", "2026-03-01"),  # of two machines with one store
    ],
)
def test_the_last_run_is_the_one_that_was_kept_last_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch, moments: tuple[str, ...]
) -> None:
    kept_by_a_clock(store, monkeypatch, 9, *moments)
    assert ids(store) == [*reversed(moments)]
    [last] = runs_of("latest", store)
    assert last.row.started_at.startswith(moments[-1])
    assert [run.row.id for run in store.comparable_before(last, limit=9)] == [*reversed(moments[:-1])]
    assert [point.id for point in store.points("seconds")] == [*moments]
    assert store.prune(1, 10**9) == len(moments) - 1
    assert ids(store) == [moments[-1]]


def test_a_new_run_that_is_not_kept_comes_after_those_that_were_kept_since_a_clock_was_wrong(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_by_a_clock(store, monkeypatch, 9, "2026-03-01", "2099-03-01", "2026-03-02", "2026-03-03")
    [new] = store.placed([row_of(kept_run(started_at="2026-03-03T12:00:00+00:00"))])
    found = [run.row.id for run in store.comparable_before(new, limit=9)]
    assert found == ["2026-03-03", "2026-03-02", "2026-03-01"]
    [old] = store.placed([row_of(kept_run(started_at="2026-03-02T12:00:00+00:00"))])
    assert [run.row.id for run in store.comparable_before(old, limit=9)] == ["2026-03-02", "2026-03-01"]


def test_a_run_that_began_before_the_clock_was_set_is_the_last(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_by_a_clock(store, monkeypatch, 9, "2026-03-01")
    monkeypatch.setattr(store_module, "_now", lambda: "2026-03-02T00:00:00.000000+00:00")
    store.add(kept_run(id="board", started_at="1970-01-01T00:00:09+00:00"), "watch")
    assert ids(store) == ["board", "2026-03-01"]


def test_an_imported_run_from_the_future_stands_where_it_was_imported(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_now", lambda: "2026-03-01T00:00:00.000000+00:00")
    store.add(kept_run(id="2099", started_at="2099-03-01T00:00:00+00:00"), "import", imported=True)
    kept_by_a_clock(store, monkeypatch, 9, "2026-03-02")
    assert ids(store) == ["2026-03-02", "2099"]


def test_runs_that_come_from_another_store_go_by_their_own_age(store: Store) -> None:
    for year in ("2026", "2024", "2025"):  # all kept now
        store.add(kept_run(id=year, started_at=f"{year}-03-02T00:00:00+00:00"), "watch", imported=True)
    assert store.prune(2, 10**9) == 1
    assert ids(store) == ["2026", "2025"]


def test_a_store_of_the_first_version_is_given_the_order_of_its_runs(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(store_module, "REVISION", "1")
        with open_store():
            pass
    kept = [  # when each began and was kept; the third was imported
        ("a", "2026-03-02", "2026-03-02"),
        ("2099", "2099-03-03", "2026-03-03"),
        ("import", "2026-03-01", "2026-03-04"),
        ("1970", "1970-01-01", "1970-01-01"),
        ("b", "2026-03-05", "2026-03-05"),
    ]
    row = "INSERT INTO runs (id, name, started_at, kept_at, source, outcome, seconds, generations, record_bytes) VALUES "
    with closing(sqlite3.connect(file)) as writer:
        for id, started, ended in kept:
            times = [f"{day}T00:00:00.000000+00:00" for day in (started, ended)]
            writer.execute(f"{row} (?, '', ?, ?, 'watch', 'ok', 1.5, 1, 9)", (id, *times))
        writer.commit()
    with open_store() as store:
        assert ids(store) == ["b", "1970", "2099", "a", "import"]
        store.add(kept_run(id="new"), "watch")
        assert ids(store)[0] == "new"


def test_a_run_is_known_again_though_another_version_wrote_it(store: Store, file: Path) -> None:
    run = kept_run(id="a")
    store.add(run, "watch")
    with closing(sqlite3.connect(file)) as writer:
        text = json.dumps(json.loads(run_to_json(run)), indent=1, sort_keys=True)  # the same, in other bytes
        writer.execute("UPDATE records SET content = ?", (zlib.compress(text.encode()),))
        writer.commit()
    assert not store.add(run, "watch")


def test_a_run_whose_record_is_damaged_is_not_known_again(store: Store, file: Path) -> None:
    store.add(kept_run(id="a"), "watch")
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("UPDATE records SET content = x'00'")
        writer.commit()
    with pytest.raises(OtherRunError, match="id a"):
        store.add(kept_run(id="a"), "watch")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:p@secret@host/runs",
        "postgresql://me:p@secret:word@host/runs",
        "postgresql://me:p@sec/ret@host/runs",
        "postgresql://me:p@secret?x@host/runs",
        "postgresql://me:secret",
        "postgresql://me:p@host:secret/runs",
        "postgresql://[::secret/runs",
        "postgresql:/me:secret@host/runs",
        "postgresql+psycopg:me:secret@host/runs",
        "postgres:me:secret",
    ],
)
def test_a_password_is_not_told_where_it_breaks_the_url(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Store(store_url({STORE: url}))
    told = f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"
    assert "sec" not in told
    assert "ret" not in told


def test_a_password_is_not_told() -> None:
    pytest.importorskip("psycopg")
    assert Store("postgresql+psycopg://me:secret@host/runs").name == "postgresql+psycopg://me:***@host/runs"
    assert "secret" not in Store("postgresql+psycopg://host/runs?user=me&password=secret").name


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_postgresql_is_reached_by_psycopg(scheme: str) -> None:
    pytest.importorskip("psycopg")
    assert Store(f"{scheme}://me@host/runs").name == "postgresql+psycopg://me@host/runs"


@pytest.mark.parametrize("limit", [10, 10**20])
def test_a_limit_may_be_larger_than_any_store(store: Store, limit: int) -> None:
    store.add(kept_run(), "watch")
    assert len(store.runs(limit=limit)) == 1
    assert store.query("SELECT 1", limit=limit)[1] == [(1,)]


def test_text_of_another_encoding_is_refused_in_words(store: Store) -> None:
    with pytest.raises(ConfigError, match="cannot be asked"):
        store.runs(Filters(pipeline="\udcff"))
    with pytest.raises(ConfigError, match="query failed"):
        store.query("SELECT '\udcff'")


@pytest.mark.parametrize("sql", ["", "  ", "-- nothing"])
def test_an_empty_query_is_refused(store: Store, sql: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        store.query(sql)


def test_a_damaged_record_says_so(store: Store, file: Path) -> None:
    store.add(kept_run(), "watch")
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("UPDATE records SET content = x'00'")
        writer.commit()
    with pytest.raises(StoreError, match="damaged"):
        store.record(store.runs()[0].number)


def test_ranks_of_one_launch_are_not_runs_before_each_other(store: Store) -> None:
    for launch in range(2):
        for rank in range(2):
            facts = {"group": {"rank": rank, "world_size": 2, "machine": "a"}}
            at = f"2026-03-01T0{launch}:00:0{rank}+00:00"
            store.add(kept_run(id=f"{launch}{rank}", started_at=at, facts=facts), "watch")
    alone = kept_run(id="alone", started_at="2026-03-01T03:00:00+00:00")
    store.add(alone, "watch")
    newest, last, *_ = store.runs()
    assert [run.row.id for run in store.comparable_before(last, limit=9)] == ["01"]
    assert store.comparable_before(newest, limit=9) == []
