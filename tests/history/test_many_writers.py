"""Many processes write at once, and some are killed: nothing that was confirmed is lost, and nothing is there in part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sigmascope.history.keeper import unkept_files
from sigmascope.history.store import open_store

pytestmark = pytest.mark.slow

PROCESSES, RUNS = 8, 500
PROCESSES_KILLED = 200
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
KILLS = """
import os, random, select, signal, sqlite3, sys, time
from contextlib import closing
from tests.history.kept_runs import kept_run
from sigmascope.history.location import store_url
from sigmascope.history.row import row_of
from sigmascope.history.store import Store, open_store
from sigmascope.records.serialization import run_to_json

Store(store_url()).close()  # what each writer would import and make again, which is most of its time
row_of(kept_run()), run_to_json(kept_run())
kills, at_once, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
randomly = random.Random(0)

def begun(number):
    told, tell = os.pipe()
    writer = os.fork()
    if writer == 0:
        with open_store() as store:
            for write in range(10_000):
                run = kept_run(id=f"{number}-{write}", loras={"unet.x": {}})
                store.add(run, "watch", tags=["told"], prune=True)
                os.write(tell, f"{run.id} ".encode())
    os.close(tell)
    return told, writer

numbers, writers, ends, said = iter(range(kills)), {}, {}, {}
while True:
    while len(writers) < at_once and (number := next(numbers, None)) is not None:
        told, writers[told] = begun(number)
        said[told] = b""
    if not writers:
        break
    wait = max(0, min(ends.values()) - time.monotonic()) if ends else None
    for told in select.select([told for told in writers if told not in ends], [], [], wait)[0]:
        said[told] += os.read(told, 65536)
        ends[told] = time.monotonic() + randomly.uniform(0, 0.1)
    for told in [told for told, end in ends.items() if end <= time.monotonic()]:
        del ends[told]
        writer = writers.pop(told)
        os.kill(writer, signal.SIGKILL)
        while part := os.read(told, 65536):
            said[told] += part
        os.close(told)
        os.waitpid(writer, 0)
        print(said.pop(told).decode(), flush=True)
        if file:
            with closing(sqlite3.connect(file[0])) as reader:
                for check in ("integrity_check", "foreign_key_check"):
                    found = reader.execute(f"PRAGMA {check}").fetchall()
                    assert found in ([("ok",)], []), found
"""
"""Forks writers, so many at once, and kills each in a write, or between two; prints what they confirmed, and checks a file after each kill."""


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
    with open_store():
        pass
    require_confirmed(store_file)


def require_confirmed(file: Path | None, *, at_once: int = 1) -> None:
    """Kill 200 writers of the store; of what they confirmed all is there as a whole.

    Args:
        file: Of SQLite; None: the store is another.
        at_once: How many write at a time. A server has its own processes, each of which takes long to begin.
    """
    kills = PROCESSES_KILLED
    with started(KILLS, kills, at_once, *([] if file is None else [file])) as process:
        confirmed = process.communicate(timeout=1800)[0].split()
    assert process.returncode == 0
    assert len(confirmed) >= kills
    with open_store(create=False) as store:
        kept = store.runs()
        assert set(confirmed) <= {run.row.id for run in kept}
        assert len(kept) <= len(confirmed) + kills  # one that was being written may be there as a whole
        for run in kept:
            assert (store.record(run.number).id, run.tags, run.row.loras) == (run.row.id, ("told",), ("x",))
