"""Latent decoding (SPEC sections 1, 2 and 5): what the VAE made of a latent, by which strategy, at what cost.

    baseline = capture_latent_decoding_baseline(vae, latent)
    frames, record = decode_latents(vae, latent)
    analysis = analyze_latent_decoding_results(baseline, frames, record=record)
    print_latent_decoding_analysis_summary(analysis)

The analysis is that of `latent_encoding` the other way round: `latent_analysis` is about what went in,
`pictures` about what came out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from sigmascope.probes import Accelerator
from sigmascope.records.latents import EncodingRecord, Layout, StrategyAttempt
from sigmascope.records.peak import PeakMemory
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.latents.analysis import analyze
from sigmascope.stages.latents.baseline import capture_latent
from sigmascope.stages.latents.expected import video_of
from sigmascope.stages.latents.report import DECODING_TITLE, sections
from sigmascope.stages.latents.seen import Given
from sigmascope.stages.latents.typed import LatentBaseline, LatentEncodingAnalysis
from sigmascope.stages.summary import print_summary

__all__ = [
    "analyze_latent_decoding_results",
    "capture_latent_decoding_baseline",
    "print_latent_decoding_analysis_summary",
]


def capture_latent_decoding_baseline(
    vae_model: object,
    latent: object,
    *,
    video_length: object = None,
    video_height: object = None,
    video_width: object = None,
    latent_layout: Layout | None = None,
    statistics: bool | None = None,
    accelerator: Accelerator | None = None,
) -> LatentBaseline:
    """Memory, VAE and latent as they are before the decoding. Never raises.

    Args:
        vae_model: A diffusers VAE, ComfyUI's VAE, a pipeline that has one, or any object.
        latent: What will be decoded: a tensor or array, ComfyUI's `{"samples": …}`, a pipeline's output.
        video_length: Frames that are expected, which packed latents of videos cannot be read without.
        video_height: Pixels; likewise for all packed latents.
        video_width: Pixels; likewise.
        latent_layout: Such as "BFCHW", where VAE and shape do not tell.
        statistics: True reads the values of an accelerator's tensors too, which waits for it; None those of
            CPU tensors; False none.
        accelerator: What to ask about devices; None finds out.
    """
    video = video_of(video_length, video_height, video_width)
    return capture_latent(vae_model, latent, video, latent_layout, statistics, accelerator)


def analyze_latent_decoding_results(
    baseline: Mapping[str, Any] | None,
    decoded: object,
    elapsed_time: object = None,
    strategy_used: object = None,
    immediate_gpu_changes: object = None,
    *,
    record: EncodingRecord | None = None,
    attempts: Sequence[StrategyAttempt] = (),
    peak_memory: PeakMemory | PeakMemoryDict | None = None,
    error: BaseException | str | None = None,
    statistics: bool | None = None,
) -> LatentEncodingAnalysis:
    """Everything that SPEC section 5 names, of a decoding. Never raises.

    Args:
        baseline: What `capture_latent_decoding_baseline` gave; None: no comparison with before.
        decoded: The pictures, in any form that `capture_latent_generation_baseline` takes.
        elapsed_time: Seconds that the decoding took; None: the record's.
        strategy_used: "Direct VAE Decoding", "Tiled VAE Decoding", "CPU Fallback Decoding", "Emergency Dummy
            Frames", their number, or words of your own; None: the record's.
        immediate_gpu_changes: `{"allocated_change": MB, "reserved_change": MB}` measured right after; None: what
            is read now.
        record: What `decode_latents` gave beside the pictures.
        attempts: Without a record: what became of each strategy.
        peak_memory: The peak of the stage that watched the decoding.
        error: What the VAE raised, if it did.
        statistics: As for the baseline.
    """
    given = Given(
        "decoding",
        decoded,
        elapsed_time,
        strategy_used,
        immediate_gpu_changes,
        None,
        record,
        tuple(attempts),
        peak_memory,
        error,
        None,
        statistics,
    )
    return analyze(baseline, given)


def print_latent_decoding_analysis_summary(
    analysis: Mapping[str, Any], console: Console | None = None
) -> None:
    """Print the analysis as that of an encoding is printed, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_decoding_results` gave, or the same read from a file.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_summary(DECODING_TITLE, sections(analysis), console)
