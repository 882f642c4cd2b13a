"""What `sigmascope.watch` costs a step of a pipeline: its hook on the denoiser and its tap on the scheduler.

    python benchmarks/watch_overhead.py [--steps 2000] [--repeats 15]

A denoiser and a scheduler that do nothing are called in turn, so that the difference is the watch's own. CPU time of
the thread, the least of all repeats: the others lost time to other programs. Nothing is subtracted but the loop itself.
Beside it stands what no watch with hooks can go below: PyTorch's own time for a module with one hook that does nothing,
and the kernel's for the process's resident bytes, which are read once a step.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from torch import nn

import sigmascope
from sigmascope.monitor import Recorder
from sigmascope.probes import process_rss_bytes


class Denoiser(nn.Module):
    """Gives back what it is given."""

    def forward(self, sample: float, timestep: float) -> float:
        """The sample."""
        return sample


class Scheduler:
    """Steps to nowhere."""

    def step(self, output: float, timestep: float, sample: float) -> float:
        """The sample."""
        return sample


class Pipeline:
    """The two, and a loop."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {"unet": Denoiser(), "scheduler": Scheduler()}

    def __call__(self, steps: int, calls: int = 1) -> float:
        """CPU microseconds of a step with so many calls of the denoiser."""
        denoiser, scheduler = self.components["unet"], self.components["scheduler"]
        started = time.thread_time_ns()
        for step in range(steps):
            for _ in range(calls):
                denoiser(0.0, step)
            scheduler.step(0.0, step, 0.0)
        return (time.thread_time_ns() - started) / steps / 1e3


def recorded_steps(steps: int) -> float:
    """CPU microseconds of a step that a recorder is told of directly."""
    recorder = Recorder(sample_hz=None)
    step = recorder.step()
    with recorder.stage("denoising"):
        started = time.thread_time_ns()
        for _ in range(steps):
            with step:
                pass
        return (time.thread_time_ns() - started) / steps / 1e3


def hooked(pipeline: Pipeline, steps: int, calls: int) -> float:
    """CPU microseconds of a step while the denoiser has a hook that does nothing."""
    handle = pipeline.components["unet"].register_forward_pre_hook(_nothing, with_kwargs=True)
    try:
        return pipeline(steps, calls)
    finally:
        handle.remove()


def _nothing(_module: nn.Module, _args: object, _kwargs: object) -> None:
    pass


def resident_readings(steps: int) -> float:
    """CPU microseconds of reading the process's resident bytes."""
    started = time.thread_time_ns()
    for _ in range(steps):
        process_rss_bytes()
    return (time.thread_time_ns() - started) / steps / 1e3


def watched(pipeline: Pipeline, steps: int, calls: int) -> float:
    """The same as the pipeline gives, while it is watched."""
    with sigmascope.watch(pipeline, sample_hz=None):
        return pipeline(steps, calls)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    pipeline = Pipeline()

    def least(measure: Callable[[], float]) -> float:
        return min(measure() for _ in range(given.repeats))

    reading = least(lambda: resident_readings(given.steps))
    for calls in (1, 2):
        bare = least(lambda calls=calls: pipeline(given.steps, calls))  # type: ignore[misc]
        hook = least(lambda calls=calls: hooked(pipeline, given.steps, calls)) - bare  # type: ignore[misc]
        seen = least(lambda calls=calls: watched(pipeline, given.steps, calls)) - bare  # type: ignore[misc]
        print(
            f"{calls} call(s) a step: {bare:.2f} µs alone, {seen:.2f} µs for the watch: {seen / (hook + reading):.2f} × "
            f"a hook that does nothing ({hook:.2f} µs) and a reading of resident bytes ({reading:.2f} µs)"
        )
    print(f"recorder.step() by itself: {least(lambda: recorded_steps(given.steps)):.2f} µs")


if __name__ == "__main__":
    main()
