"""Runs as a watch of diffusers makes them, made by hand."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import (
    AcceleratorFacts,
    CallFacts,
    ComponentFacts,
    HostFacts,
    ModuleFacts,
    PipelineFacts,
    Run,
    Stage,
    Steps,
)

_NUMBERS = itertools.count()


def plain_pipeline(
    name: str = "FluxPipeline", source: str | None = "models/flux", device: str = "cuda:0"
) -> dict[str, Any]:
    denoiser = ComponentFacts(
        "denoiser", "FluxTransformer2DModel", ModuleFacts("FluxTransformer2DModel", devices={device: 10})
    )
    return asdict(PipelineFacts(name, components={"transformer": denoiser}, source=source))


def kept_run(
    *,
    id: str | None = None,
    started_at: str = "2026-03-01T12:00:00+00:00",
    seconds: float = 10.0,
    pipeline: str = "FluxPipeline",
    source: str | None = "models/flux",
    size: tuple[int, int] = (1024, 768),
    steps: int = 4,
    loras: Mapping[str, Any] | None = None,
    prompt: str = "0" * 64,
    error: str | None = None,
    complete: bool = True,
    facts: Mapping[str, Any] | None = None,
    device: str = "cuda:0",
    more: Mapping[str, Any] | None = None,
) -> Run:
    """One generation of 1024×768 in 4 steps on an H200 that takes a second less than the run."""
    call = CallFacts(num_inference_steps=steps, width=size[0], height=size[1], batch_size=1, seed=7)
    peak = PeakMemory(rss_bytes=5 << 30, accelerators=(AcceleratorPeak("cuda:0", 20 << 30, 1.0),))
    step = (seconds - 1) / (steps + 1)
    denoising = Stage(
        "denoising", 0.5, step * steps, steps=Steps(tuple(step * n for n in range(steps)), (step,) * steps)
    )
    generation = Stage(
        "generation",
        0.5,
        seconds - 1,
        success=error is None,
        error=error,
        peak=peak,
        children=(denoising,),
        facts={
            "pipeline": plain_pipeline(pipeline, source, device),
            "call": asdict(call),
            "prompts": {"prompt": {"sha256": prompt, "text": None}},
            "recipe": {"loras": dict(loras or {}), "arguments": {}, **(more or {})},
        },
    )
    host = HostFacts(
        cpu_model="EPYC",
        libraries={"sigmascope": "0.1", "torch": "2.13"},
        accelerators=(AcceleratorFacts("cuda:0", "NVIDIA H200"),),
    )
    return Run(
        id or f"{next(_NUMBERS):032x}",
        "a run",
        started_at,
        seconds,
        host=host,
        stages=(generation,),
        complete=complete,
        facts=dict(facts or {}),
    )
