"""Runs are kept on a thread of their own, and a store that refuses them costs none."""

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.history.kept_runs import kept_run

from sigmascope.history import keeper
from sigmascope.history.keeper import finish, keep, keep_all, unkept_files
from sigmascope.history.location import KEEP, STORE, store_url, unkept_folder
from sigmascope.history.store import Store, open_store
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run


@pytest.fixture
def said() -> list[str]:
    return []


def kept_ids() -> list[str]:
    with open_store(create=False) as store:
        return [run.row.id for run in store.runs()]


def test_a_run_is_kept_and_the_first_time_one_line_says_where(file: Path, said: list[str]) -> None:
    for name in "ab":
        keep(kept_run(id=name), "watch", said.append)
    finish()
    assert sorted(kept_ids()) == ["a", "b"]
    assert said == [f"runs are kept in {file}; SIGMASCOPE_KEEP=0 keeps none"]


def test_no_thread_and_no_open_file_is_left(file: Path, said: list[str]) -> None:
    for _ in range(2):  # the second time another thread begins
        keep(kept_run(), "watch", said.append)
        finish()
        for thread in threading.enumerate():
            if thread.name == "sigmascope-history":
                thread.join(10)
                assert not thread.is_alive()
    assert [opened for opened in psutil.Process().open_files() if str(file) in opened.path] == []
    assert len(kept_ids()) == 2


def test_nothing_is_kept_where_the_environment_says_so(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEEP, "0")
    keep(kept_run(), "watch", said.append)
    keep_all([kept_run()], "bench", said.append)
    finish()
    assert not file.exists()
    assert said == []


def test_the_host_does_not_wait_for_the_store(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, threads = threading.Event(), list[str]()

    def slow(*_: object, **__: object) -> None:
        threads.append(threading.current_thread().name)
        may_go_on.wait(10)
        raise OSError("broken")

    monkeypatch.setattr("sigmascope.history.store.open_store", slow)
    keep(kept_run(), "watch", said.append)  # comes back although the store does not
    may_go_on.set()
    finish()
    assert threads == ["sigmascope-history"]


def test_what_is_wrong_with_the_store_is_said_once_and_every_run_is_written_beside_it(
    file: Path, said: list[str]
) -> None:
    file.parent.mkdir()
    file.write_bytes(b"garbage" * 1000)
    runs = [kept_run(), kept_run()]
    for run in runs:
        keep(run, "watch", said.append)
    finish()
    files = unkept_files()
    assert sorted((load_run(path) for path in files), key=lambda run: run.id) == runs
    assert {path.parent for path in files} == {file.with_suffix(".unkept")}
    [line] = said
    assert "damaged" in line
    assert str(file.with_suffix(".unkept")) in line
    assert "runs import" in line


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_store_that_is_deleted_while_it_is_open_costs_no_run(
    is_replaced: bool, file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux and macOS writes to a file that is gone succeed."""
    add = Store.add

    def add_to_nowhere(store: Store, run: Run, *arguments: Any, **named: Any) -> bool:
        if run.id == "second":
            file.unlink()
            if is_replaced:
                file.touch()
        return add(store, run, *arguments, **named)

    monkeypatch.setattr(Store, "add", add_to_nowhere)
    with keeper.Keeper() as writer:
        for name in ("first", "second", "third"):
            writer.write(kept_run(id=name), "watch", said.append, store_url())
    assert [load_run(path).id for path in unkept_files()] == ["second"]
    assert kept_ids() == ["third"]
    assert "was deleted or replaced while it was open; the run is in" in said[-1]


def test_a_folder_that_cannot_be_written_is_no_loss_either(file: Path, said: list[str]) -> None:
    file.parent.parent.joinpath("data").write_text("a file where the folder should be")
    run = kept_run()
    keep_all([run], "watch", said.append)
    assert [load_run(path) for path in unkept_files()] == [run]


def test_where_nothing_can_be_written_a_line_says_that_the_run_is_lost(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(keeper, "gettempdir", lambda: str(file))
    keep_all([kept_run()], "watch", said.append)
    [line] = said
    assert "the run was not kept" in line


def test_a_run_with_a_fact_that_json_lacks_is_told_and_raises_nothing(file: Path, said: list[str]) -> None:
    keep_all([kept_run(facts={"x": object()}), kept_run(id="next")], "watch", said.append)
    assert kept_ids() == ["next"]
    assert "JSON lacks" in said[-1]


def test_a_listener_that_fails_costs_no_run(file: Path) -> None:
    def fail(line: str) -> None:
        raise ValueError(line)

    keep(kept_run(id="a"), "watch", fail)
    finish()
    assert kept_ids() == ["a"]


def test_a_locked_store_is_not_waited_for_without_end(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.history.store._WAIT_SECONDS", 0.05)
    with open_store():
        pass
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        keep(kept_run(), "watch", said.append)
        finish()
    assert len(unkept_files()) == 1
    assert "locked" in said[0]


def test_a_store_that_stays_locked_until_the_end_is_told_in_one_line(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.history.store._WAIT_SECONDS", 0.2)
    monkeypatch.setattr(keeper, "LONGEST_WAIT_SECONDS", 0.3)
    with open_store():
        pass
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(4):
            keep(kept_run(), "watch", said.append)
        deadline = time.monotonic() + 30
        while not said:  # of the first run it is known why
            assert time.monotonic() < deadline
            time.sleep(0.005)
        finish()
    monkeypatch.setattr(keeper, "LONGEST_WAIT_SECONDS", 10.0)
    finish()
    assert {load_run(path).id for path in unkept_files()} | set(kept_ids()) != set()
    assert len(said) == 1
    assert "locked" in said[0]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owners")
def test_a_folder_of_another_user_gets_no_run_and_gives_none(
    file: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(keeper, "gettempdir", lambda: str(tmp_path))
    theirs = tmp_path / f"sigmascope-{os.getuid()}.unkept"
    theirs.mkdir()
    kept_run().save(theirs / "planted.json")
    user = os.getuid()
    monkeypatch.setattr(keeper, "_unkept_folders", lambda url: (file, theirs))
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    keep_all([kept_run()], "watch", said.append)
    assert "belongs to another user" in said[0]
    assert unkept_files() == []
    assert len(list(theirs.iterdir())) == 1


def test_what_is_not_kept_in_time_is_written_as_json(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(keeper, "LONGEST_WAIT_SECONDS", 0.05)
    monkeypatch.setattr("sigmascope.history.store.open_store", lambda *_, **__: (may_go_on.wait(10), [][0]))
    for name in ("first", "second"):
        keep(kept_run(id=name), "watch", said.append)
    deadline = time.monotonic() + 5
    while not keeper._keeper or keeper._keeper._work.qsize() != 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    finish()
    assert sorted(load_run(path).id for path in unkept_files()) == ["first", "second"]
    may_go_on.set()
    monkeypatch.setattr(keeper, "LONGEST_WAIT_SECONDS", 10.0)
    finish()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_keeps_its_own_runs(file: Path, said: list[str]) -> None:
    keep(kept_run(id="parent"), "watch", said.append)
    finish()
    child = os.fork()
    if child == 0:
        keep(kept_run(id="child"), "watch", said.append)
        finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(kept_ids()) == ["child", "parent"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_runs_are_written_keeps_its_own(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would take the locks of its parent's open store for the child's."""
    monkeypatch.setattr("sigmascope.threads._MOST_FORK_SECONDS", 60.0)
    children = []
    for number in range(4):
        for part in "abc":
            keep(kept_run(id=f"parent {number}{part}"), "watch", said.append)
        child = os.fork()
        if child == 0:
            keep(kept_run(id=f"child {number}"), "watch", said.append)
            finish()
            os._exit(len(unkept_files()))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    finish()
    assert len([name for name in kept_ids() if name.startswith("child")]) == 4
    assert len(kept_ids()) == 16


LOCKS = """
import sqlite3, sys, time
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_until_the_lock_of_the_store_is_free(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.threads._MOST_FORK_SECONDS", 60.0)
    monkeypatch.setattr("sigmascope.history.store._WAIT_SECONDS", 60.0)
    with open_store():
        pass
    with subprocess.Popen([sys.executable, "-c", LOCKS, file], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        keep(kept_run(id="parent"), "watch", said.append)
        until_open()
        child = os.fork()
        if child == 0:
            keep(kept_run(id="child"), "watch", said.append)
            finish()
            os._exit(len(unkept_files()))
        assert kept_ids() == []
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        other.kill()
    assert os.waitpid(child, 0)[1] == 0
    finish()
    assert sorted(kept_ids()) == ["child", "parent"]


def until_open() -> None:
    """Wait until the keeper of this process has the store open."""
    deadline = time.monotonic() + 30
    while not keeper._keeper or not keeper._keeper.has_open:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_while_the_disk_hangs_writes_json(
    file: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.threads._MOST_FORK_SECONDS", 0.01)
    may_go_on, add = threading.Event(), Store.add

    def slow(*arguments: Any, **named: Any) -> bool:
        may_go_on.wait(30)
        return add(*arguments, **named)

    monkeypatch.setattr(Store, "add", slow)
    keep(kept_run(id="parent"), "watch", said.append)
    until_open()
    child = os.fork()
    if child == 0:
        keep(kept_run(id="child"), "watch", said.append)
        finish()
        os._exit("was open" not in said[-1])
    assert os.waitpid(child, 0)[1] == 0
    may_go_on.set()
    finish()
    assert kept_ids() == ["parent"]
    assert [load_run(path).id for path in unkept_files()] == ["child"]


POOL = """
import multiprocessing, sys
from tests.history.kept_runs import kept_run
from sigmascope.history import keeper

keeper.LONGEST_WAIT_OF_WORKERS_SECONDS = 600

def work(number):
    keeper.keep(kept_run(id=str(number)), "watch", lambda line: None)
    return number

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(work, range(4), chunksize=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_pool_that_ends_its_workers_by_a_signal_loses_no_run(how: str, file: Path, tmp_path: Path) -> None:
    if how not in multiprocessing.get_all_start_methods():
        pytest.skip("there is no fork")
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, script, how], env=environment, check=True, timeout=300)
    assert sorted(kept_ids()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("named", "url", "beside"),
    [
        ("/x/y.db", "sqlite:////x/y.db", "/x/y.unkept"),
        ("sqlite:////x/y.db", "sqlite:////x/y.db", "/x/y.unkept"),
        ("postgresql+psycopg://me@host/runs", "postgresql+psycopg://me@host/runs", None),
        ("~/y.db", "sqlite:////home/me/y.db", "/home/me/y.unkept"),
        ("sqlite:///~/y.db", "sqlite:////home/me/y.db", "/home/me/y.unkept"),
        ("y.db", "sqlite:////here/y.db", "/here/y.unkept"),
        ("sqlite:///y.db", "sqlite:////here/y.db", "/here/y.unkept"),
        (" /x/a b%20.db ", "sqlite:////x/a b%2520.db", "/x/a b%20.unkept"),
        (":memory:", "sqlite:///:memory:", None),
        ("/dev/null", "sqlite:////dev/null", None),
    ],
)
def test_where_runs_are_kept(
    named: str, url: str, beside: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert store_url({STORE: named}) == url
    assert unkept_folder(url) == Path(beside or "/data/sigmascope/runs.unkept")


@pytest.mark.parametrize("named", ["~nobody-of-this-name/y.db", "y.db"])
def test_an_unknown_home_or_a_folder_that_is_gone_raises_nothing(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    assert store_url({STORE: named}) == f"sqlite:///{named}"


def test_an_empty_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_url({STORE: " "}) == store_url({})


def test_by_default_they_are_kept_among_the_user_s_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_data_path", lambda name, appauthor: Path("/data", name))
    assert store_url({}) == "sqlite:////data/sigmascope/runs.db"
