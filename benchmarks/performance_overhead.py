"""What watching a generation against its target costs: a step, a generation, a request.

    python benchmarks/performance_overhead.py [--steps 2000] [--repeats 31] [--requests 300]

First table: a step of `PerformanceMonitor` (start_step_timing, end_step_timing) beside a bare recorder's step, an
OpenTelemetry span and `record_function`. Every way runs once a repeat, in turn, so that all see the same machine; the
table gives medians over the repeats. CPU time of the thread stays meaningful on a busy machine, wall time does not; of
short repeats (`--steps 200`) the least wall time is that of a quiet moment.
Second: entering and leaving `monitor_generation`. Third: a request through `PerformanceMonitoringMiddleware`, beside
the same application bare, called as a server calls it and without a network in between.
"""

import argparse
import asyncio
import gc
import io
import os
import statistics
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.profiler import record_function

from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.monitor.live_line import LiveLine, StepProgress
from sigmascope.monitor.performance import PerformanceMonitor
from step_overhead import Way, opentelemetry, recorded

GOAL_US = 5.0
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class MonitoredStep:
    """A step by the names of the seeds, as a context so that all ways have the same loop around them."""

    def __init__(self, monitor: PerformanceMonitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        self._monitor.start_step_timing()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monitor.end_step_timing()


def monitored(name: str, **options: Any) -> Way:
    """Steps of a monitor with a target that it meets, a generation a repeat."""
    monitor = PerformanceMonitor(1e9, **({"sample_hz": None} | options))
    step = MonitoredStep(monitor)
    return Way(name, lambda: step, lambda: monitor.monitor_generation(num_steps=1_000_000))


def nothing(progress: StepProgress) -> None:
    """Listen and do nothing."""


def step_ways() -> list[Way]:
    """Return all, ours first."""
    return [
        monitored("PerformanceMonitor: a step"),
        monitored("… with the 10 Hz sampler", sample_hz=10.0),
        monitored("… with the live line", live=LiveLine(io.StringIO())),
        monitored("… with a listener (on_step)", on_step=nothing),
        recorded("bare recorder: a step", None, reuse=True),
        opentelemetry("OpenTelemetry SDK span, no exporter", None),
        Way("torch.profiler.record_function, no profiler", lambda: record_function("step")),
        Way("empty loop", None),
    ]


def generation_ways() -> list[Way]:
    """Return generations without steps. Most of it is reading the machine's memory, twice."""

    def watched(**options: Any) -> Callable[[], AbstractContextManager[object]]:
        monitor = PerformanceMonitor(1e9, **options)
        return lambda: monitor.monitor_generation("model")

    return [
        Way("a generation, no sampler", watched(sample_hz=None)),
        Way("a generation, with the 10 Hz sampler", watched()),
    ]


async def bare_app(scope: Message, receive: Receive, send: Send) -> None:
    """Answer with a small body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"image"})


class RequestWay:
    """One application, and the microseconds that its requests took."""

    def __init__(self, name: str, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.name = name
        self.app = app
        self.wall_us: list[float] = []
        self.cpu_us: list[float] = []

    def measure(self, requests: int) -> None:
        """Serve that many, one after the other."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        asyncio.run(self._serve(requests))
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        self.wall_us.append(wall / requests / 1e3)
        self.cpu_us.append(cpu / requests / 1e3)

    async def _serve(self, requests: int) -> None:
        for _ in range(requests):
            scope: Message = {
                "type": "http", "method": "POST", "path": "/generate", "headers": [(b"host", b"localhost")],
            }  # fmt: skip
            await self.app(scope, _receive, _send)


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _send(message: Message) -> None:
    pass


def request_ways() -> list[RequestWay]:
    """Return the watched application and the bare one."""
    return [
        RequestWay("PerformanceMonitoringMiddleware", PerformanceMonitoringMiddleware(bare_app)),
        RequestWay("the application alone", bare_app),
    ]


def run(ways: list[Any], size: int, repeats: int) -> None:
    """Measure all in turn, after a warm-up. The collector of garbage waits between the repeats."""
    for way in ways:
        way.measure(size)
        way.wall_us.clear()
        way.cpu_us.clear()
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        for way in ways:
            way.measure(size)
        gc.enable()


def table(title: str, ways: list[Any], against: int | None = None) -> str:
    """Return medians as text; with `against`, each CPU time as a multiple of that way's."""
    heading = f"\n{title:46}{'wall µs':>10}{'least':>8}{'CPU µs':>10}"
    lines = [heading if against is None else f"{heading}{'x ' + ways[against].name:>26}"]
    for way in ways:
        wall, cpu = statistics.median(way.wall_us), statistics.median(way.cpu_us)
        line = f"{way.name:46}{wall:10.2f}{min(way.wall_us):8.2f}{cpu:10.2f}"
        if against is not None:
            line += f"{cpu / statistics.median(ways[against].cpu_us):26.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps a repeat")
    parser.add_argument("--requests", type=int, default=300, help="requests, and generations, a repeat")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {load:.1f}; ", end="")
    print(f"medians over {options.repeats} repeats")
    steps, generations, requests = step_ways(), generation_ways(), request_ways()
    run(steps, options.steps, options.repeats)
    print(table(f"a step ({options.steps} a repeat)", steps, against=4))
    ours = statistics.median(steps[0].cpu_us) - statistics.median(steps[-1].cpu_us)
    print(f"a monitored step costs {ours:.2f} µs of CPU time; the goal is {GOAL_US:.0f} µs")
    run(generations, options.requests // 10 or 1, options.repeats)
    print(table("a generation", generations))
    run(requests, options.requests, options.repeats)
    print(table(f"a request ({options.requests} a repeat)", requests))
    added = statistics.median(requests[0].cpu_us) - statistics.median(requests[1].cpu_us)
    print(f"the middleware adds {added:.2f} µs of CPU time to a request")


if __name__ == "__main__":
    main()
