"""32 threads and asyncio tasks generate in one process, which forks in the middle: every record has its own steps."""

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.chaos.tries import Case, Kind
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind
from torch import Tensor

import sigmascope
from sigmascope.monitor.performance import PerformanceMonitor

WORKERS = 32
_MOST_STEPS = 4
_CHILD_SECONDS = 30


class Prepared:
    """A pipeline for each worker, and the image that it makes without a watch, by its number of steps."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # their pool's threads would be missing in each child
        self.pipelines = [make_pipeline("sd15") for _ in range(WORKERS)]
        self.spare = make_pipeline("sd15")
        self.images = {
            steps: generate(self.spare, "sd15", num_inference_steps=steps)
            for steps in range(1, _MOST_STEPS + 1)
        }
        # Everything is imported before the threads begin: a child of a process that is importing waits for ever.
        with PerformanceMonitor(sample_hz=None).monitor_generation("first"), sigmascope.watch(self.spare):
            generate(self.spare, "sd15")


class Counts:
    """What all workers of a try have found."""

    def __init__(self) -> None:
        self.steps = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def add(self, worker: int, expected: int, seen: list[int], *, image: bool = True) -> None:
        with self._lock:
            self.steps += expected
            if seen != [expected]:
                self.wrong.append(f"worker {worker} made {expected} steps, and its record has {seen}")
            if not image:
                self.wrong.append(f"worker {worker} got another image than without a watch")


def attempt(case: Case) -> str:
    prepared: Prepared = case.prepared
    counts = Counts()
    shared = PerformanceMonitor(sample_hz=None)
    plans = [_plan(case, worker) for worker in range(WORKERS)]
    ways = [case.random.choice((_watched, _monitored, _sharing, _in_a_task)) for _ in range(WORKERS)]
    pauses = [case.random.uniform(0.0, 0.3) for _ in range(3)]
    before = set(threading.enumerate())
    with ThreadPoolExecutor(WORKERS) as pool:
        working = [
            pool.submit(way, worker, plan, prepared, counts, shared)
            for worker, (way, plan) in enumerate(zip(ways, plans, strict=True))
        ]
        forks = [_forked(prepared, pause) for pause in pauses]
        for work in working:
            work.result()
    counts.wrong += [wrong for wrong in forks if wrong is not None]
    expected = sum(sum(plan) for way, plan in zip(ways, plans, strict=True) if way is _sharing)
    told = shared.get_performance_summary().get("step_performance", {}).get("total_steps", 0)
    if told != expected:
        counts.wrong.append(f"the shared monitor counts {told} steps of {expected}")
    _settle(before)
    if left := left_behind():
        counts.wrong.append(f"left behind: {left}")
    if counts.wrong:
        raise AssertionError("; ".join(counts.wrong))
    return "every step in its own record, every image as without a watch"


def _plan(case: Case, _worker: int) -> list[int]:
    return [case.random.randint(1, _MOST_STEPS) for _ in range(case.random.randint(1, 3))]


def _watched(worker: int, plan: list[int], prepared: Prepared, counts: Counts, _shared: Any) -> None:
    """Each generation in a watch of its own, of the worker's pipeline."""
    pipeline = prepared.pipelines[worker]
    for steps in plan:
        with sigmascope.watch(pipeline, sample_hz=None) as run:
            image = generate(pipeline, "sd15", num_inference_steps=steps)
        counts.add(worker, steps, _steps_of(run), image=torch.equal(image, prepared.images[steps]))


def _in_a_task(worker: int, plan: list[int], prepared: Prepared, counts: Counts, _shared: Any) -> None:
    """The same in asyncio tasks that take turns, each generation in a thread that the task waits for."""
    pipeline = prepared.pipelines[worker]

    def image_of(steps: int) -> Tensor:
        return generate(pipeline, "sd15", num_inference_steps=steps)

    async def generation(steps: int, turn: asyncio.Lock) -> None:
        monitor = PerformanceMonitor(sample_hz=None)
        with monitor.monitor_generation(f"{worker}/{steps}", num_steps=steps):
            for _ in range(steps):
                monitor.start_step_timing()
                await asyncio.sleep(0)
                monitor.end_step_timing()
        (record,) = monitor.runs
        counts.add(worker, steps, [len(record.stages[0].steps)])
        async with turn:  # one pipeline makes one image at a time
            with sigmascope.watch(pipeline, sample_hz=None) as run:
                image = await asyncio.to_thread(image_of, steps)
            counts.add(worker, steps, _steps_of(run), image=torch.equal(image, prepared.images[steps]))

    async def everything() -> None:
        turn = asyncio.Lock()
        await asyncio.gather(*(generation(steps, turn) for steps in plan))

    asyncio.run(everything())


def _monitored(worker: int, plan: list[int], prepared: Prepared, counts: Counts, _shared: Any) -> None:
    """A watch inside a monitor's generation."""
    pipeline = prepared.pipelines[worker]
    monitor = PerformanceMonitor(sample_hz=None)
    for steps in plan:
        with monitor.monitor_generation(str(worker), num_steps=steps), sigmascope.watch(pipeline) as run:
            image = generate(pipeline, "sd15", num_inference_steps=steps)
        counts.add(worker, steps, _steps_of(run), image=torch.equal(image, prepared.images[steps]))


def _sharing(
    worker: int, plan: list[int], _prepared: Any, counts: Counts, shared: PerformanceMonitor
) -> None:
    """Generations of a monitor that other threads use at the same time."""
    for number, steps in enumerate(plan):
        name = f"{worker}/{number}"
        with shared.monitor_generation(name, num_steps=steps):
            for _ in range(steps):
                shared.start_step_timing()
                time.sleep(0.001)
                shared.end_step_timing()
        metrics = shared.current_metrics
        counts.add(worker, steps, [metrics.num_inference_steps if metrics.model_name == name else -1])


def _steps_of(run: Any) -> list[int]:
    return [len(stage.steps) for stage in run.walk() if stage.name == "denoising"]


def _forked(prepared: Prepared, pause: float) -> str | None:
    """Fork after a pause, and let the child generate: without a watch, and then with one.

    Returns:
        What was wrong. A child that hangs before it is watched hangs on a lock of the host's, and is tried again.
    """
    time.sleep(pause)
    for _ in range(5):
        reached, note = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(_CHILD_SECONDS)
            faulthandler.dump_traceback_later(_CHILD_SECONDS - 5, file=2)
            os.close(reached)
            try:
                _in_child(prepared, partial(os.write, note))
            finally:
                os._exit(3)
        os.close(note)
        with os.fdopen(reached, "rb") as pipe:
            words = pipe.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if words == "bare watched same " and status == 0:
            return None
        if words:
            return f"a forked child ended with {status} after: {words}"
    return "five forked children hung without a watch"


def _in_child(prepared: Prepared, note: Callable[[bytes], object]) -> None:
    generate(prepared.spare, "sd15", num_inference_steps=2)
    note(b"bare ")
    with sigmascope.watch(prepared.spare, sample_hz=None) as run:
        image = generate(prepared.spare, "sd15", num_inference_steps=2)
    if _steps_of(run) == [2]:
        note(b"watched ")
    if torch.equal(image, prepared.images[2]):
        note(b"same ")
    os._exit(0)


def _settle(before: set[threading.Thread]) -> None:
    """Wait for the threads that ended with their work; whatever stays is a failure."""
    end = time.monotonic() + 10
    while new := [thread for thread in threading.enumerate() if thread not in before]:
        if time.monotonic() > end:
            raise AssertionError(f"threads that stay: {[thread.name for thread in new]}")
        time.sleep(0.01)


def prepare(_folder: Path) -> Prepared:
    return Prepared()


KIND = Kind(
    "threads",
    "0 wrongly attributed steps among 32 threads and tasks, with forks in the middle",
    tries=40,
    attempt=attempt,
    prepare=prepare,
    seconds=240,
)
