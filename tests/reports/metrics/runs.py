"""Generations written by hand, as a service's watch hands them over."""

from typing import Any

from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import AcceleratorFacts, HostFacts, Run, Stage, Steps

GIB = 2**30


def stage(name: str, started: float, seconds: float, **kwargs: Any) -> Stage:
    return Stage(name, started, seconds, **kwargs)


def generation(
    *inside: Stage,
    seconds: float = 3.0,
    pipeline: str = "FluxPipeline",
    success: bool = True,
    error: str | None = None,
    facts: dict[str, Any] | None = None,
    name: str = "generation",
) -> Run:
    """Two stages, three steps on the device's clock, a peak on one device of two."""
    steps = Steps(started=(0.0, 0.5, 1.0), seconds=(0.1, 0.1, 0.1), gpu_seconds=(0.5, 0.5, 0.75))
    stages = inside or (
        stage("text_encoding", 0.0, 0.25),
        stage("denoising", 0.25, 2.0, steps=steps, facts={"device_seconds": 1.75}),
    )
    whole = Stage(
        name,
        0.0,
        seconds,
        success=success,
        error=error,
        children=stages,
        facts={"pipeline": {"class_name": pipeline}, **(facts or {})},
        peak=PeakMemory(rss_bytes=2 * GIB, accelerators=(AcceleratorPeak("cuda:0", 5 * GIB, 1.0),)),
    )
    host = HostFacts(accelerators=(AcceleratorFacts("cuda:0", "card", 24 * GIB),))
    return Run("id-of-run", "service", "2026-03-01T10:00:00+00:00", seconds, host, (whole,))


def hostile(number: int) -> Run:
    """A generation whose every name was invented by a client: prompts, paths, ids, control characters."""
    prompt = f"a red fox number {number}\n\x1b[31m{{}}\"'"
    return generation(
        stage(prompt, 0.0, 0.1),
        stage(f"/home/user/{number}/picture.png", 0.1, 0.1),
        stage(f"stage_{number}", 0.2, 0.1),
        stage("denoising", 0.3, 0.1),
        pipeline=f"/models/{number}/{prompt}" if number % 2 else f"Pipeline{number}",
        facts={
            "prompts": {"prompt": {"sha256": "0" * 64, "text": prompt}},
            "route": f"/draw/{number}/{prompt}" if number % 3 else f"/draw/{number}",
            "request_id": f"id-{number}",
        },
    )
