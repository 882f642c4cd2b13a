"""What tiles would make of a VAE's peak: worked by hand on made records."""

from dataclasses import asdict
from typing import Any

import pytest

from sigmascope.analysis.breakdown import headline
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import CallFacts, ComponentFacts, PipelineFacts, Run, Stage

GB = 2**30
NO_NUMBER = "tiles would make it less (pipe.vae.enable_tiling())"


def stage(name: str, before: int, peak: int, *inside: Stage, **facts: Any) -> Stage:
    held = MemorySnapshot(accelerators=(AcceleratorMemory("cuda:0", allocated_bytes=before),))
    highest = PeakMemory(accelerators=(AcceleratorPeak("cuda:0", peak, 0.5),))
    return Stage(name, 0.0, 1.0, memory=MemoryImpact(held, held), peak=highest, children=inside, facts=facts)


def said(
    *,
    size: int = 2048,
    denoising: int = 3,
    peak: int = 10,
    kind: str = "AutoencoderKL",
    side: Any = 1024,
    **vae: Any,
) -> str:
    """The sentence on memory of a call whose VAE found 2 GB in use."""
    part = ComponentFacts(
        "vae", kind, config={} if side is None else {"sample_size": side}, **{"tiling": False, **vae}
    )
    decoding = stage("latent_decoding", 2 * GB, peak * GB, component="vae")
    facts = {
        "call": asdict(CallFacts(height=size, width=size)),
        "pipeline": asdict(PipelineFacts("StableDiffusionXLPipeline", components={"vae": part})),
    }
    whole = stage("generation", GB, peak * GB, stage("denoising", 2 * GB, denoising * GB), decoding, **facts)
    run = Run("1", "demo", "2026-01-02T03:04:05+00:00", 1.0, stages=(whole,))
    return headline(run).partition("Peak of ")[2]


def test_what_the_stage_took_falls_with_the_tile_s_share() -> None:
    # 2 GB in use, and 8 for 2048 × 2048; a tile has a quarter of the pixels: 2 + 8 / 4
    assert said() == (
        "cuda:0: 10 GB, in latent_decoding (vae): tiles would make it about 4 GB (pipe.vae.enable_tiling())"
        "; 1 GB of it stays in use, the generation adds 9 GB."
    )


def test_the_peak_of_another_stage_stays() -> None:
    assert "about 7 GB" in said(denoising=7)


@pytest.mark.parametrize("change", [{"side": None}, {"kind": "AutoencoderKLWan"}, {"offload": "model"}])
def test_where_the_record_does_not_hold_it_there_is_no_number(change: dict[str, Any]) -> None:
    of_the_whole = "1 GB of it stays in use, the generation adds 9 GB"
    assert said(**change) == f"cuda:0: 10 GB, in latent_decoding (vae): {NO_NUMBER}; {of_the_whole}."


@pytest.mark.parametrize(
    "change", [{"tiling": True}, {"tiling": None}, {"size": 1024}, {"denoising": 10, "peak": 10}]
)
def test_tiles_that_are_used_or_would_not_help_are_not_advised(change: dict[str, Any]) -> None:
    assert "tiles" not in said(**change)
