"""What other stores of runs take to write a run, to list 20 and to filter: for `run_store.py`, in a Python that has them.

It imports nothing of Sigmascope, so it may run in an environment of its own:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install mlflow-skinny sqlalchemy alembic trackio
    python benchmarks/run_store.py --peers /tmp/peers/bin/python

Each run is written as the library's guide does it: with its facts as tags or configuration, two numbers as metrics, and its
end. What is listed are the newest 20 with their facts, and what is filtered are 20 of one pipeline.

    python benchmarks/store_bench/peers.py PEER FOLDER COUNT... < facts.json

It prints a line of JSON for each count, and one for whatever begins.
"""

import contextlib
import io
import json
import os
import shutil
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, Protocol

REPEATS: Final = 5
LONGEST_SECONDS: Final = 10.0
"""A reading that has taken so long is not repeated any more."""
LAST_WRITTEN: Final = 200
"""Writes whose median is taken."""
WANTED: Final = "WanPipeline"
"""The pipeline that is filtered by: one in five has it."""


class Took(NamedTuple):
    """Seconds: by the clock, and of the processor, in all threads of the process."""

    wall: float
    processor: float


class Peer(Protocol):
    """A store of another library."""

    def write(self, facts: dict[str, Any]) -> None:
        """Keep one run, which is over."""

    def multiply(self, copies: int) -> None:
        """Give each run that is there more copies with ids of their own: written quickly, since only reading them is timed."""

    def newest(self) -> int:
        """List 20 runs with their facts; how many came."""

    def of_pipeline(self) -> int:
        """List 20 runs of one pipeline; how many came."""


class Mlflow:
    """MLflow's own client, without a server, on its file store or on SQLite."""

    def __init__(self, uri: str, multiply: Callable[[int], None]) -> None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # it is in maintenance, and asks for this
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric, self.multiply = Metric, multiply
        self._client = MlflowClient(uri)
        self._experiment = self._client.create_experiment("runs")

    def write(self, facts: dict[str, Any]) -> None:  # noqa: D102 - as in `Peer`
        tags = {name: str(value) for name, value in facts.items() if isinstance(value, str)}
        run = self._client.create_run(self._experiment, tags=tags).info.run_id
        now = int(1000 * time.time())
        numbers = {name: value for name, value in facts.items() if not isinstance(value, str)}
        self._client.log_batch(run, [self._metric(name, value, now, 0) for name, value in numbers.items()])
        self._client.set_terminated(run)

    def newest(self) -> int:  # noqa: D102
        return len(self._client.search_runs([self._experiment], max_results=20))

    def of_pipeline(self) -> int:  # noqa: D102
        wanted = f"tags.pipeline = '{WANTED}'"
        return len(self._client.search_runs([self._experiment], wanted, max_results=20))


class Trackio:
    """trackio without its watch of the machine. It has no filter but SQL."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._trackio, self._storage, self._written = trackio, SQLiteStorage, 0
        self._file = folder / "runs.db"

    def write(self, facts: dict[str, Any]) -> None:  # noqa: D102
        numbers = {name: value for name, value in facts.items() if not isinstance(value, str)}
        self._trackio.init(
            "runs",
            name=f"run-{self._written}",
            config={name: value for name, value in facts.items() if isinstance(value, str)},
            auto_log_gpu=False,
            auto_log_cpu=False,
            embed=False,
        )
        self._trackio.log(numbers)
        self._trackio.finish()
        self._written += 1

    def multiply(self, copies: int) -> None:  # noqa: D102
        multiply_rows(self._file, ("configs", "metrics"), ("run_id", "run_name"), copies)

    def newest(self) -> int:  # noqa: D102
        runs = self._trackio.Api().runs("runs")
        return len([run.config for run in list(runs)[-20:]])

    def of_pipeline(self) -> int:  # noqa: D102
        wanted = f"json_extract(config, '$.pipeline') = '{WANTED}'"
        asked = f"SELECT run_name, config FROM configs WHERE {wanted} ORDER BY created_at DESC LIMIT 20"
        return int(self._storage.query_project("runs", asked)["row_count"])


def multiply_rows(file: Path, tables: Sequence[str], ids: Sequence[str], copies: int) -> None:
    """Copy all rows of a database, with other ids; its own numbers of rows are given anew."""
    with contextlib.closing(sqlite3.connect(file, timeout=60)) as writer:
        for table in tables:
            facts = writer.execute(f"PRAGMA table_info({table})").fetchall()
            columns = [name for _, name, *_, key in facts if name != "log_id" and not (key and name == "id")]
            rows = writer.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
            places = ", ".join("?" * len(columns))
            writer.executemany(
                f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})",
                (
                    [
                        f"{value}-{len(rows)}-{copy}" if name in ids else value
                        for name, value in zip(columns, row, strict=True)
                    ]
                    for copy in range(1, copies)
                    for row in rows
                ),
            )
        writer.commit()


def multiply_folders(folder: Path, copies: int) -> None:
    """Copy all runs of MLflow's file store, whose folders have the run's id."""
    for run in [path.parent for path in folder.glob("*/*/meta.yaml")]:
        facts = (run / "meta.yaml").read_text()
        for _ in range(1, copies):
            name = uuid.uuid4().hex
            shutil.copytree(run, run.with_name(name))
            (run.with_name(name) / "meta.yaml").write_text(facts.replace(run.name, name))


def mlflow_files(folder: Path) -> Peer:
    """MLflow's store of files."""
    return Mlflow(folder.as_uri(), lambda copies: multiply_folders(folder, copies))


def mlflow_sqlite(folder: Path) -> Peer:
    """MLflow's store on SQLite."""
    file, tables = folder / "mlflow.db", ("runs", "tags", "metrics", "latest_metrics")
    return Mlflow(f"sqlite:///{file}", lambda copies: multiply_rows(file, tables, ("run_uuid",), copies))


PEERS: Final[dict[str, Callable[[Path], Peer]]] = {
    "MLflow, files": mlflow_files,
    "MLflow, SQLite": mlflow_sqlite,
    "trackio": Trackio,
}


def timed(work: Callable[[], Any]) -> Took:
    """What one call took."""
    started, worked = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - started, time.process_time() - worked)


def repeated(work: Callable[[], Any]) -> Took:
    """The median of a few calls, of one where that takes long."""
    took = [timed(work)]
    while len(took) < REPEATS and sum(one.wall for one in took) < LONGEST_SECONDS:
        took.append(timed(work))
    return median_of(took)


def median_of(took: Sequence[Took]) -> Took:
    """Of both clocks."""
    return Took(median(one.wall for one in took), median(one.processor for one in took))


def measured(
    write: Callable[[int], Any],
    multiply: Callable[[int], None],
    reads: dict[str, Callable[[], int]],
    counts: Sequence[int],
    told: Callable[[int, dict[str, Took]], None],
    begins: Callable[[int, str], None] = lambda count, what: None,
) -> None:
    """Write as many runs as the first count says, then multiply them to each other count; write some there, and read.

    Args:
        write: Writes the run of a number.
        multiply: Makes so many of each run that is there.
        reads: By name; each gives how many runs came.
        counts: In rising order.
        told: Is given each count, and by name what a write and the reads took.
        begins: Is given how many runs there are, and what is begun.
    """
    written = held = 0
    for count in counts:
        if held:
            begins(held, "copying them")
            multiply(max(1, count // held))
            held *= max(1, count // held)
        begins(held, "write")
        new = max(count - held, LAST_WRITTEN)
        writes = []
        for number in range(written, written + new):
            writes.append(timed(lambda number=number: write(number)))
            held += 1
            if held % 100 == 0:
                begins(held, "write")
        written += new
        took = {"write": median_of(writes[-LAST_WRITTEN:])}
        for name, read in reads.items():
            begins(held, name)
            took[name] = repeated(lambda name=name, read=read: require_20(name, read()))
        told(count, took)


def require_20(name: str, found: int) -> None:
    """Refuse a reading that did not give what was asked for."""
    if found != 20:
        raise ValueError(f"{name}: {found} runs, not 20")


def main() -> None:
    """Print what one of them takes, or why it is not there."""
    name, folder, *counts = sys.argv[1:]
    facts: list[dict[str, Any]] = json.load(sys.stdin)
    out = sys.stdout

    def told(count: int, took: dict[str, Took]) -> None:
        print(json.dumps({"runs": count, **took}), file=out, flush=True)

    def begins(held: int, what: str) -> None:
        print(json.dumps({"held": held, "begins": what}), file=out, flush=True)

    with contextlib.redirect_stdout(io.StringIO()):  # trackio talks
        try:
            peer = PEERS[name](Path(folder))
        except ImportError as missing:
            print(json.dumps({"unavailable": str(missing)}), file=out)
            return
        reads = {"list": peer.newest, "filter": peer.of_pipeline}
        measured(
            lambda number: peer.write(facts[number % len(facts)]),
            peer.multiply,
            reads,
            list(map(int, counts)),
            told,
            begins,
        )


if __name__ == "__main__":
    main()
