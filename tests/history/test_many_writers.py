"""Many processes write at once, and some are killed: nothing that was confirmed is lost, and nothing is there in part."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from sigmascope.history.keeper import unkept_files
from sigmascope.history.store import open_store

pytestmark = pytest.mark.slow

PROCESSES, RUNS = 8, 500
WRITES = """
import sys
from tests.history.kept_runs import kept_run
from sigmascope.history.keeper import finish, keep
said = []
for number in range(int(sys.argv[2])):
    keep(kept_run(id=f"{sys.argv[1]}-{number}", loras={"unet.x": {}}), "bench", said.append)
import sigmascope.history.keeper as keeper
keeper.LONGEST_WAIT_SECONDS = 600
finish()
print(said)
"""
CONFIRMS = """
import sys
from tests.history.kept_runs import kept_run
from sigmascope.history.store import open_store
with open_store() as store:
    print("begin", flush=True)
    for number in range(10_000):
        run = kept_run(id=f"{sys.argv[1]}-{number}", loras={"unet.x": {}})
        store.add(run, "watch", tags=["told"], prune=True)
        print(run.id, flush=True)
"""


def started(code: str, *words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_no_run_of_many_processes_is_lost(store_file: Path) -> None:
    with open_store():
        pass  # making it at once is another test's
    processes = [started(WRITES, name, RUNS) for name in range(PROCESSES)]
    said = [process.communicate(timeout=1200)[0].strip() for process in processes]
    assert said == ["[]"] * PROCESSES
    assert unkept_files() == []
    with open_store() as store:
        ids = {run.row.id for run in store.runs()}
        assert store.query("SELECT count(*) FROM records")[1] == [(PROCESSES * RUNS,)]
        assert store.query("SELECT count(*) FROM loras")[1] == [(PROCESSES * RUNS,)]
    assert ids == {f"{name}-{number}" for name in range(PROCESSES) for number in range(RUNS)}


def test_what_was_confirmed_before_a_kill_is_there(store_file: Path) -> None:
    randomly = random.Random(0)
    confirmed: list[str] = []
    kills = 0
    while len(confirmed) < 200 or kills < 20:
        with started(CONFIRMS, kills) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begin\n"
            time.sleep(randomly.uniform(0.02, 0.6))
            process.send_signal(signal.SIGKILL)
            confirmed += process.stdout.read().split()
        kills += 1
        with closing(sqlite3.connect(store_file)) as reader:
            assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert reader.execute("PRAGMA foreign_key_check").fetchall() == []
    with open_store() as store:
        kept = store.runs()
        assert set(confirmed) <= {run.row.id for run in kept}
        assert len(kept) <= len(confirmed) + kills  # one that was being written may be there as a whole
        for run in kept:
            assert (store.record(run.number).id, run.tags, run.row.loras) == (run.row.id, ("told",), ("x",))
