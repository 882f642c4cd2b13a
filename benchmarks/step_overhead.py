"""What one step costs the program that is watched, beside the usual ways to time a block.

    python benchmarks/step_overhead.py [--steps 2000] [--repeats 31]

Every way runs once a repeat, in turn, so that all see the same machine; the table gives medians over the
repeats. Nothing is subtracted: the empty loop is a row of its own. Wall time is what the host loses; CPU time of the
thread is the same on an idle machine and stays meaningful on a busy one.
OpenTelemetry runs as its SDK does, once with no exporter at all and once into memory.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.profiler import record_function

from sigmascope.monitor import Recorder
from sigmascope.monitor import step as module_level_step

OURS = "sigmascope: recorder.step()"
Block = Callable[[], AbstractContextManager[object]]


class Way:
    """One way to time a block: what is entered each time, and what is open around the loop."""

    def __init__(self, name: str, block: Block | None, around: Block = nullcontext) -> None:
        self.name = name
        self.block = block
        self.around = around
        self.wall_us: list[float] = []
        self.cpu_us: list[float] = []

    def measure(self, steps: int) -> None:
        """Run the loop once and note microseconds a step."""
        with self.around():
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            if self.block is None:
                for _ in range(steps):
                    pass
            else:
                block = self.block
                for _ in range(steps):
                    with block():
                        pass
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        self.wall_us.append(wall / steps / 1e3)
        self.cpu_us.append(cpu / steps / 1e3)


def recorded(name: str, sample_hz: float | None, *, reuse: bool = False, step_memory: bool = True) -> Way:
    """Steps of a recorder, a stage a repeat."""
    recorder = Recorder(name, sample_hz=sample_hz, step_memory=step_memory)
    step = recorder.step()
    return Way(name, (lambda: step) if reuse else recorder.step, lambda: recorder.stage("denoising"))


def opentelemetry(name: str, exporter: InMemorySpanExporter | None) -> Way:
    """Spans of the SDK, all sampled."""
    provider = TracerProvider()
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("benchmark")

    def around() -> AbstractContextManager[object]:
        if exporter is not None:
            exporter.clear()
        return tracer.start_as_current_span("denoising")

    return Way(name, lambda: tracer.start_as_current_span("step"), around)


def ways() -> list[Way]:
    """Return all, ours first."""
    return [
        recorded(OURS, None),
        recorded("sigmascope: with the 10 Hz sampler", 10.0),
        recorded("sigmascope: one step object for the loop", None, reuse=True),
        recorded("sigmascope: without memory (step_memory=False)", None, step_memory=False),
        Way("sigmascope: step() where nobody records", module_level_step),
        opentelemetry("OpenTelemetry SDK span, no exporter", None),
        opentelemetry("OpenTelemetry SDK span, into memory", InMemorySpanExporter()),
        Way("torch.profiler.record_function, no profiler", lambda: record_function("step")),
        Way("contextlib.nullcontext", nullcontext),
        Way("empty loop", None),
    ]


def table(measured: list[Way]) -> str:
    """Return medians as text, with each CPU time as a multiple of ours."""
    ours = statistics.median(measured[0].cpu_us)
    lines = [f"{'':46}{'wall µs':>9}{'CPU µs':>9}{'x ours':>8}"]
    for way in measured:
        wall, cpu = statistics.median(way.wall_us), statistics.median(way.cpu_us)
        lines.append(f"{way.name:46}{wall:9.2f}{cpu:9.2f}{cpu / ours:8.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps a repeat")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    measured = ways()
    for way in measured:
        way.measure(options.steps)  # warm up
        way.wall_us.clear()
        way.cpu_us.clear()
    for _ in range(options.repeats):
        for way in measured:
            way.measure(options.steps)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {load:.1f}; ", end="")
    print(f"medians over {options.repeats} repeats of {options.steps} steps")
    print(table(measured))


if __name__ == "__main__":
    main()
