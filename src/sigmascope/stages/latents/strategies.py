"""Which of the four strategies gave the latent, and what became of each."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sigmascope.records.latents import (
    STRATEGIES,
    Direction,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    strategy_label,
    strategy_number,
)
from sigmascope.records.latents_plain import as_plain

_NUMBERED = re.compile(r"strategy\s*([1-4])\b", re.IGNORECASE)
_WORDS: dict[Strategy, tuple[str, ...]] = {
    "dummy": ("dummy", "emergency"),
    "cpu": ("cpu",),
    "tiled": ("tiled", "tile"),
    "direct": ("direct", "standard", "normal"),
}


class Used(NamedTuple):
    """The strategy that gave the latent: what it is called, and which one it is, if that is known."""

    name: str | None
    strategy: Strategy | None

    @property
    def number(self) -> int | None:
        """1 to 4; None for words of the caller's own."""
        return None if self.strategy is None else strategy_number(self.strategy)


def used_strategy(
    told: object,
    record: EncodingRecord | None,
    direction: Direction,
    attempts: Sequence[StrategyAttempt] = (),
) -> Used:
    """The strategy by the caller's words, else by the record, else by what was seen to succeed.

    Args:
        told: "Direct VAE Encoding", with or without "(Strategy 1)"; "direct"; 1; words of the caller's own.
        record: What `encode_latents` gave.
        direction: Whether it encoded or decoded.
        attempts: Those that a monitor saw.
    """
    if told is None and record is not None:
        return Used(record.strategy_label, record.strategy)
    if told is None:
        seen = next((one.name for one in reversed(attempts) if one.outcome == "succeeded"), None)
        return Used(None if seen is None else strategy_label(seen, direction), seen)
    if isinstance(told, int) and not isinstance(told, bool) and 1 <= told <= len(STRATEGIES):
        strategy = STRATEGIES[told - 1]
        return Used(strategy_label(strategy, direction), strategy)
    if not isinstance(told, str) or not told.strip():
        return Used(None, None)
    known = strategy_of(told)
    return Used(strategy_label(known, direction) if told in STRATEGIES and known else told, known)


def strategy_of(words: str) -> Strategy | None:
    """The strategy that words name: by number, else by the word that is typical of it."""
    numbered = _NUMBERED.search(words)
    if numbered is not None:
        return STRATEGIES[int(numbered[1]) - 1]
    lowered = re.findall(r"[a-z]+", words.lower())
    return next((strategy for strategy, typical in _WORDS.items() if set(typical) & set(lowered)), None)


def attempts_of(
    record: EncodingRecord | None, seen: tuple[StrategyAttempt, ...], used: Used, seconds: float | None
) -> tuple[StrategyAttempt, ...]:
    """What is known of each attempt: the record's, else those that a monitor saw, else the one that was named."""
    if record is not None:
        return record.attempts
    if seen or used.strategy is None:
        return seen
    reasons = {
        "measured_peak_bytes": "it was not watched apart",
        "predicted_peak_bytes": "nothing was predicted",
    }
    return (StrategyAttempt(used.strategy, "succeeded", seconds, unavailable=reasons),)


def strategy_dicts(attempts: tuple[StrategyAttempt, ...], direction: Direction) -> list[dict[str, Any]]:
    """Attempts as an analysis holds them: in MiB, with number and the seed's name."""
    plain = as_plain(EncodingRecord(attempts=attempts))["attempts"]
    return [
        {
            **shown,
            "number": strategy_number(attempt.name),
            "strategy": attempt.name,
            "name": strategy_label(attempt.name, direction),
            "peak": None if attempt.peak is None else attempt.peak.as_dict(),
            "unavailable": {_in_mb(name): reason for name, reason in attempt.unavailable.items()},
        }
        for attempt, shown in zip(attempts, plain, strict=True)
    ]


def _in_mb(name: str) -> str:
    """What a figure in bytes is called in an analysis."""
    return name.removesuffix("_bytes") + "_mb" if name.endswith("_bytes") else name
