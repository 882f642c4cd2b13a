"""Runs of several generations, built by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tests.analysis.faulty_runs import component, pipeline

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.memory import MemoryImpact, MemorySnapshot
from sigmascope.records.run import CallFacts, Finding, Run, Stage, Steps
from sigmascope.records.serialization import to_plain


def generation(
    at: float,
    steps: Sequence[float],
    *,
    height: int = 512,
    compiled: bool = False,
    other: float = 0.1,
    rss: tuple[int, int] = (0, 0),
    denoiser: Mapping[str, Any] = MappingProxyType({}),
    **processor: float,
) -> Stage:
    """A generation that began at a second and took steps of these seconds, on a made Flux pipeline."""
    started = tuple(sum(steps[:index], 0.0) for index in range(len(steps)))
    denoising = Stage("denoising", at, sum(steps, 0.0), steps=Steps(started, tuple(steps)))
    decoding = Stage("latent_decoding", at + sum(steps), other)
    made = pipeline(transformer=component("denoiser", compiled=compiled, **denoiser))
    call = CallFacts(num_inference_steps=len(steps), height=height, width=512, batch_size=1)
    facts = {"pipeline": to_plain(made), "call": to_plain(call)}
    use = {"processor": {"own_seconds": 1.0, **processor}} if processor else {}
    return Stage(
        "generation",
        at,
        sum(steps, 0.0) + other,
        children=(replace(denoising, facts=use), decoding),
        facts={**facts, **use},
        memory=MemoryImpact(
            MemorySnapshot(process_rss_bytes=rss[0]), MemorySnapshot(process_rss_bytes=rss[1])
        ),
    )


def series(*generations: Stage) -> Run:
    """A run of them, diagnosed."""
    seconds = sum((stage.seconds for stage in generations), 0.0)
    run = Run("1", "demo", "2026-01-02T03:04:05+00:00", seconds, stages=generations)
    return replace(run, findings=diagnose(run))


def found(run: Run) -> dict[str, Finding]:
    """The run's findings by their ids."""
    return {finding.id: finding for finding in run.findings}
