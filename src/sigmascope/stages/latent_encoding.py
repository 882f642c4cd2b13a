"""Latent encoding (SPEC sections 1, 2 and 5): what the VAE made of a video, by which strategy, at what cost.

    baseline = capture_latent_generation_baseline(vae, frames)
    latent, record = encode_latents(vae, frames)
    analysis = analyze_latent_generation_results(baseline, latent, None, None, record=record)
    print_latent_generation_analysis_summary(analysis)

The functions change nothing, move nothing, and keep no model and no tensor alive. What cannot be read is
None, with the reason in the `unavailable` beside it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator
from sigmascope.records.latents import EncodingEvent, EncodingRecord, Layout, StrategyAttempt
from sigmascope.records.peak import PeakMemory
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.latents.analysis import analyze
from sigmascope.stages.latents.baseline import capture_pictures
from sigmascope.stages.latents.expected import video_of
from sigmascope.stages.latents.live import print_event, print_start
from sigmascope.stages.latents.parts import (
    _analyze_latent_output,
    _analyze_vae_encoding_performance,
    _calculate_latent_generation_memory_change,
)
from sigmascope.stages.latents.report import ENCODING_TITLE, sections
from sigmascope.stages.latents.seen import Given
from sigmascope.stages.latents.typed import LatentAnalysis, LatentBaseline, LatentEncodingAnalysis
from sigmascope.stages.summary import print_summary

__all__ = [
    "LatentAnalysis",
    "LatentBaseline",
    "LatentEncodingAnalysis",
    "_analyze_latent_output",
    "_analyze_vae_encoding_performance",
    "_calculate_latent_generation_memory_change",
    "analyze_latent_generation_results",
    "capture_latent_generation_baseline",
    "print_encoding_event",
    "print_latent_generation_analysis_summary",
    "print_latent_generation_start",
]


def capture_latent_generation_baseline(
    vae_model: object,
    video_data: object,
    *,
    statistics: bool | None = None,
    accelerator: Accelerator | None = None,
) -> LatentBaseline:
    """Memory, VAE and pictures as they are before the encoding. Never raises.

    Args:
        vae_model: A diffusers VAE, ComfyUI's VAE, a pipeline that has one, or any object.
        video_data: What will be encoded: a tensor or array in any usual layout, ComfyUI's images, a list of
            PIL images, arrays or tensors, or a mapping that holds one of these.
        statistics: True reads the values of an accelerator's tensors too, which waits for it; None those of
            CPU tensors; False none.
        accelerator: What to ask about devices; None finds out.
    """
    return capture_pictures(vae_model, video_data, statistics, accelerator)


def analyze_latent_generation_results(
    baseline: Mapping[str, Any] | None,
    init_latent: object,
    elapsed_time: object,
    strategy_used: object,
    immediate_gpu_changes: object = None,
    video_length: object = None,
    video_height: object = None,
    video_width: object = None,
    *,
    record: EncodingRecord | None = None,
    attempts: Sequence[StrategyAttempt] = (),
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
    latent_layout: Layout | None = None,
    statistics: bool | None = None,
) -> LatentEncodingAnalysis:
    """Everything that SPEC section 5 names, from the baseline and what was encoded. Never raises.

    Args:
        baseline: What `capture_latent_generation_baseline` gave; None: no comparison with before.
        init_latent: The latent: a tensor, ComfyUI's `{"samples": …}`, a node's outputs, or diffusers' output.
        elapsed_time: Seconds that the encoding took; None: the record's.
        strategy_used: "Direct VAE Encoding", "Tiled VAE Encoding", "CPU Fallback Encoding", "Emergency Dummy
            Latents", their number, or words of your own; None: the record's.
        immediate_gpu_changes: `{"allocated_change": MB, "reserved_change": MB}` measured right after; None: what
            is read now.
        video_length: Frames; None: as the baseline saw them.
        video_height: Pixels; likewise.
        video_width: Pixels; likewise.
        record: What `encode_latents` gave beside the latent.
        attempts: Without a record: what became of each strategy.
        peak_memory: The peak of the stage that watched the encoding.
        error: What the VAE raised, if it did.
        latent_layout: Such as "BFCHW", where VAE and shape do not tell.
        statistics: As for the baseline.
    """
    video = video_of(video_length, video_height, video_width)
    given = Given(
        "encoding",
        init_latent,
        elapsed_time,
        strategy_used,
        immediate_gpu_changes,
        video,
        record,
        tuple(attempts),
        peak_memory,
        error,
        latent_layout,
        statistics,
    )
    return analyze(baseline, given)


def print_latent_generation_analysis_summary(
    analysis: Mapping[str, Any], console: Console | None = None
) -> None:
    """Print the analysis in the seed's layout, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_generation_results` gave, or the same read from a file.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_summary(ENCODING_TITLE, sections(analysis), console)


def print_latent_generation_start(
    baseline: Mapping[str, Any], step: str = "LATENT_GENERATION_STEP5", console: Console | None = None
) -> None:
    """Print what is known before an encoding: memory, and the video's dimensions.

    Args:
        baseline: What `capture_latent_generation_baseline` gave.
        step: What the step is called.
        console: Where to; standard output by default.
    """
    print_start(baseline, step, console)


def print_encoding_event(event: EncodingEvent, console: Console | None = None) -> None:
    """Print what has just happened in an encoding or decoding: `encode_latents(…, on_event=print_encoding_event)`.

    Args:
        event: A strategy that begins or ends.
        console: Where to; standard output by default.
    """
    print_event(event, console)
