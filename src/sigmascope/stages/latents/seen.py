"""What went into a VAE and what came out of it, read from a baseline and an output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sigmascope.records.latents import Direction, EncodingRecord, Layout, StrategyAttempt, VaeFacts
from sigmascope.records.peak import PeakMemory
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.latents.baseline import NO_BASELINE, references_of
from sigmascope.stages.latents.expected import Video, video_of
from sigmascope.stages.latents.finding_latent import FoundLatent, find_latent
from sigmascope.stages.latents.judging import judge
from sigmascope.stages.latents.latent_facts import latent_analysis, no_latent
from sigmascope.stages.latents.pictures import Pictures, read_pictures
from sigmascope.stages.latents.plain import pictures_dict
from sigmascope.stages.latents.typed import LatentAnalysis, PicturesDict
from sigmascope.stages.latents.vace import vace_analysis
from sigmascope.stages.latents.validation import Seen


@dataclass(frozen=True, slots=True)
class Given:
    """What a caller hands over beside the baseline; see `analyze_latent_generation_results`."""

    direction: Direction
    output: object
    elapsed_time: object = None
    strategy_used: object = None
    immediate_gpu_changes: object = None
    video: Video | None = None
    record: EncodingRecord | None = None
    attempts: tuple[StrategyAttempt, ...] = ()
    peak_memory: PeakMemory | PeakMemoryDict | None = None
    error: BaseException | str | None = None
    latent_layout: Layout | None = None
    statistics: bool | None = None


def encoded(baseline: Mapping[str, Any] | None, given: Given, vae: VaeFacts | None) -> Seen:
    """Pictures from the baseline, the latent from the output. Frames of a reference are none of the video's."""
    pictures = None if baseline is None else baseline.get("pictures")
    if pictures is None:
        pictures = pictures_dict(Pictures(None, reason=NO_BASELINE))
    video = (given.video or Video()).or_else(_video(pictures))
    found = find_latent(given.output)
    vace, latent = vace_analysis(given.output, given.statistics), _latent(found, given, vae, video)
    frames, added = latent["frames"], vace.get("trim_latent", 0)
    if frames is not None and video.length is not None and 0 < added < frames:
        latent["temporal_compression"] = video.length / (frames - added)
    return Seen(pictures, latent, video, vace)


def _latent(found: FoundLatent, given: Given, vae: VaeFacts | None, video: Video) -> LatentAnalysis:
    if found.tensor is None:
        return no_latent(found)
    judged = judge(found.tensor, vae, video, given.latent_layout, given.statistics)
    return latent_analysis(judged, found.structure, vae, video)


def decoded(baseline: Mapping[str, Any] | None, given: Given, vae: VaeFacts | None) -> Seen:
    """The latent from the baseline, pictures from the output."""
    pictures = pictures_dict(read_pictures(given.output, vae, given.statistics))
    video = (given.video or Video()).or_else(_video(pictures))
    known = references_of(baseline)
    latent = None if baseline is None else baseline.get("latent")
    if known is not None and known.latent is not None and latent is not None:
        latent = latent_analysis(known.latent, latent["structure"], vae, video)
    return Seen(pictures, latent or no_latent(FoundLatent(None, "none", NO_BASELINE)), video, {})


def _video(pictures: PicturesDict) -> Video:
    return video_of(pictures["length"], pictures["height"], pictures["width"])
