"""How long the store of runs takes: to hand a run over in the host, to write one, to list and to filter many.

The host hands a run over on its own thread, which may take 5 ms of it; all else happens on another. Lists and filters of
100,000 runs may take 100 ms.

Beside it stand the stores of MLflow (files, and SQLite) and trackio, at 1,000 and 10,000 runs. They are given what is in
our rows; 10,000 runs are 1,000 that were multiplied, and 200 more. We write the whole record besides, and wait until it is on the disk. `store_bench/peers.py` says how to install them, in an
environment of their own; one that is missing has a row with the reason. One that takes longer than `--peer_minutes` is stopped, and its row says
what it had begun and for how long: a lower bound.

    python benchmarks/run_store.py [--runs 100000] [--beside 1000 10000] [--peers PYTHON] [--only "MLflow, files"] [--peer_minutes 20]
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.store_bench import peers
from benchmarks.store_bench.peers import PEERS, WANTED, Took, measured, repeated
from tests.history.kept_runs import kept_run

from sigmascope.history.keeper import finish, keep
from sigmascope.history.row import row_of
from sigmascope.history.store import Filters, Store, open_store
from sigmascope.records.run import Run

MOST_HOST_SECONDS, MOST_LIST_SECONDS = 0.005, 0.1
WRITTEN = 200
PIPELINES = (
    "FluxPipeline",
    "StableDiffusionXLPipeline",
    "WanPipeline",
    "QwenImagePipeline",
    "ZImagePipeline",
)


def runs(count: int) -> list[Run]:
    """Runs of five pipelines in three sizes, a tenth of them failed, a third with a LoRA, a minute apart."""
    made = []
    for number in range(count):
        loras = {"transformer.style": {"file": f"style-{number % 7}.safetensors"}} if number % 3 == 0 else {}
        run = kept_run(
            started_at=f"2026-01-{1 + number // 1440 % 28:02}T{number // 60 % 24:02}:{number % 60:02}:00+00:00",
            pipeline=PIPELINES[number % 5],
            source=f"models/{number % 11}",
            size=((512, 512), (768, 768), (1024, 1024))[number % 3],
            loras=loras,
            error="ValueError: NaN" if number % 10 == 0 else None,
        )
        made.append(run)
    return made


def cpu_of_handing_over(some: list[Run]) -> float:
    """The largest processor time of the host's thread for one run, from the first on."""
    took = []
    for run in some:
        started = time.thread_time()
        keep(run, "bench", lambda line: None)
        took.append(time.thread_time() - started)
    finish()
    return max(took)


def multiplied(file: Path, copies: int) -> None:
    """Each run so many times, with ids and months of their own: written by SQL, since only reading is timed."""
    with closing(sqlite3.connect(file)) as writer:
        columns = [
            row[1]
            for row in writer.execute("PRAGMA table_info(runs)")
            if row[1] not in ("number", "id", "started_at", "placed_at")
        ]
        names = ", ".join(columns)
        first = writer.execute("SELECT max(number) FROM runs").fetchone()[0]
        for copy in range(1, copies):
            year, month = 2025 - copy // 12, 1 + copy % 12
            moment = f"'{year}-{month:02}' || substr(started_at, 8)"
            writer.execute(
                f"INSERT INTO runs (number, id, started_at, placed_at, {names}) SELECT number + {copy * first}, "
                f"id || '-{first}-{copy}', {moment}, {moment}, {names} FROM runs WHERE number <= {first}"
            )
            for table, column in (("loras", "lora"), ("records", "content")):
                writer.execute(
                    f"INSERT INTO {table} SELECT run + {copy * first}, {column} FROM {table} WHERE run <= {first}"
                )
            writer.execute(
                f"INSERT INTO tags SELECT number, 'rare' FROM runs WHERE number = {copy * first + 1}"
            )
        writer.commit()


def reads(store: Store) -> dict[str, Callable[[], Any]]:
    """What is asked of a store, by name."""
    newest = store.runs(limit=1)[0]
    asked = {
        "list 20": Filters(),
        "pipeline": Filters(pipeline="wan"),
        "model": Filters(model="models/7"),
        "LoRA": Filters(lora="style-3"),
        "outcome": Filters(outcome="failed"),
        "tag": Filters(tag="rare"),
        "a week": Filters(since="2026-01-01", until="2026-01-08"),
        "three at once": Filters(pipeline="flux", lora="style-6", outcome="ok"),
        "nothing matches": Filters(pipeline="none", lora="none"),
    }
    return {
        name: lambda filters=filters: store.runs(filters, limit=20) for name, filters in asked.items()
    } | {
        "count of a filter": lambda: store.count(Filters(pipeline="wan", outcome="ok")),
        "an id's beginning": lambda: store.runs_of_id(newest.row.id[:30], limit=6),
        "latest~1000": lambda: store.runs(limit=1, offset=1000),
        "comparable before": lambda: store.comparable_before(newest, limit=30),
    }


def beside_peers(
    store: Store, python: str, some: list[Run], counts: list[int], names: list[str], most_seconds: float
) -> None:
    """Print what this store and each of the others take, how many times as long as ours that is, and the same of the processor."""
    ours: dict[int, dict[str, Took]] = {}
    print(f"{'':16} {'runs':>6}  {'write':>30}  {'list 20':>30}  {'filter':>30}")

    def told(count: int, took: dict[str, Took]) -> None:
        ours[count] = took
        print(row("Sigmascope", count, took, took), flush=True)

    def write(number: int) -> None:
        run = some[number % len(some)]
        store.add(replace(run, id=f"{run.id}-{number}"), "bench", prune=True)

    file = store.file
    assert file is not None
    measured(
        write,
        lambda copies: multiplied(file, copies),
        {
            "list": lambda: len(store.runs(limit=20)),
            "filter": lambda: len(store.runs(Filters(pipeline=WANTED), limit=20)),
        },
        counts,
        told,
    )
    columns = [row_of(run).columns() for run in some]
    known = json.dumps([{name: value for name, value in one.items() if value is not None} for one in columns])
    for name in names:
        for count, took in times_of_peer(python, name, known, counts, most_seconds):
            print(row(name, count, took, ours[count]), flush=True)


def times_of_peer(
    python: str, name: str, known: str, counts: list[int], most_seconds: float
) -> Iterator[tuple[int, dict[str, Took]]]:
    """At each count what it takes, as it becomes known; says why where it is not there, fails or is stopped."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        command = [python, peers.__file__, name, folder, *map(str, counts)]
        started = began = time.monotonic()
        held, doing, is_late = 0, "starting", threading.Event()
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as peer:
            assert peer.stdin is not None
            assert peer.stdout is not None

            def stop() -> None:
                is_late.set()
                peer.kill()

            limit = threading.Timer(most_seconds, stop)
            limit.start()
            peer.stdin.write(known)
            peer.stdin.close()
            for line in peer.stdout:
                told = json.loads(line)
                if "unavailable" in told:
                    print(f"{name:16} not measured: {told['unavailable']}")
                elif "begins" in told:
                    held, began = told["held"], began if told["begins"] == doing else time.monotonic()
                    doing = told["begins"]
                else:
                    yield told.pop("runs"), {what: Took(*seconds) for what, seconds in told.items()}
            limit.cancel()
        if is_late.is_set():
            now = time.monotonic()
            print(
                f"{name:16} stopped after {now - started:.0f} s at {held:,} runs: {doing} took more than {now - began:.0f} s"
            )
        elif peer.returncode != 0:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["it gave no reason"]
            print(f"{name:16} failed: {last[0]}")


def row(name: str, count: int, took: dict[str, Took], ours: dict[str, Took]) -> str:
    """By the clock in ms and as a ratio to ours, and the same of the processor."""
    cells = [
        f"{1e3 * one.wall:8.1f} ms {one.wall / our.wall:5.1f} × ({one.processor / our.processor:5.1f} ×)"
        for one, our in ((took[what], ours[what]) for what in ours)
    ]
    return f"{name:16} {count:6,}  " + "  ".join(cells)


def main() -> None:
    """Print what each takes, against its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100_000, help="of ours alone, about (default 100000)")
    parser.add_argument(
        "--beside",
        type=int,
        nargs="*",
        default=[1000, 10_000],
        help="of each store, the first 100 at least (default 1000 10000)",
    )
    parser.add_argument(
        "--peers", default=sys.executable, metavar="PYTHON", help="that has MLflow and trackio (default this)"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(PEERS),
        default=list(PEERS),
        help="these of the others (default all)",
    )
    parser.add_argument(
        "--peer_minutes", type=float, default=20, help="after which one of them is stopped (default 20)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "runs.db")
        os.environ["SIGMASCOPE_STORE"] = str(file)
        os.environ.pop("SIGMASCOPE_KEEP", None)
        handed = cpu_of_handing_over([replace(run, id=f"host-{run.id}") for run in runs(WRITTEN)])
        print(f"{'on the host, a run':24} {1e3 * handed:9.2f} ms, of {1e3 * MOST_HOST_SECONDS:.0f} ms")
        some = runs(1000)
        with open_store() as store:
            store.remove([run.number for run in store.runs()])
            counts = sorted(options.beside) or [len(some)]
            beside_peers(store, options.peers, some, counts, options.only, 60 * options.peer_minutes)
            copies = max(1, options.runs // store.count())
        multiplied(file, copies)
        with open_store() as store:
            print(f"{store.count():,} runs, {file.stat().st_size / 1e6:.0f} MB")
            for name, read in reads(store).items():
                took = repeated(read)
                late = " TOO LONG" if took.wall > MOST_LIST_SECONDS else ""
                print(
                    f"{name:24} {1e3 * took.wall:9.2f} ms, of {1e3 * MOST_LIST_SECONDS:.0f} ms; "
                    f"processor {1e3 * took.processor:.1f} ms{late}"
                )


if __name__ == "__main__":
    main()
