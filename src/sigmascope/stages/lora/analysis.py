"""Put together the analysis of a LoRA's application from its parts."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.probes import memory_snapshot
from sigmascope.probes.reading import Reading
from sigmascope.records.peak import PeakMemory
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.records.typed import PeakMemoryDict
from sigmascope.stages.failures import error_text, exception_dict
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.baseline import NO_BASELINE, plain_baseline, references_of
from sigmascope.stages.lora.entries import entry_of
from sigmascope.stages.lora.findings import FileFindings, findings_of
from sigmascope.stages.lora.judged import host_of, judged, judged_applied
from sigmascope.stages.lora.lora_file import lora_file_facts
from sigmascope.stages.lora.memory import lora_memory_impact
from sigmascope.stages.lora.sides import Side, is_effective, side_of, with_fused_explained
from sigmascope.stages.lora.typed import LoraAnalysis, LoraFileFacts
from sigmascope.stages.memory_now import checked_seconds, memory_now

NO_PEAKS = "peaks are seen while something watches: use WorkflowMonitor, or hand over a stage's peak"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the host gave back, and what watched it."""

    lora_result: object
    elapsed_time: object = None
    peak_memory: PeakMemory | PeakMemoryDict | None = None
    error: BaseException | str | None = None


def analyze(baseline: object, unet: object, clip: object, outcome: Outcome) -> LoraAnalysis:
    """See `sigmascope.stages.lora_application.analyze_lora_application_results`."""
    began = time.perf_counter()
    known = references_of(baseline)
    snapshot = memory_snapshot(None if known is None else known.accelerator)
    sides: Mapping[str, Side] = {
        "unet": side_of(baseline, "unet", "UNet", unet, snapshot),
        "clip": side_of(baseline, "clip", "CLIP", clip, snapshot),
    }
    path = None if known is None else known.lora_path
    verdict = judged(path, unet, clip) if known is None or known.verdict.value is None else known.verdict
    applied, returned = outcome.lora_result is not None, models_in(outcome.lora_result)
    effective = is_effective(sides)
    on_model = judged_applied(path, unet, clip, sides["unet"].applied, sides["clip"].applied)
    on_model, sides = with_fused_explained(path, verdict, on_model, sides, unet, clip)
    named = [("UNet", sides["unet"]), ("CLIP", sides["clip"])]
    findings = findings_of(
        [(name, side.weights, side.patches) for name, side in named],
        FileFindings(verdict.value, on_model.value, host_of(unet, clip)),
        effective,
        applied=applied,
    )
    seconds, why_no_time = checked_seconds(outcome.elapsed_time)
    impact = None if known is None else MemoryImpact(known.snapshot, snapshot)
    error = outcome.error
    return {
        "lora_application_success": applied and error is None,
        "models_returned": returned,
        "unet_changes": sides["unet"].identity,
        "clip_changes": sides["clip"].identity,
        "unet_weight_changes": sides["unet"].weights,
        "clip_weight_changes": sides["clip"].weights,
        "unet_lora_patches": sides["unet"].patches,
        "clip_lora_patches": sides["clip"].patches,
        "placement_changes": {"unet": sides["unet"].placement, "clip": sides["clip"].placement},
        "memory_impact": lora_memory_impact(sides["unet"].memory, sides["clip"].memory, impact),
        "success": error is None and effective is True and not _bad(findings),
        "effective": effective,
        "error": None if error is None else error_text(error, str),
        "exception_details": exception_dict(error, str) if isinstance(error, BaseException) else None,
        "elapsed_time": seconds,
        "analysis_seconds": time.perf_counter() - began,
        "lora_file": _file_of(baseline),
        "verdict": None if verdict.value is None else verdict.value.as_dict(),
        "applied_verdict": None if on_model.value is None else on_model.value.as_dict(),
        "findings": [asdict(finding) for finding in findings],
        "peak_memory": _peak(outcome.peak_memory),
        "baseline": plain_baseline(baseline),
        "current_memory": memory_now(snapshot),
        "unavailable": _unavailable(impact, outcome, verdict, effective, why_no_time),
    }


def models_in(lora_result: object) -> int:
    """How many models the host returned: those of a tuple; one for anything else that is not None."""
    if lora_result is None:
        return 0
    count = read_host(lambda: len(lora_result) if isinstance(lora_result, tuple | list | Mapping) else 1)
    return 1 if count.value is None else count.value


def _file_of(baseline: object) -> LoraFileFacts:
    facts: LoraFileFacts | None = entry_of(baseline, "lora_file")
    return facts if isinstance(facts, dict) else lora_file_facts(None)


def _bad(findings: Any) -> bool:
    return any(finding.severity in ("error", "critical") for finding in findings)


def _peak(peak: PeakMemory | PeakMemoryDict | None) -> PeakMemoryDict | None:
    return peak.as_dict() if isinstance(peak, PeakMemory) else peak


def _unavailable(
    impact: MemoryImpact | None,
    outcome: Outcome,
    verdict: Reading[LoraVerdict],
    effective: bool | None,
    why_no_time: str | None,
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if impact is None:
        reasons["memory_impact"] = NO_BASELINE
    if outcome.peak_memory is None:
        reasons["peak_memory"] = NO_PEAKS
    if verdict.value is None:
        reasons |= dict.fromkeys(("verdict", "applied_verdict"), verdict.reason or "unknown")
    if effective is None:
        reasons["effective"] = "contents of before and now could not be compared, and no change is registered"
    if why_no_time is not None:
        reasons["elapsed_time"] = why_no_time
    return reasons
