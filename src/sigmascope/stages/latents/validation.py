"""All findings of an encoding or decoding, and the checks that they make up."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sigmascope.records.arithmetic import change, mib
from sigmascope.records.finding import Finding
from sigmascope.records.latent_findings import findings_of_attempts, without_known
from sigmascope.records.latents import Direction, StrategyAttempt, VaeFacts
from sigmascope.records.snapshot import MemoryImpact
from sigmascope.stages.latents.expected import Video
from sigmascope.stages.latents.latent_findings import latent_findings, memory_findings, vae_findings
from sigmascope.stages.latents.picture_findings import cut_findings, frames_over, picture_findings
from sigmascope.stages.latents.strategies import Used
from sigmascope.stages.latents.typed import LatentAnalysis, LatentValidation, MemoryEfficiency, PicturesDict
from sigmascope.stages.latents.vace import vace_findings
from sigmascope.stages.typed import Check, ModelStateDict

_FAILURES = ("error", "critical")


class Seen(NamedTuple):
    """The pictures and the latent, whichever of them is the output, and WAN-VACE's conditioning."""

    pictures: PicturesDict
    latent: LatentAnalysis
    video: Video
    vace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the findings are drawn from."""

    stage: str
    direction: Direction
    seen: Seen
    vae: VaeFacts | None
    vae_before: Mapping[str, Any] | None
    vae_now: ModelStateDict
    attempts: tuple[StrategyAttempt, ...]
    used: Used
    efficiency: MemoryEfficiency
    impact: MemoryImpact | None
    dummy: bool


def findings_of(parts: Parts, of_record: Iterable[Finding] = ()) -> dict[str, list[Finding]]:
    """Findings by what they are about: `strategies`, `input`, `output`, `vae`, `memory`, worst first in each.

    Args:
        parts: What is known.
        of_record: Those that the engine has drawn itself; one that is here already is not repeated.
    """
    stage = parts.stage
    encodes = parts.direction == "encoding"
    pictures = list(picture_findings(parts.seen.pictures, stage, decoded=not encodes))
    over = frames_over(parts.seen.video, parts.vae)
    latent = list(latent_findings(parts.seen.latent, stage, parts.seen.vace, over))
    latent += vace_findings(parts.seen.vace, parts.seen.latent, parts.vae, stage)
    if encodes:
        pictures += cut_findings(parts.seen.video, parts.vae, stage)
    elif parts.seen.pictures["shape"] is None:
        reason = parts.seen.pictures["unavailable"]["shape"]
        pictures.append(
            Finding("pictures_missing", "error", f"There are no pictures: {reason}.", stage=stage)
        )
    tried = list(
        findings_of_attempts(parts.attempts, parts.used.strategy, parts.direction, dummy=parts.dummy)
    )
    return {
        "strategies": tried + without_known(of_record, tried),
        "input": pictures if encodes else latent,
        "output": latent if encodes else pictures,
        "vae": list(vae_findings(parts.vae_before, parts.vae_now, stage)),
        "memory": _memory(parts),
    }


def _memory(parts: Parts) -> list[Finding]:
    impact = parts.impact
    device = None if impact is None else impact.current.device_in_use()
    if impact is None or device is None:
        return []
    before, after = impact.baseline.accelerator(device), impact.current.accelerator(device)
    growth = mib(change(before.allocated_bytes, after.allocated_bytes))
    return list(memory_findings(parts.efficiency, mib(after.reserved_bytes), growth, parts.stage))


def failures_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that make a check fail."""
    return [finding for finding in findings if finding.severity in _FAILURES]


def validation_of(parts: Parts, findings: Mapping[str, list[Finding]]) -> LatentValidation:
    """The checks: what failed in `messages`, what is worth knowing in `notes`."""
    every = [finding for part in findings.values() for finding in part]
    pictures, latent = parts.seen.pictures["shape"] is not None, parts.seen.latent["shape"] is not None
    return {
        "success": not failures_of(every),
        "input": _check(findings["input"], known=pictures if parts.direction == "encoding" else latent),
        "output": _check(findings["output"], known=True),
        "vae": _check(findings["vae"], known=parts.vae_now["changed"] is not None),
        "notes": [
            *(finding.message for finding in every if finding.severity not in _FAILURES),
            *_unread(parts),
        ],
    }


def _check(findings: list[Finding], *, known: bool) -> Check:
    failures = failures_of(findings)
    return {
        "passed": False if failures else True if known else None,
        "messages": [finding.message for finding in failures],
    }


def _unread(parts: Parts) -> Iterator[str]:
    """What was not looked at for NaN and Inf."""
    for name, facts in (("pictures", parts.seen.pictures), ("latents", parts.seen.latent)):
        reason = facts["unavailable"].get("nan_count")
        if facts["shape"] is not None and reason is not None:
            yield f"The {name} were not looked at for NaN and Inf: {reason}."
