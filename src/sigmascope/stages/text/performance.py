"""Times and rates of a text encoding. What needs an unknown, or a division by nothing, is None with the reason."""

from sigmascope.probes import read_nvml
from sigmascope.stages.memory_now import checked_seconds
from sigmascope.stages.text.typed import ConditioningDict, Efficiency, Performance, TextProcessing

_NOT_APART = "the prompts' times were not measured apart"


def performance(
    elapsed: object, positive_seconds: object, negative_seconds: object, prompts: TextProcessing
) -> Performance:
    """Seconds in all, for each prompt, and by character and token of both prompts together."""
    total, why = checked_seconds(elapsed)
    positive, negative = checked_seconds(positive_seconds)[0], checked_seconds(negative_seconds)[0]
    characters, tokens = _sum(prompts, "character_length"), _sum(prompts, "token_count")
    unavailable: dict[str, str] = {}
    if total is None:
        names = ("total_execution_time", "time_per_character", "time_per_token")
        unavailable |= dict.fromkeys(names, why or "unknown")
    if positive is None:
        unavailable["positive_encoding_time"] = _NOT_APART
    if negative is None:
        unavailable["negative_encoding_time"] = _NOT_APART
    per_character, per_token = _ratio(total, characters), _ratio(total, tokens)
    if total is not None and per_character is None:
        unavailable["time_per_character"] = _why_no_rate("characters", characters)
    if total is not None and per_token is None:
        unavailable["time_per_token"] = _why_no_rate("tokens", tokens)
    return {
        "total_execution_time": total,
        "positive_encoding_time": positive,
        "negative_encoding_time": negative,
        "time_per_character": per_character,
        "time_per_token": per_token,
        "unavailable": unavailable,
    }


def efficiency(
    elapsed: object,
    prompts: TextProcessing,
    conditionings: tuple[ConditioningDict, ...],
    cleanup: tuple[float | None, str | None],
) -> Efficiency:
    """Rates, memory by character, how busy the device is now, and the share of memory given back (`cleanup`).

    `gpu_utilization` is NVML's mean over its last sample period (1/6 to 1 s) for the device of the
    conditioning.
    """
    total, why = checked_seconds(elapsed)
    if total == 0:
        total, why = None, "it took no measurable time"
    characters, tokens = _sum(prompts, "character_length"), _sum(prompts, "token_count")
    sizes = [one["total_size_mb"] for one in conditionings if one["total_size_mb"] is not None]
    by_second = None if total is None or characters is None else characters / total
    tokens_by_second = None if total is None or tokens is None else tokens / total
    by_character = _ratio(sum(sizes), characters) if sizes else None
    device = next((one["device"] for one in conditionings if one["device"]), None)
    utilization, why_no_gpu = _gpu_utilization(device)
    values = {
        "characters_per_second": (by_second, why or _why_no_rate("characters", characters)),
        "tokens_per_second": (tokens_by_second, why or _why_no_rate("tokens", tokens)),
        "memory_per_character_mb": (
            by_character,
            _why_no_rate("characters", characters) if sizes else "there is no conditioning",
        ),
        "gpu_utilization": (utilization, why_no_gpu),
        "cleanup_effectiveness": cleanup,
    }
    return {
        "characters_per_second": by_second,
        "tokens_per_second": tokens_by_second,
        "memory_per_character_mb": by_character,
        "gpu_utilization": utilization,
        "cleanup_effectiveness": cleanup[0],
        "unavailable": {
            name: reason or "unknown" for name, (value, reason) in values.items() if value is None
        },
    }


def _gpu_utilization(device: str | None) -> tuple[float | None, str | None]:
    if device is None or not device.startswith("cuda"):
        return None, "the conditioning is on no NVIDIA device"
    facts = read_nvml(device)
    return facts.utilization_percent, facts.unavailable.get("utilization_percent")


def _sum(prompts: TextProcessing, name: str) -> int | None:
    """The figure of both prompts together; of one, where only one was given; None if one is unknown."""
    given = [facts for facts in (prompts["positive"], prompts["negative"]) if _is_given(facts)]
    values = [facts[name] for facts in given]  # type: ignore[literal-required]
    return None if not values or None in values else sum(values)


def _is_given(facts: object) -> bool:
    return isinstance(facts, dict) and facts["character_length"] is not None


def _ratio(amount: float | None, count: int | None) -> float | None:
    return None if amount is None or not count else amount / count


def _why_no_rate(what: str, count: int | None) -> str:
    return f"the number of {what} is unknown" if count is None else f"there are no {what}"
