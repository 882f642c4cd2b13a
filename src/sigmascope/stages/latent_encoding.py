"""Latent encoding and decoding: what the VAE made of a video or a latent, by which strategy, at what cost.

    baseline = capture_latent_generation_baseline(vae, frames)
    latent, record = encode_latents(vae, frames)
    analysis = analyze_latent_generation_results(baseline, latent, None, None, record=record)
    print_latent_generation_analysis_summary(analysis)

A decoding is analysed the other way round: `latent_analysis` is about what went in, `pictures` about what
came out.

    baseline = capture_latent_decoding_baseline(vae, latent)
    frames, record = decode_latents(vae, latent)
    analysis = analyze_latent_decoding_results(baseline, frames, record=record)
    print_latent_decoding_analysis_summary(analysis)

The functions change nothing, move nothing, and keep no model and no tensor alive. What cannot be read is
None, with the reason in the `unavailable` beside it. The three whose names begin with `_` give single parts
of the analysis.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any, NamedTuple

from rich.console import Console

from sigmascope.errors import NonFiniteError
from sigmascope.probes import Accelerator
from sigmascope.probes.reading import Reading, attempt, lookup
from sigmascope.records.latents import (
    STRATEGIES,
    Direction,
    EncodingEvent,
    EncodingRecord,
    Layout,
    SampleFacts,
    Strategy,
    StrategyAttempt,
    VaeFacts,
    as_plain,
    attempts_in,
    record_in,
    strategy_label,
    strategy_number,
)
from sigmascope.records.memory import (
    MIB,
    AcceleratorMemory,
    MemoryImpact,
    MemoryImpactDict,
    MemorySnapshot,
    PeakMemory,
    PeakMemoryDict,
    change,
    highest,
    mib,
)
from sigmascope.records.run import Stage
from sigmascope.stages import latent_summary
from sigmascope.stages.baseline import (
    NO_ACCELERATOR,
    NO_BASELINE,
    References,
    baseline_of,
    checked_seconds,
    cleanup_effectiveness,
    device_before_and_after,
    device_memory,
    measure,
    memory_before,
    memory_of_now,
    memory_reasons,
    model_state,
    nbytes_in,
    references_of,
    state_now,
)
from sigmascope.stages.image_facts import Pictures, Video, pictures_dict, read_pictures, video_of
from sigmascope.stages.latent_facts import (
    LatentReading,
    LatentSearch,
    count_not_finite,
    find_latent,
    inner_vae,
    latent_analysis,
    no_latent,
    read_latent,
    reference_frames,
    unknown_vae,
    vace_analysis,
    vae_dict,
    vae_facts,
)
from sigmascope.stages.latent_validation import (
    CodingFacts,
    PicturesAndLatent,
    failures_of,
    not_finite_in,
    validation_findings,
    validation_of,
)
from sigmascope.stages.schema import (
    GpuChanges,
    LatentAnalysis,
    LatentBaseline,
    LatentEncodingAnalysis,
    MemoryEfficiency,
    PerformanceAnalysis,
    PicturesDict,
    as_dict,
)
from sigmascope.stages.summary import print_analysis

__all__ = [
    "LatentAnalysis",
    "LatentBaseline",
    "LatentEncodingAnalysis",
    "_analyze_latent_output",
    "_analyze_vae_encoding_performance",
    "_calculate_latent_generation_memory_change",
    "analyze_latent_decoding_results",
    "analyze_latent_generation_results",
    "capture_latent_decoding_baseline",
    "capture_latent_generation_baseline",
    "print_encoding_event",
    "print_latent_decoding_analysis_summary",
    "print_latent_generation_analysis_summary",
    "print_latent_generation_start",
]


_NUMBERED = re.compile(r"strategy\s*([1-4])\b", re.IGNORECASE)
_TYPICAL_WORDS: dict[Strategy, tuple[str, ...]] = {
    "dummy": ("dummy", "emergency"),
    "cpu": ("cpu",),
    "tiled": ("tiled", "tile"),
    "direct": ("direct", "standard", "normal"),
}
COLOURS = 3
_VAE_FIELDS = tuple(entry.name for entry in fields(VaeFacts) if entry.name != "nbytes")


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
    facts = vae_facts(vae_model)
    pictures = pictures_dict(read_pictures(video_data, facts, statistics))
    return _baseline(vae_model, facts, "encoding", accelerator, pictures=pictures)


def _baseline(
    vae: object,
    facts: VaeFacts,
    direction: Direction,
    accelerator: Accelerator | None,
    *,
    pictures: PicturesDict | None = None,
    latent: LatentAnalysis | None = None,
    reading: LatentReading | None = None,
) -> LatentBaseline:
    found = attempt(lambda: inner_vae(vae)).value
    inner = vae if found is None else found
    state = model_state(inner)
    return {
        **baseline_of(LatentReferences, accelerator, {"model_state": inner}, latent=reading),
        "direction": direction,
        "vae": vae_dict(facts),
        "model_state": state,
        "pictures": pictures,
        "latent": latent,
    }


@dataclass(frozen=True, slots=True, repr=False)
class LatentReferences(References):
    """What a latent stage's baseline keeps: the VAE weakly, of a latent only facts."""

    latent: LatentReading | None = None


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
    may_wait: bool = True,
) -> LatentEncodingAnalysis:
    """Analyse an encoding's result and cost from the baseline and the latent. Never raises.

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
        attempts: The outcome of each strategy, if there is no record.
        peak_memory: The peak of the stage that watched the encoding.
        error: What the VAE raised, if it did.
        latent_layout: Such as "BFCHW", where VAE and shape do not tell.
        statistics: As for the baseline; NaN and Inf in the latent are counted whatever it says.
        may_wait: False leaves an accelerator's latent uncounted, for a caller in the middle of the host's work.
    """
    video = video_of(video_length, video_height, video_width)
    return _analysis(
        "encoding",
        baseline,
        lambda vae: _encoded(baseline, init_latent, vae, video, latent_layout, statistics, may_wait),
        elapsed_time,
        strategy_used,
        immediate_gpu_changes,
        record,
        attempts,
        peak_memory,
        error,
    )


def print_latent_generation_analysis_summary(
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_generation_results` gave, or the same read from a file; None prints an error line.
        console: Where to print; standard output by default, without colour if it is not a terminal.
    """
    print_analysis(latent_summary.ENCODING_TITLE, analysis, latent_summary.latent_sections, console)


def print_latent_generation_start(
    baseline: Mapping[str, Any], step: str = "LATENT_GENERATION_STEP5", console: Console | None = None
) -> None:
    """Print what is known before an encoding: memory, and the video's dimensions.

    Args:
        baseline: What `capture_latent_generation_baseline` gave.
        step: What the step is called.
        console: Where to print; standard output by default.
    """
    latent_summary.print_lines(latent_summary.start_lines(baseline, step), console)


def print_encoding_event(event: EncodingEvent, console: Console | None = None) -> None:
    """Print what has just happened in an encoding or decoding: `encode_latents(…, on_event=print_encoding_event)`.

    Args:
        event: A strategy that begins or ends.
        console: Where to print; standard output by default.
    """
    latent_summary.print_lines(latent_summary.event_lines(event), console)


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
    facts, search = vae_facts(vae_model), find_latent(latent)
    if search.tensor is None:
        return _baseline(vae_model, facts, "decoding", accelerator, latent=no_latent(search))
    video = video_of(video_length, video_height, video_width)
    reading = read_latent(search.tensor, facts, video, latent_layout, statistics)
    analysis = latent_analysis(reading, search.structure, facts, video)
    return _baseline(vae_model, facts, "decoding", accelerator, latent=analysis, reading=reading)


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
    """Analyse a decoding's result and cost from the baseline and the pictures. Never raises.

    Args:
        baseline: What `capture_latent_decoding_baseline` gave; None: no comparison with before.
        decoded: The pictures, in any form that `capture_latent_generation_baseline` takes.
        elapsed_time: Seconds that the decoding took; None: the record's.
        strategy_used: "Direct VAE Decoding", "Tiled VAE Decoding", "CPU Fallback Decoding", "Emergency Dummy
            Frames", their number, or words of your own; None: the record's.
        immediate_gpu_changes: `{"allocated_change": MB, "reserved_change": MB}` measured right after; None: what
            is read now.
        record: What `decode_latents` gave beside the pictures.
        attempts: The outcome of each strategy, if there is no record.
        peak_memory: The peak of the stage that watched the decoding.
        error: What the VAE raised, if it did.
        statistics: As for the baseline; NaN and Inf are known from `record` whatever it says.
    """
    return _analysis(
        "decoding",
        baseline,
        lambda vae: _decoded(baseline, decoded, vae, record, statistics),
        elapsed_time,
        strategy_used,
        immediate_gpu_changes,
        record,
        attempts,
        peak_memory,
        error,
    )


def print_latent_decoding_analysis_summary(
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis as that of an encoding is printed, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_decoding_results` gave, or the same read from a file; None prints an error line.
        console: Where to print; standard output by default, without colour if it is not a terminal.
    """
    print_analysis(latent_summary.DECODING_TITLE, analysis, latent_summary.latent_sections, console)


def _analysis(
    direction: Direction,
    baseline: object,
    media_by: Callable[[VaeFacts | None], PicturesAndLatent],
    elapsed_time: object,
    strategy_used: object,
    immediate_gpu_changes: object,
    record: EncodingRecord | None,
    attempts: Sequence[StrategyAttempt],
    peak_memory: PeakMemory | PeakMemoryDict | None,
    error: BaseException | str | None,
) -> LatentEncodingAnalysis:
    """The analysis of an encoding or a decoding. `media_by` reads the pictures and the latent by the VAE's facts."""
    known = record or EncodingRecord(direction, attempts=tuple(attempts))
    elapsed = known.seconds if elapsed_time is None else elapsed_time
    used = used_strategy(strategy_used, record, direction, known.attempts)
    tried = known.attempts if record or attempts else _named_attempt(used, checked_seconds(elapsed).value)
    measured = measure(baseline, elapsed, _peak_of(tried) if peak_memory is None else peak_memory, error)
    vae = _vae_before(baseline) or known.vae
    media = media_by(vae)
    dummy = used.strategy == "dummy" or known.dummy
    if dummy and direction == "encoding" and media.latent["status"] == "success":
        media.latent["status"] = "dummy"
    vae_before, vae_now = lookup(baseline, "model_state"), state_now(baseline, "model_state")
    if record is None:
        tried = _failed_if_not_finite(tried, media, direction)
    efficiency = memory_efficiency(measured.impact, measured.peak)
    facts = CodingFacts(
        direction, media, vae, vae_before, vae_now, tried, used.strategy, efficiency, measured.impact, dummy
    )
    findings = validation_findings(facts, known.findings)
    if error is not None:  # which is why there is no output
        findings["output"] = []
    failures = failures_of([*findings["output"], *(findings["strategies"] if dummy else ())])
    success = error is None and not failures
    problems = " ".join(finding.message for finding in failures)
    pictures = media.pictures
    return {
        **measured.as_dict(success, problems, **_why_no_strategy(used)),
        "encoding_success": success,
        "direction": direction,
        "strategy_used": used.name,
        "strategy_number": used.number,
        "strategies": strategy_dicts(tried, direction),
        "dummy": dummy,
        "vae": vae_dict(vae or unknown_vae(NO_BASELINE)),
        "pictures": pictures,
        "latent_analysis": media.latent,
        "vace_conditioning": media.vace,
        "performance_analysis": performance_analysis(
            elapsed,
            used.name,
            media.video,
            total_frames=total_frames(media),
            colours=pictures["channels"],
            input_mb=pictures["size_mb"],
        ),
        "memory_impact": measured.impact_dict(),
        "immediate_gpu_changes": gpu_changes(immediate_gpu_changes, measured.impact),
        "efficiency": efficiency,
        "model_state": {"vae": vae_now},
        "validation": validation_of(facts, findings),
        "findings": [asdict(finding) for of_subject in findings.values() for finding in of_subject],
    }


class UsedStrategy(NamedTuple):
    """The strategy that gave the latent: what it is called, and which one it is, if that is known."""

    name: str | None
    strategy: Strategy | None

    @property
    def number(self) -> int | None:
        """1 to 4; None for words of the caller's own."""
        return None if self.strategy is None else strategy_number(self.strategy)


def _named_attempt(used: UsedStrategy, seconds: float | None) -> tuple[StrategyAttempt, ...]:
    """The strategy that the caller names, where nobody saw what was tried."""
    if used.strategy is None:
        return ()
    reasons = dict.fromkeys(("device", "peak", "measured_peak_bytes"), "it was not measured separately")
    reasons |= dict.fromkeys(("predicted_peak_bytes", "prediction_basis"), "nothing was predicted")
    return (StrategyAttempt(used.strategy, "succeeded", seconds, unavailable=reasons),)


def _peak_of(attempts: Sequence[StrategyAttempt]) -> PeakMemory | None:
    """The highest peak of attempts, one after the other."""
    began, peaks = 0.0, []
    for tried in attempts:
        if tried.peak is not None:
            peaks.append((began, tried.peak))
        began += tried.seconds or 0.0
    return highest(peaks) if peaks else None


def _vae_before(baseline: object) -> VaeFacts | None:
    """The facts of the VAE that a baseline holds."""
    held = lookup(baseline, "vae")
    if not isinstance(held, Mapping):
        return None
    nbytes = nbytes_in(held, "size")
    return VaeFacts(**{name: held[name] for name in _VAE_FIELDS if name in held}, nbytes=nbytes)


def _failed_if_not_finite(
    attempts: tuple[StrategyAttempt, ...], media: PicturesAndLatent, direction: Direction
) -> tuple[StrategyAttempt, ...]:
    """Where only the caller or a monitor says that an attempt succeeded, what came out may say otherwise."""
    _, words = not_finite_in(media.pictures if direction == "decoding" else media.latent["statistics"] or {})
    if not words or not attempts or attempts[-1].outcome != "succeeded":
        return attempts
    last = replace(
        attempts[-1], outcome="failed", reason=f"the result holds {words}", error_type=NonFiniteError.__name__
    )
    return (*attempts[:-1], last)


def _why_no_strategy(used: UsedStrategy) -> dict[str, str]:
    if used.name is None:
        return dict.fromkeys(("strategy_used", "strategy_number"), "no strategy was named")
    return {"strategy_number": "it is not one of the four strategies"} if used.number is None else {}


def _encoded(
    baseline: object,
    output: object,
    vae: VaeFacts | None,
    given: Video,
    layout: Layout | None,
    statistics: bool | None,
    may_wait: bool,
) -> PicturesAndLatent:
    """Pictures from the baseline, the latent from the output. Frames of a reference are none of the video's."""
    pictures: PicturesDict | None = lookup(baseline, "pictures")
    if pictures is None:
        pictures = pictures_dict(Pictures(None, reason=NO_BASELINE))
    video = given.or_else(_video_of_pictures(pictures))
    vace = vace_analysis(output, statistics)
    latent = _latent(output, vae, video, layout, statistics, may_wait=may_wait)
    frames, added = latent["frames"], reference_frames(latent, vace)
    if frames is not None and video.length is not None and 0 < added < frames:
        latent["temporal_compression"] = video.length / (frames - added)
    return PicturesAndLatent(pictures, latent, video, vace)


def _video_of_pictures(pictures: PicturesDict) -> Video:
    return video_of(pictures["length"], pictures["height"], pictures["width"])


def _latent(
    output: object,
    vae: VaeFacts | None,
    video: Video,
    layout: Layout | None,
    statistics: bool | None,
    *,
    may_wait: bool,
) -> LatentAnalysis:
    search = find_latent(output)
    if search.tensor is None:
        return no_latent(search)
    reading = read_latent(search.tensor, vae, video, layout, statistics)
    if may_wait or search.tensor.device.type == "cpu":
        reading = count_not_finite(reading, search.tensor)
    return latent_analysis(reading, search.structure, vae, video)


def _decoded(
    baseline: object,
    output: object,
    vae: VaeFacts | None,
    record: EncodingRecord | None,
    statistics: bool | None,
) -> PicturesAndLatent:
    """The latent from the baseline, pictures from the output."""
    pictures = _with_counts(pictures_dict(read_pictures(output, vae, statistics)), record)
    video = _video_of_pictures(pictures)
    known = references_of(baseline, LatentReferences)
    latent: LatentAnalysis | None = lookup(baseline, "latent")
    if known is not None and known.latent is not None and latent is not None:
        latent = latent_analysis(known.latent, latent["structure"], vae, video)
    latent = latent or no_latent(LatentSearch(None, "none", NO_BASELINE))
    return PicturesAndLatent(pictures, latent, video, {})


def _with_counts(pictures: PicturesDict, record: EncodingRecord | None) -> PicturesDict:
    """With the counts of NaN and Inf that the decoding has made itself, where the values were left alone."""
    output = None if record is None else record.output
    if pictures["nan_count"] is not None or output is None or list(output.tensor.shape) != pictures["shape"]:
        return pictures
    counts = {"nan_count": output.tensor.nan_count, "inf_count": output.tensor.inf_count}
    known = {name: count for name, count in counts.items() if count is not None}
    reasons = {name: why for name, why in pictures["unavailable"].items() if name not in known}
    return {**pictures, **known, "unavailable": reasons}  # type: ignore[typeddict-item]


def used_strategy(
    named: object,
    record: EncodingRecord | None,
    direction: Direction,
    attempts: Sequence[StrategyAttempt] = (),
) -> UsedStrategy:
    """The strategy by the caller's words, else by the record, else by what was seen to succeed."""
    if named is None and record is not None:
        return UsedStrategy(record.strategy_label, record.strategy)
    if named is None:
        seen = next((attempt.name for attempt in reversed(attempts) if attempt.outcome == "succeeded"), None)
        return UsedStrategy(None if seen is None else strategy_label(seen, direction), seen)
    if isinstance(named, int) and not isinstance(named, bool) and 1 <= named <= len(STRATEGIES):
        strategy = STRATEGIES[named - 1]
        return UsedStrategy(strategy_label(strategy, direction), strategy)
    if not isinstance(named, str) or not named.strip():
        return UsedStrategy(None, None)
    known = strategy_of(named)
    return UsedStrategy(strategy_label(known, direction) if named in STRATEGIES and known else named, known)


def record_of_step(
    stage: Stage, direction: Direction, named: object, output: SampleFacts | None
) -> EncodingRecord | None:
    """What a step did with the VAE; None where nothing is known of it."""
    left = record_in(stage)
    if left is not None and left.direction == direction:
        return left
    attempts = attempts_in(stage, direction)
    used = used_strategy(named, None, direction, attempts).strategy
    counts = () if output is None else (output.tensor.nan_count, output.tensor.inf_count)
    success = stage.success and not any(counts)
    if used is not None and not attempts:
        attempts = (StrategyAttempt(used, "succeeded" if success else "failed", stage.seconds, stage.error),)
    if not attempts and output is None:
        return None
    return EncodingRecord(
        direction, success, used, attempts, stage.seconds, output=output, dummy=used == "dummy" and success
    )


def strategy_of(words: str) -> Strategy | None:
    """The strategy that words name: by number, else by the word that is typical of it."""
    numbered = _NUMBERED.search(words)
    if numbered is not None:
        return STRATEGIES[int(numbered[1]) - 1]
    lowered = re.findall(r"[a-z]+", words.lower())
    return next(
        (strategy for strategy, typical in _TYPICAL_WORDS.items() if set(typical) & set(lowered)), None
    )


def strategy_dicts(attempts: tuple[StrategyAttempt, ...], direction: Direction) -> list[dict[str, Any]]:
    """Attempts as an analysis holds them: in MiB, with number and name."""
    plain = as_plain(EncodingRecord(attempts=attempts))["attempts"]
    return [
        {
            **shown,
            "number": strategy_number(attempt.name),
            "strategy": attempt.name,
            "name": strategy_label(attempt.name, direction),
            "peak": None if attempt.peak is None else attempt.peak.as_dict(),
            "unavailable": {_in_mb(name): reason for name, reason in attempt.unavailable.items()}
            | (
                {}
                if attempt.peak is None
                else memory_reasons(attempt.peak.as_dict(), (attempt.peak,), "peak")
            ),
        }
        for attempt, shown in zip(attempts, plain, strict=True)
    ]


def _in_mb(name: str) -> str:
    """What a figure in bytes is called in an analysis."""
    return name.removesuffix("_bytes") + "_mb" if name.endswith("_bytes") else name


def total_frames(media: PicturesAndLatent) -> int | None:
    """Frames of all videos of the batch.

    Those of the pictures, else those of a latent without an axis of frames. If they are not a multiple of the length
    that a caller names, each video of the latent has that length.
    """
    latent, length = media.latent, media.video.length
    in_latent = latent["batch_size"] if latent["frames"] is None else None
    for count in (media.pictures.get("total_frames"), in_latent):
        if count is not None and (length is None or (length and count % length == 0)):
            return count
    return None if length is None else length * (latent["batch_size"] or 1)


def performance_analysis(
    elapsed: object,
    strategy: str | None,
    video: Video,
    *,
    total_frames: int | None = None,
    colours: int | None = None,
    input_mb: float | None = None,
) -> PerformanceAnalysis:
    """Sizes and rates of an encoding or decoding, of all frames of the batch (None: of one video).

    Data is counted at a byte a colour (16 frames of 512x512 are 12 MB), so that rates compare
    whatever type the pictures were handed over in; `input_mb` has their real size.
    """
    seconds = checked_seconds(elapsed)
    why_no_time = "it took no measurable time" if seconds.value == 0 else seconds.reason
    frames = video.length if total_frames is None else total_frames
    sizes = {"frames": frames, "height": video.height, "width": video.width}
    missing = ", ".join(name for name, size in sizes.items() if size is None)
    pixels = None if missing else prod(size or 0 for size in sizes.values())
    megabytes = None if pixels is None else pixels * (colours or COLOURS) / MIB

    def by_second(amount: int | float | None) -> Reading[float]:
        rate = amount / seconds.value if amount is not None and seconds.value else None
        return Reading(rate, why_no_time or "the size of the video is unknown")

    return as_dict(
        PerformanceAnalysis,
        why=dict.fromkeys(("length", "height", "width"), "it was neither given nor read"),
        total_frames=Reading(frames, "it was neither given nor read"),
        total_pixels=Reading(pixels, f"unknown of the video: {missing}"),
        total_mb=Reading(megabytes, f"unknown of the video: {missing}"),
        input_mb=Reading(input_mb, "the pictures were not looked at"),
        elapsed_time=seconds,
        strategy_used=Reading(strategy, "no strategy was named"),
        pixels_per_second=by_second(pixels),
        mb_per_second=by_second(megabytes),
        frames_per_second=by_second(frames),
        video_dimensions={"length": video.length, "height": video.height, "width": video.width},
    )


def memory_change(before: MemorySnapshot, ram: object, gpu: object, now: MemorySnapshot) -> MemoryImpactDict:
    """`memory_impact`: memory at the end beside that of the baseline.

    Args:
        before: The baseline's memory.
        ram: RAM at the end: a mapping of `used`, `available` and `total` with `_mb` (also if nothing is said),
            `_gb` or `_bytes` behind them; psutil's `virtual_memory()`, in bytes; None: as `now` has it.
        gpu: The device at the end: a mapping of `allocated`, `reserved` and `total` likewise; None: as `now` has it.
        now: Memory at the end, for all that is not given.
    """
    total, used, available = (now.ram_total_bytes, now.ram_used_bytes, now.ram_available_bytes)
    if ram is not None:
        total, used, available = (nbytes_in(ram, name) for name in ("total", "used", "available"))
    devices = now.accelerators if gpu is None else _with_device(before, now, gpu)
    after = MemorySnapshot(
        before.ram_total_bytes if total is None else total,
        used,
        available,
        now.process_rss_bytes,
        devices,
        current_device=devices[0].device if gpu is not None and devices else now.current_device,
    )
    return MemoryImpact(before, after).as_dict()


def _with_device(before: MemorySnapshot, now: MemorySnapshot, gpu: object) -> tuple[AcceleratorMemory, ...]:
    device = now.device_in_use() or before.device_in_use() or "gpu"
    memory = device_memory(device, gpu)
    if memory == AcceleratorMemory(device):
        return ()
    if memory.total_bytes is None:
        memory = replace(memory, total_bytes=before.accelerator(device).total_bytes)
    return (memory, *(other for other in now.accelerators if other.device != device))


def gpu_changes(measured: object, impact: MemoryImpact | None) -> GpuChanges:
    """`immediate_gpu_changes`: the caller's own measurement, else what the analysis reads now."""
    by = "analysis"
    if isinstance(measured, MemoryImpact):
        by, impact = "stage", measured
    _, before, after = device_before_and_after(impact)
    allocated = change(before.allocated_bytes, after.allocated_bytes)
    reserved = change(before.reserved_bytes, after.reserved_bytes)
    reason = _why_not_told(impact)
    if isinstance(measured, Mapping):
        by, reason = "caller", "the caller did not measure it"
        allocated, reserved = (nbytes_in(measured, f"{name}_change") for name in ("allocated", "reserved"))
    return as_dict(
        GpuChanges,
        why=reason,
        allocated_change_mb=mib(allocated),
        reserved_change_mb=mib(reserved),
        measured_by=by,
    )


def _why_not_told(impact: MemoryImpact | None) -> str:
    """Why a figure of the device in use is not known."""
    if impact is None:
        return NO_BASELINE
    return "the device does not report it" if impact.current.accelerators else NO_ACCELERATOR


def memory_efficiency(impact: MemoryImpact | None, peak: object) -> MemoryEfficiency:
    """How the device's allocator stands after the encoding, and the share of the growth that was given back."""
    _, before, after = device_before_and_after(impact)
    return as_dict(
        MemoryEfficiency,
        why=_why_not_told(impact),
        allocated_reserved_ratio=after.allocated_ratio(),
        fragmentation=after.fragmentation(),
        free_vram_change_mb=mib(change(before.free_bytes, after.free_bytes)),
        cleanup_effectiveness=cleanup_effectiveness(peak, impact),
    )


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
    video = video_of(video_length, video_height, video_width)
    return _latent(init_latent, vae, video, latent_layout, statistics, may_wait=True)


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
    """`memory_impact` alone: memory now beside that of a baseline.

    Args:
        baseline: What `capture_latent_generation_baseline` gave.
        current_ram: Its `used`, `available` and `total`: in MB in a mapping, in bytes as psutil's
            `virtual_memory()`; None: read now.
        current_gpu: Its `allocated`, `reserved` and `total` in MB in a mapping; None: read now.
    """
    before, now = memory_before(baseline) or MemorySnapshot(), memory_of_now(baseline)
    return memory_change(before, current_ram, current_gpu, now)
