"""What the record of an encoding or decoding shows: a stand-in, a fallback, a failure, a wrong prediction."""

from collections.abc import Iterable, Iterator, Sequence

from sigmascope.records.arithmetic import mib
from sigmascope.records.finding import Finding
from sigmascope.records.latents import (
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    strategy_label,
    strategy_number,
)

VAE_STAGES: dict[Direction, str] = {"encoding": "latent_encoding", "decoding": "latent_decoding"}
"""The stage of a workflow that each direction belongs to."""

_STAND_IN: dict[Direction, str] = {
    "encoding": "The latents are not an encoding: they only stand in for one, in shape, type and device.",
    "decoding": "The pictures are not a decoding: they only stand in for one, in shape, type and device.",
}
_OFF_BY = 2.0
_WORTH_TELLING_MB = 512.0
"""Below this, what a library loads when it is first used is as much."""


def findings_of_attempts(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction, *, dummy: bool
) -> tuple[Finding, ...]:
    """Findings from what was tried.

    Args:
        attempts: In the order in which they were made.
        strategy: The one that gave the output.
        direction: Whether it encoded or decoded.
        dummy: Whether the output is a stand-in.
    """
    found = [*_stand_in(strategy, direction, dummy=dummy), *_failed(attempts, strategy, direction)]
    if not dummy:
        found += _fallback(attempts, strategy, direction)
    return (*found, *(finding for one in attempts for finding in _mispredicted(one, direction)))


def findings_of_record(record: EncodingRecord) -> tuple[Finding, ...]:
    """All that a record shows, and what the engine found itself."""
    found = findings_of_attempts(record.attempts, record.strategy, record.direction, dummy=record.dummy)
    return (*found, *without_known(record.findings, found))


def without_known(findings: Iterable[Finding], known: Iterable[Finding]) -> list[Finding]:
    """Those whose id is not among the known ones; hyphens in ids are underscores."""
    ids = {finding.id.replace("-", "_") for finding in known}
    return [finding for finding in findings if finding.id.replace("-", "_") not in ids]


def _stand_in(strategy: Strategy | None, direction: Direction, *, dummy: bool) -> Iterator[Finding]:
    if dummy or strategy == "dummy":
        yield Finding(
            "dummy_latents",
            "critical",
            _STAND_IN[direction],
            {"strategy": strategy_label("dummy", direction)},
            "Do not use what is made from it. Free memory, choose smaller tiles or fewer frames, and run it again.",
            VAE_STAGES[direction],
        )


def _failed(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction
) -> Iterator[Finding]:
    failed = [one for one in attempts if one.outcome == "failed"]
    if strategy is not None or not failed:
        return
    reasons = "; ".join(f"{strategy_label(one.name, direction)}: {one.reason or 'unknown'}" for one in failed)
    yield Finding(
        "vae_failed",
        "error",
        f"No strategy got through the {direction}. {reasons}",
        _evidence(failed),
        "Choose smaller tiles, fewer frames at a time or a smaller picture.",
        VAE_STAGES[direction],
    )


def _fallback(
    attempts: Sequence[StrategyAttempt], strategy: Strategy | None, direction: Direction
) -> Iterator[Finding]:
    """A strategy that gave way to another without the user's choice: what users ask to be told."""
    before = [one for one in attempts if one.outcome != "succeeded"]
    if strategy is None or not before:
        return
    names = " and ".join(f"{strategy_label(one.name, direction)} {_what_happened(one)}" for one in before)
    lost = sum(one.seconds or 0.0 for one in before)
    yield Finding(
        "vae_fallback",
        "warning",
        f"{names}: the output is that of {strategy_label(strategy, direction)}.",
        {"strategy_number": strategy_number(strategy), "seconds_lost": lost, **_evidence(before)},
        f"Begin with {strategy!r} to spare the failed attempts." if lost else None,
        VAE_STAGES[direction],
    )


def _what_happened(attempt: StrategyAttempt) -> str:
    if attempt.outcome == "skipped":
        return "was skipped"
    told = f"{attempt.error_type} {attempt.reason}".lower()
    return "ran out of memory" if "memory" in told else "failed"


def _evidence(attempts: Sequence[StrategyAttempt]) -> dict[str, str | float | None]:
    reasons = {f"{one.name}_reason": one.reason for one in attempts}
    peaks = {f"{one.name}_measured_peak_mb": mib(one.measured_peak_bytes) for one in attempts}
    return {**reasons, **peaks}


def _mispredicted(attempt: StrategyAttempt, direction: Direction) -> Iterator[Finding]:
    predicted, measured = mib(attempt.predicted_peak_bytes), mib(attempt.measured_peak_bytes)
    if attempt.outcome != "succeeded" or not predicted or not measured:
        return
    factor = measured / predicted
    if max(factor, 1 / factor) < _OFF_BY or abs(measured - predicted) < _WORTH_TELLING_MB:
        return
    yield Finding(
        "vae_peak_mispredicted",
        "info",
        f"{strategy_label(attempt.name, direction)} took {measured:,.0f} MB at its peak, predicted were "
        f"{predicted:,.0f} MB.",
        {"predicted_mb": predicted, "measured_mb": measured, "factor": factor},
        "Predictions learn from runs that are kept.",
        VAE_STAGES[direction],
    )
