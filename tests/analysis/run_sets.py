"""Runs as a pipeline of a certain speed gives them."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import Run, Stage, Steps

_NUMBERS = itertools.count()


def steps(seconds: Sequence[float], gpu: Sequence[float | None] = ()) -> Steps:
    started = tuple(sum(seconds[:index], 0.0) for index in range(len(seconds)))
    return Steps(started, tuple(seconds), tuple(gpu))


def queued(*gpu: float | None) -> Run:
    """A run whose steps the host was done with in a millisecond; None: the accelerator was not seen to finish one."""
    host = [0.001] * len(gpu)
    denoising = Stage("denoising", 0.0, sum(host), steps=steps(host, gpu))
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(denoising,))


def run(
    seconds: Sequence[float], *, other: float = 0.5, rss: int = 10**9, device_bytes: int | None = None
) -> Run:
    devices = () if device_bytes is None else (AcceleratorPeak("cuda:0", device_bytes, 0.1),)
    peak = PeakMemory(rss_bytes=rss, rss_at_seconds=0.1, accelerators=devices)
    denoising = Stage("denoising", 0.0, sum(seconds), steps=steps(seconds), peak=peak)
    decoding = Stage("latent_decoding", sum(seconds), other)
    total = sum(seconds) + other
    return Run(
        f"id {next(_NUMBERS)}", "run", "2026-01-01T00:00:00+00:00", total, stages=(denoising, decoding)
    )


def noisy_runs(count: int, *, factor: float = 1.0, noise: float = 0.02, seed: int = 0) -> list[Run]:
    """Runs of 20 steps of 0.1 s · factor; each run has its own speed, and so has each step."""
    return [run(seconds) for seconds in noisy_steps(count, factor=factor, noise=noise, seed=seed)]


def noisy_steps(
    count: int, *, factor: float = 1.0, noise: float = 0.02, seed: int = 0
) -> Iterator[list[float]]:
    """The seconds of the steps of such runs."""
    rng = random.Random(seed)
    for _ in range(count):
        speed = rng.gauss(1, noise / 2)
        yield [0.1 * factor * speed * rng.gauss(1, noise) for _ in range(20)]


def of_parts(
    parts: Mapping[str, float | Sequence[float]],
    *,
    minute: int = 0,
    rss: int = 10**9,
    waited: float | None = None,
    others: float | None = None,
    is_generation: bool = False,
) -> Run:
    """A run of stages one after another: seconds of one without steps, or those of its steps.

    Args:
        parts: By the stage's name.
        minute: When it began.
        rss: Its peak of memory.
        waited: The share of its time that it waited for a processor.
        others: The share of the processors that other programs used.
        is_generation: Whether the stages are those of a generation, which is all of it.
    """
    stages: list[Stage] = []
    total = 0.0
    for name, seconds in parts.items():
        column = () if isinstance(seconds, float) else tuple(seconds)
        took = seconds if isinstance(seconds, float) else sum(column)
        stages.append(Stage(name, total, took, steps=steps(column), facts=_processor(took, waited)))
        total += took
    facts = _processor(total, waited) | ({} if others is None else {"others_cpu_share": others})
    if is_generation:
        stages = [Stage("generation", 0.0, total, children=tuple(stages), facts=facts)]
    peak = PeakMemory(rss_bytes=rss, rss_at_seconds=0.1)
    stages[0] = replace(stages[0], peak=peak)
    return Run(
        f"id {next(_NUMBERS)}",
        "run",
        f"2026-01-01T{minute // 60:02d}:{minute % 60:02d}:00+00:00",
        total,
        stages=tuple(stages),
        facts=facts,
    )


def _processor(seconds: float, waited: float | None) -> dict[str, Any]:
    if waited is None:
        return {}
    use = {
        "own_seconds": seconds * (1 - waited),
        "waited_seconds": seconds * waited,
        "throttled_seconds": 0.0,
    }
    return {"processor": use}
