"""What a stage of encoding or decoding shows of the strategies that were tried in it."""

from sigmascope.records.latents import (
    RECORD_FACT,
    STRATEGIES,
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    attempt_stage,
)
from sigmascope.records.latents_plain import encoding_record
from sigmascope.records.run import Stage


def record_in(stage: Stage | None) -> EncodingRecord | None:
    """The record that `encode_latents` or `decode_latents` left last on a stage or one inside it.

    Raises:
        ValueError: What is there is no such record.
    """
    found = (
        [] if stage is None else [one.facts[RECORD_FACT] for one in stage.walk() if RECORD_FACT in one.facts]
    )
    return encoding_record(found[-1]) if found else None


def attempts_in(stage: Stage | None, direction: Direction) -> tuple[StrategyAttempt, ...]:
    """The strategies that were watched apart inside a stage, in order."""
    strategies = {attempt_stage(strategy, direction): strategy for strategy in STRATEGIES}
    inner = [] if stage is None else [one for one in stage.walk() if one.name in strategies]
    return tuple(_attempt(one, strategies[one.name]) for one in inner)


def _attempt(stage: Stage, strategy: Strategy) -> StrategyAttempt:
    details = stage.exception_details
    device = None if stage.peak is None or strategy == "cpu" else stage.peak.busiest_device()
    measured = _growth(stage, device)
    reasons = {"predicted_peak_bytes": "nothing was predicted"}
    if measured is None:
        reasons["measured_peak_bytes"] = "its memory could not be read"
    return StrategyAttempt(
        strategy,
        "succeeded" if stage.success else "failed",
        stage.seconds,
        stage.error,
        None if details is None else details.type,
        device or "cpu",
        stage.peak,
        measured_peak_bytes=measured,
        unavailable=reasons,
    )


def _growth(stage: Stage, device: str | None) -> int | None:
    """Bytes beyond those in use when the stage began: on the device, or of the process where there is none."""
    if stage.peak is None or stage.memory is None:
        return None
    before = stage.memory.baseline
    highest, start = stage.peak.rss_bytes, before.process_rss_bytes
    if device is not None:
        highest = stage.peak.accelerator(device).allocated_bytes
        start = before.accelerator(device).allocated_bytes
    return None if highest is None or start is None else max(0, highest - start)
