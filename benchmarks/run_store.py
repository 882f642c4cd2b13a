"""How long the store of runs takes: to hand a run over in the host, to write one, to list and to filter many.

The host hands a run over on its own thread, which may take 5 ms of it; all else happens on another. Lists and filters of
100,000 runs may take 100 ms. MLflow's file store is beside it where MLflow is installed.

python benchmarks/run_store.py [--runs 100000]
"""

import argparse
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.history.kept_runs import kept_run

from sigmascope.history.keeper import finish, keep
from sigmascope.history.store import Filters, Store, open_store
from sigmascope.records.run import Run

MOST_HOST_SECONDS, MOST_LIST_SECONDS = 0.005, 0.1
REPEATS = 5
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
            if row[1] not in ("number", "id", "started_at")
        ]
        names = ", ".join(columns)
        first = writer.execute("SELECT max(number) FROM runs").fetchone()[0]
        for copy in range(1, copies):
            year, month = 2025 - copy // 12, 1 + copy % 12
            writer.execute(
                f"INSERT INTO runs (number, id, started_at, {names}) SELECT number + {copy * first}, id || '-{copy}', "
                f"'{year}-{month:02}' || substr(started_at, 8), {names} FROM runs WHERE number <= {first}"
            )
            for table, column in (("loras", "lora"), ("records", "content")):
                writer.execute(
                    f"INSERT INTO {table} SELECT run + {copy * first}, {column} FROM {table} WHERE run <= {first}"
                )
            writer.execute(
                f"INSERT INTO tags SELECT number, 'rare' FROM runs WHERE number = {copy * first + 1}"
            )
        writer.commit()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """The medians of a few times: by the clock, and of the processor, which other programs change less; in seconds."""
    took = []
    for _ in range(REPEATS):
        started, worked = time.perf_counter(), time.thread_time()
        work()
        took.append((time.perf_counter() - started, time.thread_time() - worked))
    return median(wall for wall, _ in took), median(own for _, own in took)


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


def mlflow_times(folder: Path, some: list[Run]) -> tuple[float, float, float] | None:
    """Seconds to write one run, to list 20 and to filter, in MLflow's file store; None: it is not installed."""
    try:
        from mlflow.tracking import MlflowClient
    except ImportError:
        return None
    client = MlflowClient(folder.as_uri())
    experiment = client.create_experiment("runs")
    started = time.perf_counter()
    for run in some:
        made = client.create_run(experiment, tags={"pipeline": run.stages[0].facts["pipeline"]["class_name"]})
        client.log_metric(made.info.run_id, "seconds", run.seconds)
        client.set_terminated(made.info.run_id)
    written = (time.perf_counter() - started) / len(some)
    listed, _ = timed(lambda: client.search_runs([experiment], max_results=20))
    filtered = timed(
        lambda: client.search_runs([experiment], "tags.pipeline = 'WanPipeline'", max_results=20)
    )
    return written, listed, filtered


def main() -> None:
    """Print what each takes, against its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "runs.db")
        os.environ["SIGMASCOPE_STORE"] = str(file)
        os.environ.pop("SIGMASCOPE_KEEP", None)
        handed = cpu_of_handing_over([replace(run, id=f"host-{run.id}") for run in runs(WRITTEN)])
        print(f"{'on the host, a run':24} {1e3 * handed:9.2f} ms, of {1e3 * MOST_HOST_SECONDS:.0f} ms")
        some = runs(1000)
        with open_store() as store:
            started = time.perf_counter()
            for run in some[:WRITTEN]:
                store.add(run, "bench", prune=True)
            print(f"{'write, a run':24} {1e3 * (time.perf_counter() - started) / WRITTEN:9.2f} ms")
            for run in some[WRITTEN:]:
                store.add(run, "bench")
            store.remove([run.number for run in store.runs() if run.row.id.startswith("host-")])
        known = mlflow_times(Path(folder, "mlflow"), some)
        multiplied(file, max(1, count // len(some)))
        with open_store() as store:
            print(f"{store.count():,} runs, {file.stat().st_size / 1e6:.0f} MB")
            for name, read in reads(store).items():
                took, worked = timed(read)
                late = " TOO LONG" if took > MOST_LIST_SECONDS else ""
                print(
                    f"{name:24} {1e3 * took:9.2f} ms, of {1e3 * MOST_LIST_SECONDS:.0f} ms; processor {1e3 * worked:.1f} ms{late}"
                )
    if known is not None:
        print(
            "MLflow's file store, 1,000 runs: write {:.1f} ms, list {:.1f} ms, filter {:.1f} ms".format(
                *(1e3 * value for value in known)
            )
        )


if __name__ == "__main__":
    main()
