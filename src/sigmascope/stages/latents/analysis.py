"""Put together the analysis of an encoding or decoding from its parts."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sigmascope.probes import memory_snapshot
from sigmascope.records.finding import Finding
from sigmascope.records.latent_findings import VAE_STAGES
from sigmascope.records.latents import StrategyAttempt, VaeFacts
from sigmascope.records.peak import PeakMemory, highest
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.records.typed import GpuPeak, PeakMemoryDict
from sigmascope.stages.failures import error_text, exception_dict
from sigmascope.stages.latents.baseline import (
    NO_BASELINE,
    references_of,
    snapshot_before,
    state_now,
    vae_before,
)
from sigmascope.stages.latents.efficiency import gpu_changes, memory_efficiency
from sigmascope.stages.latents.performance import performance_analysis
from sigmascope.stages.latents.plain import vae_dict
from sigmascope.stages.latents.seen import Given, decoded, encoded
from sigmascope.stages.latents.strategies import Used, attempts_of, strategy_dicts, used_strategy
from sigmascope.stages.latents.typed import LatentEncodingAnalysis
from sigmascope.stages.latents.validation import Parts, failures_of, findings_of, validation_of
from sigmascope.stages.memory_now import checked_seconds, memory_now

NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"


def analyze(baseline: Mapping[str, Any] | None, given: Given) -> LatentEncodingAnalysis:
    """See `sigmascope.stages.latent_encoding.analyze_latent_generation_results`."""
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
        "strategies": strategy_dicts(attempts, given.direction),
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


def with_true_reserved(peak: PeakMemoryDict) -> PeakMemoryDict:
    """The peaks with no reserved one below the allocated one, which was read at another moment (SPEC section 2)."""
    gpus = {device: _true(gpu) for device, gpu in peak.get("gpus", {}).items()}
    return {**peak, "gpu": _true(peak["gpu"]), "gpus": gpus}


def _true(gpu: GpuPeak) -> GpuPeak:
    allocated, reserved = gpu["peak_allocated_mb"], gpu["peak_reserved_mb"]
    if allocated is None or reserved is None or reserved >= allocated:
        return gpu
    return {
        **gpu,
        "peak_reserved_mb": allocated,
        "peak_reserved_at_seconds": gpu["peak_allocated_at_seconds"],
    }


def _failure(error: BaseException | str | None, failures: list[Finding]) -> dict[str, object]:
    if error is None:
        problems = " ".join(finding.message for finding in failures)
        return {"error": problems or None, "exception_details": None}
    details = exception_dict(error, str) if isinstance(error, BaseException) else None
    return {"error": error_text(error, str), "exception_details": details}


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
