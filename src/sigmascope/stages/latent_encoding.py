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

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.console import Console

from sigmascope.errors import NonFiniteError
from sigmascope.probes import Accelerator, memory_snapshot
from sigmascope.probes.reading import error_text, read_host
from sigmascope.records.latents import (
    VAE_STAGES,
    Direction,
    EncodingEvent,
    EncodingRecord,
    Layout,
    StrategyAttempt,
    VaeFacts,
)
from sigmascope.records.memory import (
    GpuPeak,
    MemoryImpact,
    MemoryImpactDict,
    MemorySnapshot,
    PeakMemory,
    PeakMemoryDict,
    highest,
)
from sigmascope.records.run import Finding
from sigmascope.stages.baseline import (
    changes,
    checked_seconds,
    exception_dict,
    memory_now,
    model_state,
    reference_to,
)
from sigmascope.stages.image_facts import Pictures, pictures_dict, read_pictures, vae_dict
from sigmascope.stages.latent_facts import (
    FoundLatent,
    Judged,
    counted,
    find_latent,
    judge,
    latent_analysis,
    no_latent,
    reference_frames,
    vace_analysis,
)
from sigmascope.stages.latent_layout import Video, video_of
from sigmascope.stages.latent_performance import (
    Used,
    attempts_of,
    figure_of,
    gpu_changes,
    memory_change,
    memory_efficiency,
    performance_analysis,
    snapshot_of,
    strategy_dicts,
    used_strategy,
)
from sigmascope.stages.latent_summary import (
    DECODING_TITLE,
    ENCODING_TITLE,
    print_event,
    print_start,
    sections,
)
from sigmascope.stages.latent_validation import Parts, Seen, failures_of, findings_of, validation_of
from sigmascope.stages.schema import (
    LatentAnalysis,
    LatentBaseline,
    LatentEncodingAnalysis,
    ModelStateDict,
    PerformanceAnalysis,
    PicturesDict,
)
from sigmascope.stages.summary import print_analysis
from sigmascope.stages.vae_facts import inner_vae, vae_facts

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

NO_BASELINE = "there is no baseline"
_VAE_FIELDS = tuple(field.name for field in fields(VaeFacts) if field.name != "nbytes")
NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"


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
    may_wait: bool = True,
) -> LatentEncodingAnalysis:
    """What an encoding gave and what it cost, from the baseline and the latent. Never raises.

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
        statistics: As for the baseline; NaN and Inf in the latent are counted whatever it says.
        may_wait: False leaves an accelerator's latent uncounted, for a caller in the middle of the host's work.
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
        may_wait,
    )
    return analyze(baseline, given)


def print_latent_generation_analysis_summary(
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis, section by section, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_generation_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(ENCODING_TITLE, analysis, sections, console)


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
    """What a decoding gave and what it cost, from the baseline and the pictures. Never raises.

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
        statistics: As for the baseline; NaN and Inf are known from `record` whatever it says.
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
    analysis: Mapping[str, Any] | None, console: Console | None = None
) -> None:
    """Print the analysis as that of an encoding is printed, at most 80 columns wide.

    Args:
        analysis: What `analyze_latent_decoding_results` gave, or the same read from a file; None prints an error line.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    print_analysis(DECODING_TITLE, analysis, sections, console)


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
    may_wait: bool = True


def analyze(baseline: Mapping[str, Any] | None, given: Given) -> LatentEncodingAnalysis:
    """The analysis of an encoding or a decoding."""
    known = references_of(baseline)
    snapshot = memory_snapshot(None if known is None else known.accelerator)  # before we take any ourselves
    before = snapshot_before(baseline)
    impact = None if before is None else MemoryImpact(before, snapshot)
    elapsed, why_no_time = checked_seconds(_elapsed(given))
    used = used_strategy(given.strategy_used, given.record, given.direction, given.attempts)
    attempts = attempts_of(given.record, given.attempts, used, elapsed)
    peak = _peak(given, attempts)
    parts = _parts(baseline, given, impact, used, attempts, peak)
    findings = findings_of(parts, () if given.record is None else given.record.findings)
    failures = failures_of([*findings["output"], *(findings["strategies"] if parts.dummy else ())])
    success = given.error is None and not failures
    seen = parts.seen
    return {
        "encoding_success": success,
        "success": success,
        **_failure(given.error, failures),  # type: ignore[typeddict-item]
        "direction": given.direction,
        "elapsed_time": elapsed,
        "strategy_used": used.name,
        "strategy_number": used.number,
        "strategies": strategy_dicts(parts.attempts, given.direction),
        "dummy": parts.dummy,
        "vae": vae_dict(parts.vae or VaeFacts("", unavailable={"class_name": NO_BASELINE})),
        "pictures": seen.pictures,
        "latent_analysis": seen.latent,
        "vace_conditioning": seen.vace,
        "performance_analysis": performance_analysis(
            _elapsed(given),
            used.name,
            seen.video,
            colours=seen.pictures["channels"],
            input_mb=seen.pictures["size_mb"],
        ),
        "memory_impact": None if impact is None else impact.as_dict(),
        "immediate_gpu_changes": gpu_changes(given.immediate_gpu_changes, impact),
        "efficiency": parts.efficiency,
        "peak_memory": peak.as_dict() if isinstance(peak, PeakMemory) else peak,
        "model_state": {"vae": parts.vae_now},
        "baseline": _plain_baseline(baseline),
        "current_memory": memory_now(snapshot),
        "validation": validation_of(parts, findings),
        "findings": [asdict(finding) for part in findings.values() for finding in part],
        "unavailable": _unavailable(impact, peak, why_no_time, used),
    }


def _elapsed(given: Given) -> object:
    if given.elapsed_time is not None or given.record is None:
        return given.elapsed_time
    return given.record.seconds


def _peak(given: Given, attempts: tuple[StrategyAttempt, ...]) -> PeakMemory | PeakMemoryDict | None:
    """The stage's peak; without one the highest of its attempts, one after the other."""
    if isinstance(given.peak_memory, Mapping):
        return with_true_reserved(given.peak_memory)
    if given.peak_memory is not None:
        return given.peak_memory
    began, peaks = 0.0, []
    for attempt in attempts:
        if attempt.peak is not None:
            peaks.append((began, attempt.peak))
        began += attempt.seconds or 0.0
    return highest(peaks) if peaks else None


def _parts(
    baseline: Mapping[str, Any] | None,
    given: Given,
    impact: MemoryImpact | None,
    used: Used,
    attempts: tuple[StrategyAttempt, ...],
    peak: PeakMemory | PeakMemoryDict | None,
) -> Parts:
    """What findings are drawn from; a stand-in's latent gets its own status."""
    vae = vae_before(baseline) or (None if given.record is None else given.record.vae)
    seen = (encoded if given.direction == "encoding" else decoded)(baseline, given, vae)
    if given.record is None:
        attempts = _failed_if_not_finite(attempts, seen, given.direction)
    dummy = used.strategy == "dummy" or (given.record is not None and given.record.dummy)
    if dummy and given.direction == "encoding" and seen.latent["status"] == "success":
        seen.latent["status"] = "dummy"
    return Parts(
        VAE_STAGES[given.direction],
        given.direction,
        seen,
        vae,
        None if baseline is None else baseline.get("model_state"),
        state_now(baseline, references_of(baseline)),
        attempts,
        used,
        memory_efficiency(impact, peak),
        impact,
        dummy,
    )


def _failed_if_not_finite(
    attempts: tuple[StrategyAttempt, ...], seen: Seen, direction: Direction
) -> tuple[StrategyAttempt, ...]:
    """Where only the caller or a monitor says that an attempt succeeded, what came out may say otherwise."""
    facts: Mapping[str, Any] = seen.pictures
    if direction == "encoding":
        facts = seen.latent["statistics"] or {}
    counts = {"NaN": facts.get("nan_count"), "Inf": facts.get("inf_count")}
    words = " and ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    if not words or not attempts or attempts[-1].outcome != "succeeded":
        return attempts
    last = replace(
        attempts[-1], outcome="failed", reason=f"the result holds {words}", error_type=NonFiniteError.__name__
    )
    return (*attempts[:-1], last)


def _failure(error: BaseException | str | None, failures: list[Finding]) -> dict[str, object]:
    if error is None:
        problems = " ".join(finding.message for finding in failures)
        return {"error": problems or None, "exception_details": None}
    details = exception_dict(error) if isinstance(error, BaseException) else None
    return {"error": error_text(error), "exception_details": details}


def _plain_baseline(baseline: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if baseline is None:
        return None
    return {name: value for name, value in baseline.items() if name != "references"}


def _unavailable(
    impact: MemoryImpact | None, peak: object, why_no_time: str | None, used: Used
) -> dict[str, str]:
    reasons = {} if impact is not None else {"memory_impact": NO_BASELINE}
    if peak is None:
        reasons["peak_memory"] = NO_PEAKS
    if why_no_time is not None:
        reasons["elapsed_time"] = why_no_time
    if used.name is None:
        reasons["strategy_used"] = "no strategy was named"
    if used.number is None:
        reasons["strategy_number"] = "it is none of the four" if used.name else "no strategy was named"
    return reasons


def encoded(baseline: Mapping[str, Any] | None, given: Given, vae: VaeFacts | None) -> Seen:
    """Pictures from the baseline, the latent from the output. Frames of a reference are none of the video's."""
    pictures = None if baseline is None else baseline.get("pictures")
    if pictures is None:
        pictures = pictures_dict(Pictures(None, reason=NO_BASELINE))
    video = (given.video or Video()).or_else(_video_of_pictures(pictures))
    found = find_latent(given.output)
    vace, latent = vace_analysis(given.output, given.statistics), _latent(found, given, vae, video)
    frames, added = latent["frames"], reference_frames(latent, vace)
    if frames is not None and video.length is not None and 0 < added < frames:
        latent["temporal_compression"] = video.length / (frames - added)
    return Seen(pictures, latent, video, vace)


def _video_of_pictures(pictures: PicturesDict) -> Video:
    return video_of(pictures["length"], pictures["height"], pictures["width"])


def _latent(found: FoundLatent, given: Given, vae: VaeFacts | None, video: Video) -> LatentAnalysis:
    if found.tensor is None:
        return no_latent(found)
    judged = judge(found.tensor, vae, video, given.latent_layout, given.statistics)
    if given.may_wait or found.tensor.device.type == "cpu":
        judged = counted(judged, found.tensor)
    return latent_analysis(judged, found.structure, vae, video)


def decoded(baseline: Mapping[str, Any] | None, given: Given, vae: VaeFacts | None) -> Seen:
    """The latent from the baseline, pictures from the output."""
    pictures = _with_counts(pictures_dict(read_pictures(given.output, vae, given.statistics)), given.record)
    video = (given.video or Video()).or_else(_video_of_pictures(pictures))
    known = references_of(baseline)
    latent = None if baseline is None else baseline.get("latent")
    if known is not None and known.latent is not None and latent is not None:
        latent = latent_analysis(known.latent, latent["structure"], vae, video)
    return Seen(pictures, latent or no_latent(FoundLatent(None, "none", NO_BASELINE)), video, {})


def _with_counts(pictures: PicturesDict, record: EncodingRecord | None) -> PicturesDict:
    """With the counts of NaN and Inf that the decoding has made itself, where the values were left alone."""
    output = None if record is None else record.output
    if pictures["nan_count"] is not None or output is None or list(output.tensor.shape) != pictures["shape"]:
        return pictures
    counts = {"nan_count": output.tensor.nan_count, "inf_count": output.tensor.inf_count}
    known = {name: count for name, count in counts.items() if count is not None}
    reasons = {name: why for name, why in pictures["unavailable"].items() if name not in known}
    return {**pictures, **known, "unavailable": reasons}  # type: ignore[typeddict-item]


@dataclass(frozen=True, slots=True)
class References:
    """What a baseline keeps for the analysis: the VAE weakly, of tensors only facts."""

    snapshot: MemorySnapshot
    vae: Any
    accelerator: Accelerator | None
    latent: Judged | None = None

    def __repr__(self) -> str:
        return "References(…)"


def state_now(baseline: Mapping[str, Any] | None, known: References | None) -> ModelStateDict:
    """The VAE's state now, with what changed since the baseline."""
    live = None if known is None or known.vae is None else known.vae()
    state = model_state(live)
    before = None if baseline is None else baseline.get("model_state")
    if live is None and isinstance(before, Mapping) and before.get("class_type"):
        state["unavailable"] = dict.fromkeys(state["unavailable"], "the VAE is gone")
    if live is not None and isinstance(before, Mapping):
        state["changed"] = changes(before, state)  # type: ignore[arg-type]
    return state


def snapshot_before(baseline: Mapping[str, Any] | None) -> MemorySnapshot | None:
    """Memory before, also from a baseline that was read from a file."""
    known = references_of(baseline)
    if known is not None:
        return known.snapshot
    memory = None if baseline is None else baseline.get("memory")
    return snapshot_of(memory) if isinstance(memory, Mapping) else None


def vae_before(baseline: Mapping[str, Any] | None) -> VaeFacts | None:
    """The facts of the VAE that a baseline holds."""
    told = None if baseline is None else baseline.get("vae")
    if not isinstance(told, Mapping):
        return None
    nbytes = figure_of(told, "size")
    return VaeFacts(**{name: told[name] for name in _VAE_FIELDS if name in told}, nbytes=nbytes)


def with_true_reserved(peak: PeakMemoryDict) -> PeakMemoryDict:
    """The peaks with no reserved one below the allocated one, which was read at another moment."""
    gpus = {device: _with_true_reserved(gpu) for device, gpu in peak.get("gpus", {}).items()}
    return {**peak, "gpu": _with_true_reserved(peak["gpu"]), "gpus": gpus}


def _with_true_reserved(gpu: GpuPeak) -> GpuPeak:
    allocated, reserved = gpu["peak_allocated_mb"], gpu["peak_reserved_mb"]
    if allocated is None or reserved is None or reserved >= allocated:
        return gpu
    return {
        **gpu,
        "peak_reserved_mb": allocated,
        "peak_reserved_at_seconds": gpu["peak_allocated_at_seconds"],
    }


def capture_pictures(
    vae: object, pictures: object, statistics: bool | None, accelerator: Accelerator | None
) -> LatentBaseline:
    """The baseline that `capture_latent_generation_baseline` gives. Never raises."""
    facts = vae_facts(vae)
    read = pictures_dict(read_pictures(pictures, facts, statistics))
    return _baseline(vae, facts, "encoding", accelerator, pictures=read)


def _baseline(
    vae: object,
    facts: VaeFacts,
    direction: Direction,
    accelerator: Accelerator | None,
    *,
    pictures: PicturesDict | None = None,
    latent: LatentAnalysis | None = None,
    judged: Judged | None = None,
) -> LatentBaseline:
    inner = read_host(lambda: inner_vae(vae)).value or vae
    state = model_state(inner)
    snapshot = memory_snapshot(accelerator)
    return {
        "timestamp": time.time(),
        "direction": direction,
        "memory": memory_now(snapshot),
        "vae": vae_dict(facts),
        "model_state": state,
        "pictures": pictures,
        "latent": latent,
        "references": References(snapshot, reference_to(inner), accelerator, judged),
    }


def capture_latent(
    vae: object,
    latent: object,
    video: Video,
    layout: Layout | None,
    statistics: bool | None,
    accelerator: Accelerator | None,
) -> LatentBaseline:
    """The baseline that `capture_latent_decoding_baseline` gives. Never raises."""
    facts, found = vae_facts(vae), find_latent(latent)
    judged = None if found.tensor is None else judge(found.tensor, facts, video, layout, statistics)
    analysis = no_latent(found) if judged is None else latent_analysis(judged, found.structure, facts, video)
    return _baseline(vae, facts, "decoding", accelerator, latent=analysis, judged=judged)


def references_of(baseline: Mapping[str, Any] | None) -> References | None:
    """What `capture` kept; None for a baseline that is not ours or was read from a file."""
    references = None if baseline is None else baseline.get("references")
    return references if isinstance(references, References) else None


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
    judged = judge(found.tensor, vae, video, latent_layout, statistics)
    return latent_analysis(counted(judged, found.tensor), found.structure, vae, video)


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
    known = references_of(baseline)
    now = memory_snapshot(None if known is None else known.accelerator)
    return memory_change(snapshot_before(baseline) or MemorySnapshot(), current_ram, current_gpu, now)
