"""SIGKILL at any instant of work that leaves files behind, once or several times, and then the work once more."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.jobs import Contents, Job, check_same, check_versions, contents, contents_of, jobs, leftovers
from tests.chaos.tries import Case, Kind, kill_after
from tests.families import generate, make_pipeline

from sigmascope.integrations import autostart, process_recording
from sigmascope.integrations.watch_settings import Settings
from sigmascope.records.serialization import load_run

_MOST_KILLS = 3
_LATE = 1.05
"""The last instant to kill at, as a share of the time that the work takes when nobody disturbs it."""
_SAVES = 30
_WATCHED_CALLS = 3


@dataclass(frozen=True)
class Ready:
    """A job, and what is known of it when nothing goes wrong.

    Attributes:
        seconds: How long it takes in a forked child.
        after: What its files hold.
        before: What they hold where something was there before; empty where nothing can be.
        on_the_way: What files hold that are there only meanwhile.
    """

    job: Job
    seconds: float
    after: Contents
    before: Contents
    on_the_way: Contents


def prepare(folder: Path) -> list[Ready]:
    pipeline = make_pipeline("sd15")
    generate(pipeline, "sd15")
    found = [_many_times(job) if job.name == "save" else job for job in jobs(folder)]
    return [_ready(job, folder / job.name) for job in [*found, Job("watch", partial(_watch, pipeline))]]


def _many_times(job: Job) -> Job:
    """One of two files in turn, over and over: to write one once is over too soon to be killed."""
    assert job.before is not None

    def run(first: Callable[[], object], second: Callable[[], object]) -> None:
        for _ in range(_SAVES):
            first()
            second()

    return Job(job.name, partial(run, job.before, job.run), job.before)


def _watch(pipeline: Any) -> None:
    """What `SIGMASCOPE=1` does to a program that calls a pipeline; its keeper is in a hurry."""
    process_recording.PeriodicSaver.__init__.__defaults__ = (0.005,)
    process_recording._LEAST_PERIODS_OF_A_WRITE = 1  # type: ignore[misc]
    process = autostart.WatchedProcess(Settings(output="run.json", quiet="1"))
    process.start()
    for _ in range(_WATCHED_CALLS):
        generate(pipeline, "sd15")
    process._end()


def _ready(job: Job, folder: Path) -> Ready:
    def done(work: Callable[[], object] | None, name: str) -> Contents:
        if work is None:
            return {}
        assert not kill_after(60, partial(contents_of, work, folder / name))
        return contents(folder / name)

    after, before, on_the_way = (
        done(work, name)
        for work, name in ((job.run, "after"), (job.before, "before"), (job.passes, "passes"))
    )
    started = time.perf_counter()
    done(job.run, "timed")
    return Ready(job, time.perf_counter() - started, after, before, on_the_way)


def attempt(case: Case) -> str:
    ready: Ready = case.prepared[case.number % len(case.prepared)]
    job, was = ready.job, Path.cwd()
    if job.before is not None and case.random.random() < 0.5:
        job.before()
    kills, there = 0, contents(was)
    for _ in range(case.random.randint(1, _MOST_KILLS)):
        if not kill_after(case.random.uniform(0, _LATE * ready.seconds), job.run):
            break
        kills += 1
        there = _check(contents(was), there, ready)
    job.run()
    check_same(contents(was), ready.after)
    assert leftovers(was) == []
    if job.name == "watch":
        _check_record(Path("run.json"))
    return f"{job.name}: " + ("ended before" if not kills else "killed")


def _check(now: Contents, earlier: Contents, ready: Ready) -> Contents:
    """What is there is whole, and nothing that was there is lost, but for what the work removes itself."""
    check_versions(now, ready.before, ready.after, ready.on_the_way)
    removed_by_it = {"out/run.json", *ready.on_the_way.keys()} - (ready.after.keys() - {"out/run.json"})
    lost = earlier.keys() - now.keys() - removed_by_it
    assert not lost, f"lost: {sorted(lost)}"
    steps = [
        max(name for name in ("", *files) if "checkpoint-" in name or not name) for files in (earlier, now)
    ]
    assert steps == sorted(steps), "the newest checkpoint is lost"
    sidecar, lora = "lora_config.yaml", "lora.safetensors"
    if sidecar in now and now[sidecar] == ready.after[sidecar]:
        assert now[lora] == ready.after[lora], "the description is there before its LoRA"
    return now


def _check_record(path: Path) -> None:
    run = load_run(path)
    assert run.complete
    assert sum(stage.name == "generation" for stage in run.walk()) == _WATCHED_CALLS
    json.loads(path.read_text())


KIND = Kind(
    name="kills",
    promise="every file is whole, and work done again gives what undisturbed work gives, to the bit",
    tries=200,
    attempt=attempt,
    prepare=prepare,
    seconds=60.0,
)
