"""The same store on PostgreSQL, on a server that the tests start: it hears no network, and ends with them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.history.kept_runs import kept_run
from tests.history.postgres import PROGRAMS, postgres_server
from tests.history.test_many_writers import require_confirmed

from sigmascope.errors import ConfigError, OtherRunError, StoreError
from sigmascope.history import store as store_module
from sigmascope.history.exchange import take_in, write_runs
from sigmascope.history.keeper import keep_all, unkept_files
from sigmascope.history.location import STORE
from sigmascope.history.row import row_of
from sigmascope.history.store import Filters, Store, open_store

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.skipif(not (PROGRAMS / "initdb").exists(), reason="PostgreSQL is not installed"),
]
WRITES = """
import sys
from tests.history.kept_runs import kept_run
from sigmascope.history.keeper import keep_all
said = []
keep_all([kept_run(id=f"{sys.argv[1]}-{number}") for number in range(int(sys.argv[2]))], "bench", said.append)
print([line for line in said if "kept in" not in line])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """The folder of a server's socket."""
    with postgres_server() as folder:
        yield folder


@pytest.fixture
def url(
    server: Path, store_file: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Of a new database."""
    import psycopg

    name = f"d{abs(hash(request.node.name))}"
    with psycopg.connect(host=str(server), user="me", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    url = f"postgresql+psycopg://me@/{name}?host={server}"
    monkeypatch.setenv(STORE, url)
    return url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store() as opened:
        yield opened


def test_a_run_comes_back_as_it_was(store: Store) -> None:
    run = kept_run(facts={"odd": [float("inf"), "\ud800\0"]}, loras={"unet.x": {"file": "style.safetensors"}})
    assert store.add(run, "watch", tags=["before"], notes=["new driver"])
    assert not store.add(run, "watch")
    with pytest.raises(OtherRunError):
        store.add(replace(run, seconds=3.0), "watch")
    [kept] = store.runs()
    assert store.record(kept.number) == run
    assert (kept.tags, kept.notes, kept.row.loras) == (("before",), ("new driver",), ("style.safetensors",))


def test_filters_tags_and_removal(store: Store) -> None:
    for day in range(1, 5):
        run = kept_run(
            id=str(day),
            started_at=f"2026-03-0{day}T00:00:00+00:00",
            loras={"unet.x": {"file": f"Style{day}"}},
        )
        store.add(run, "watch")

    def ids(**filters: str) -> list[str]:
        return [run.row.id for run in store.runs(Filters(**filters))]

    assert ids() == ["4", "3", "2", "1"]
    assert ids(pipeline="flux", lora="style2") == ["2"]
    assert ids(since="2026-03-02", until="2026-03-04") == ["3", "2"]
    now = store.runs(limit=1)[0]
    assert [run.row.id for run in store.comparable_before(now, limit=2)] == ["3", "2"]
    store.tag([run.number for run in store.runs(Filters(lora="style1"))], "first")
    assert ids(tag="first") == ["1"]
    assert store.prune(2, 10**9) == 2
    assert ids() == ["4", "1"]
    store.remove([run.number for run in store.runs()])
    for table in ("runs", "records", "loras", "tags"):
        assert store.query(f"SELECT count(*) FROM {table}")[1] == [(0,)]


def test_a_store_of_the_first_version_is_given_the_order_of_its_runs(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(store_module, "REVISION", "1")
        with open_store() as store, store._writing() as connection:
            for id, year in (("a", 2026), ("b", 2099), ("c", 1970)):
                moment = f"{year}-03-01T00:00:00.000000+00:00"
                connection.exec_driver_sql(
                    "INSERT INTO runs (id, name, started_at, kept_at, source, outcome, seconds, generations, record_bytes)"
                    f" VALUES ('{id}', '', '{moment}', '{moment}', 'watch', 'ok', 1.5, 1, 9)"
                )
    with open_store() as store:
        assert [run.row.id for run in store.runs()] == ["c", "b", "a"]
        [new] = store.placed([row_of(kept_run())])  # which is not kept
        assert store.comparable_before(new, limit=9) == []  # those are of another kind


def test_a_query_reads_and_does_nothing_else(store: Store) -> None:
    store.add(kept_run(), "watch")
    assert store.query("SELECT pipeline, count(*) AS runs FROM runs GROUP BY pipeline") == (
        ["pipeline", "runs"],
        [("FluxPipeline", 1)],
    )
    assert store.query("SELECT count(*) FROM runs WHERE name LIKE '%'")[1] == [(1,)]
    several = "COMMIT; DELETE FROM runs", "SELECT 1; ROLLBACK; DELETE FROM runs"
    for sql in ("DELETE FROM runs", "DROP TABLE runs", "SET TRANSACTION READ WRITE", "nonsense", *several):
        with pytest.raises(ConfigError):
            store.query(sql)
    assert store.count() == 1


def test_many_processes_make_the_tables_and_lose_nothing(url: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, str(name), "500"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in range(8)
    ]
    assert [process.communicate(timeout=600)[0].strip() for process in processes] == ["[]"] * 8
    with open_store() as store:
        assert store.query("SELECT count(*), count(DISTINCT id) FROM runs") == (
            ["count", "count"],
            [(4000, 4000)],
        )


def test_what_was_confirmed_before_a_kill_is_there(url: str) -> None:
    with open_store():
        pass
    require_confirmed(None, at_once=8)


def test_runs_go_to_a_file_of_sqlite_and_back(store: Store, tmp_path: Path) -> None:
    store.add(kept_run(id="a"), "watch", tags=["x"], notes=["y"])
    write_runs(store, store.runs(), tmp_path / "runs.jsonl")
    with open_store(f"sqlite:///{tmp_path}/other.db") as other:
        assert take_in(other, [tmp_path / "runs.jsonl"]).added == ("a",)
        [there], [here] = other.runs(), store.runs()
        assert (there.row, there.tags, there.notes) == (here.row, here.tags, here.notes)


def test_a_server_that_is_gone_costs_no_run(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STORE, f"{url}gone")
    monkeypatch.setattr("sigmascope.history.location.data_folder", lambda: tmp_path / "data")
    said: list[str] = []
    keep_all([kept_run()], "watch", said.append)
    assert len(unkept_files()) == 1
    assert "does not answer" in said[0]
    with pytest.raises(StoreError, match="does not answer"), open_store():
        pass
