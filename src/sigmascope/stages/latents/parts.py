"""Parts of the analysis of an encoding by themselves, under the names that users of the seeds know."""

from collections.abc import Mapping
from typing import Any

from sigmascope.probes import memory_snapshot
from sigmascope.records.latents import Layout, VaeFacts
from sigmascope.records.snapshot import MemorySnapshot
from sigmascope.records.typed import MemoryImpactDict
from sigmascope.stages.latents.baseline import references_of, snapshot_before
from sigmascope.stages.latents.expected import video_of
from sigmascope.stages.latents.finding_latent import find_latent
from sigmascope.stages.latents.judging import judge
from sigmascope.stages.latents.latent_facts import latent_analysis, no_latent
from sigmascope.stages.latents.memory import memory_change
from sigmascope.stages.latents.performance import performance_analysis
from sigmascope.stages.latents.strategies import used_strategy
from sigmascope.stages.latents.typed import LatentAnalysis, PerformanceAnalysis


def _analyze_latent_output(
    init_latent: object,
    video_length: object,
    video_height: object,
    video_width: object,
    *,
    vae: VaeFacts | None = None,
    latent_layout: Layout | None = None,
    statistics: bool | None = None,
) -> LatentAnalysis:
    """`latent_analysis` alone: shape, type, size, axes and compression of a latent.

    Args:
        init_latent: As for `analyze_latent_generation_results`.
        video_length: Frames.
        video_height: Pixels.
        video_width: Pixels.
        vae: What is known of the VAE.
        latent_layout: Such as "BFCHW".
        statistics: Whether to read the values.
    """
    found, video = find_latent(init_latent), video_of(video_length, video_height, video_width)
    if found.tensor is None:
        return no_latent(found)
    return latent_analysis(
        judge(found.tensor, vae, video, latent_layout, statistics), found.structure, vae, video
    )


def _analyze_vae_encoding_performance(
    elapsed_time: object,
    strategy_used: object,
    video_length: object,
    video_height: object,
    video_width: object,
) -> PerformanceAnalysis:
    """`performance_analysis` alone: pixels, bytes and frames a second.

    Args:
        elapsed_time: Seconds.
        strategy_used: As for `analyze_latent_generation_results`.
        video_length: Frames.
        video_height: Pixels.
        video_width: Pixels.
    """
    used = used_strategy(strategy_used, None, "encoding")
    return performance_analysis(elapsed_time, used.name, video_of(video_length, video_height, video_width))


def _calculate_latent_generation_memory_change(
    baseline: Mapping[str, Any] | None, current_ram: object, current_gpu: object
) -> MemoryImpactDict:
    """`memory_impact` of SPEC section 2, from a baseline and the memory now.

    Args:
        baseline: What `capture_latent_generation_baseline` gave.
        current_ram: Its `used`, `available` and `total`: in MB in a mapping, in bytes as psutil's
            `virtual_memory()`; None: read now.
        current_gpu: Its `allocated`, `reserved` and `total` in MB in a mapping; None: read now.
    """
    known = references_of(baseline)
    now = memory_snapshot(None if known is None else known.accelerator)
    return memory_change(snapshot_before(baseline) or MemorySnapshot(), current_ram, current_gpu, now)
