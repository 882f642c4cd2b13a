"""A long life: after 20,000 calls a watch holds, costs and keeps open what it did after 2,000."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import diffusers
import psutil
import torch
from tests.chaos.tries import MB, Case, Kind
from tests.families import generate, make_pipeline
from torch import Tensor, nn

import sigmascope
from sigmascope.integrations import process_recording
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.integrations.autostart import WatchedProcess
from sigmascope.integrations.process_recording import MOST_PARTS, PeriodicSaver
from sigmascope.integrations.watch_settings import Settings
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.workflow import WorkflowMonitor
from sigmascope.records.run import KEEP_GENERATIONS, Run

_RSS_BYTES = 5 * MB
_SLOWER = 1.5  # times what a call took in the first tenth that counts; what grows by the call grows tenfold
_MORE_LINES = 1.1  # the same in lines of Python, which a busy machine does not change
_TIMED = 10_000  # calls that make a time tell of us: of fewer, it tells of who else uses the machine
_TRACED = 5  # calls at the end of a twentieth, whose lines are counted where that is asked for
_CHUNKS = 20
_EARLY = _CHUNKS // 5 - 1  # the last twentieth of those for warming up
_PARTS = 3  # files of older generations, after which a process has done once all that it does for ever
_SETTLED_SECONDS = 120
_CLOSED_SECONDS = 10
_FEWEST = 200

Call = Callable[[], object]


class Halving(nn.Module):
    """A denoiser without weights worth the name."""

    def forward(self, sample: Tensor, _timestep: Tensor) -> Tensor:
        return sample / 2


class Small:
    """A pipeline of a millisecond: a denoiser, a scheduler of diffusers', two steps."""

    def __init__(self) -> None:
        self.unet = Halving()
        self.scheduler = diffusers.DDIMScheduler()
        self.components = {"unet": self.unet, "scheduler": self.scheduler}

    def __call__(self, prompt: str) -> Tensor:
        return _two_steps(self)


class SmallOfDiffusers(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """The same as a class of diffusers', which a watch of the whole process knows."""

    def __init__(self, unet: nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    def __call__(self, prompt: str) -> Tensor:
        return _two_steps(self)


def _two_steps(pipeline: Any) -> Tensor:
    sample = torch.ones(1, 4)
    pipeline.scheduler.set_timesteps(2)
    for timestep in pipeline.scheduler.timesteps:
        sample = pipeline.scheduler.step(pipeline.unet(sample, timestep), timestep, sample).prev_sample
    return sample


@dataclass(frozen=True)
class Level:
    """What a process holds and what a call costs, after some calls.

    Attributes:
        lines: Of Python that a call runs in its own thread.
        yardstick_seconds: What work that nothing watches took beside the calls: the machine's speed at that time.
    """

    calls: int
    rss_bytes: int
    files: int
    threads: int
    lines: int
    call_seconds: float
    yardstick_seconds: float


def attempt(case: Case) -> str:
    life, calls = _LIVES[case.number]
    calls = max(_FEWEST, round(calls * case.scale))
    # Else a record that a busy machine is slow to write waits for minutes.
    with patch.object(process_recording, "_LEAST_PERIODS_OF_A_WRITE", 5):
        return life(case, calls)


def _watched(case: Case, calls: int) -> str:
    """One watch around every call, as a server's process has, whose record a keeper writes."""
    pipeline = Small()
    written = 0

    def record() -> Run:
        nonlocal written
        written += 1
        return run.record()

    with sigmascope.watch(pipeline) as run:
        keeper = PeriodicSaver(record, case.folder / "run.json", seconds=0.5)
        keeper.start()
        answer = _level(calls, lambda: pipeline("a fox"), settled=lambda: written > _PARTS)
        keeper.stop()
    _whole_records(case.folder)
    return f"one watch, {answer}"


def _recorded(case: Case, calls: int) -> str:
    """A process that `SIGMASCOPE=1` records, with the parts that its record is divided into."""
    sooner = partial(PeriodicSaver, seconds=0.5)  # than every ten seconds
    process = WatchedProcess(Settings(output="run.json", quiet="1"))
    with patch.object(process_recording, "PeriodicSaver", sooner):
        process.start()
    pipeline = SmallOfDiffusers(Halving(), diffusers.DDIMScheduler())
    folder = case.folder / "run.parts"
    made = 0

    def call() -> None:
        nonlocal made
        made += 1
        pipeline("a fox")

    answer = _level(calls, call, settled=(folder / f"{_PARTS:04}.json").exists)
    process._end()
    parts = sorted(folder.iterdir())
    _whole_records(case.folder, folder)
    run = sigmascope.load_run("run.json")
    assert run.folded is not None
    counted = run.folded.generations + sum(stage.name == "generation" for stage in run.stages)
    assert counted == made, f"{counted:,} of {made:,} generations are in the record"
    assert 0 < len(parts) <= MOST_PARTS, f"{len(parts)} parts"
    return f"a recorded process, {answer}"


def _watched_each(_case: Case, calls: int) -> str:
    """A watch for each call."""
    pipeline = Small()

    def call() -> None:
        with sigmascope.watch(pipeline, sample_hz=None):
            pipeline("a fox")

    return f"a watch a call, {_level(calls, call)}"


def _diffusers(_case: Case, calls: int) -> str:
    """A pipeline of diffusers, whose prompts all differ."""
    pipeline = make_pipeline("sd15")
    numbers = iter(range(10**9))
    # A record is full by the fifth of the calls that is for warming up, however few they are.
    with sigmascope.watch(pipeline, keep_generations=min(KEEP_GENERATIONS, calls // 5)):
        answer = _level(
            calls, lambda: generate(pipeline, "sd15", num_inference_steps=1, prompt=f"fox {next(numbers)}")
        )
    return f"diffusers, {answer}"


def _monitored(_case: Case, calls: int) -> str:
    """A `PerformanceMonitor` and a `WorkflowMonitor` that are never made anew."""
    monitor = PerformanceMonitor(history=50, step_history=50, sample_hz=None)  # a summary reads all of it
    workflow = WorkflowMonitor(verbose=False)
    numbers = iter(range(10**9))

    def call() -> None:
        with monitor.monitor_generation(f"model {next(numbers)}", num_steps=1):
            monitor.start_step_timing()
            monitor.end_step_timing()
        monitor.get_performance_summary()
        workflow.start_monitoring("encoding")
        workflow.end_monitoring("encoding")

    return f"two monitors, {_level(calls, call)}"


def _served(_case: Case, calls: int) -> str:
    """The ASGI middleware, each request with an id and a path of its own, a tenth of them failing."""
    pipeline = Small()
    numbers = iter(range(10**9))

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        pipeline("a fox")
        number = next(numbers)
        if number % 10 == 9:
            raise ValueError(f"request {number}")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"image"})

    served = PerformanceMonitoringMiddleware(application)
    loop = asyncio.new_event_loop()

    async def request(number: int) -> None:
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": f"/generate/{number}",
            "query_string": b"",
            "headers": [(b"x-request-id", b"%d" % number)],
        }

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(_message: MutableMapping[str, Any]) -> None:
            pass

        with contextlib.suppress(ValueError):
            await served(scope, receive, send)

    with sigmascope.watch(pipeline):
        answer = _level(calls, lambda: loop.run_until_complete(request(next(numbers))))
    loop.close()
    return f"ASGI, {answer}"


def _level(calls: int, call: Call, settled: Callable[[], bool] = lambda: True) -> str:
    """Make the calls and look at the process after each twentieth; the first fifth is for warming up.

    Calls before `settled` come on top: what a thread writes now and then is not written by the number of calls.

    Raises:
        AssertionError: Memory, open files, threads or the time of a call have grown.
    """
    chunk = calls // _CHUNKS
    deadline = time.monotonic() + _SETTLED_SECONDS
    while not settled():
        assert time.monotonic() < deadline, f"the record was not kept in {_SETTLED_SECONDS} s"
        call()
    levels: list[Level] = []
    for number in range(_CHUNKS):
        costs, marks = [], []
        for _ in range(chunk):
            marks.append(_cost(_yardstick))
            costs.append(_cost(call))
        # A trace makes a call many times as long: lines are counted where they are compared.
        counts = _lines if number in (_EARLY, _CHUNKS - 1) else _not_counted
        lines = min(counts(call) for _ in range(_TRACED))
        levels.append(_now((number + 1) * chunk, lines, min(costs), min(marks)))
    early, late = levels[_EARLY], levels[-1]
    first = _middle(levels[_EARLY : _EARLY + 3])
    last = _middle(levels[-3:])
    slower = last.call_seconds / first.call_seconds * first.yardstick_seconds / last.yardstick_seconds
    grown = late.rss_bytes - early.rss_bytes
    files = _files_in_the_end(early.files)
    said = (
        f"{early.calls:,} to {late.calls:,} calls: {early.rss_bytes / MB:.0f} to {late.rss_bytes / MB:.0f} MB, "
        f"{first.call_seconds * 1e3:.2f} to {last.call_seconds * 1e3:.2f} ms a call "
        f"(× {slower:.2f} by the machine's own speed), {early.lines:,} to {late.lines:,} lines, "
        f"{files} files, {late.threads} threads"
    )
    assert grown <= _RSS_BYTES, f"memory grows: {said}"
    assert files <= early.files, f"files stay open: {said}"
    assert late.threads <= early.threads, f"threads stay: {said}"
    assert late.lines <= early.lines * _MORE_LINES, f"calls run more of Python: {said}"
    assert slower <= _SLOWER or calls < _TIMED, f"calls become slower: {said}"
    return said


def _cost(work: Call) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def _lines(work: Call) -> int:
    count = 0

    def line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    was = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(was)
    return count


def _not_counted(work: Call) -> int:
    work()
    return 0


def _yardstick() -> Tensor:
    """A third of a millisecond of what a call does too: small tensors and plain Python."""
    sample = torch.ones(1, 4)
    for number in range(100):
        sample = sample / 2 + float(f"{number}.5")
    return sample


def _middle(levels: list[Level]) -> Level:
    """The twentieth in the middle by its cost beside the yardstick: a machine that others use disturbs one or two."""
    ordered = sorted(levels, key=lambda level: level.call_seconds / level.yardstick_seconds)
    return ordered[len(levels) // 2]


def _files_in_the_end(most: int) -> int:
    """How many files stay open: one that a thread is just writing is closed soon."""
    deadline = time.monotonic() + _CLOSED_SECONDS
    while (files := _open_files()) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return files


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _now(calls: int, lines: int, seconds: float, yardstick: float) -> Level:
    gc.collect()
    process = psutil.Process()
    return Level(
        calls,
        process.memory_info().rss,
        _open_files(),
        threading.active_count(),
        lines,
        seconds,
        yardstick,
    )


def _whole_records(*folders: Path) -> None:
    """Every file of the record can be read, and none is much larger than the generations that it keeps."""
    for path in (path for folder in folders for path in folder.glob("*.json")):
        sigmascope.load_run(path)
        assert path.stat().st_size < 20 * MB, f"{path.name} has {path.stat().st_size:,} bytes"


_LIVES: tuple[tuple[Callable[[Case, int], str], int], ...] = (
    (_watched, 20_000),
    (_recorded, 20_000),
    (_watched_each, 20_000),
    (_diffusers, 500),
    (_monitored, 20_000),
    (_served, 20_000),
)

KIND = Kind(
    "uptime",
    "20,000 calls end at the memory, open files, threads and time a call of the first 4,000",
    tries=len(_LIVES),
    attempt=attempt,
    seconds=1800,
    scales=False,
)
