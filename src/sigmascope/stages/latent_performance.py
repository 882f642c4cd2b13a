"""What an encoding or decoding took: the strategies that were tried, time and rates, and memory.

Memory before and after is read from snapshots, or from the dicts that callers hold.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from sigmascope.records.latents import (
    STRATEGIES,
    Direction,
    EncodingRecord,
    SampleFacts,
    Strategy,
    StrategyAttempt,
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
    change,
    mib,
)
from sigmascope.records.run import Stage
from sigmascope.stages.baseline import (
    NO_ACCELERATOR,
    NO_BASELINE,
    checked_seconds,
    cleanup_effectiveness,
    device_memory,
    nbytes_in,
    with_reasons,
)
from sigmascope.stages.image_facts import Video
from sigmascope.stages.schema import GpuChanges, MemoryEfficiency, PerformanceAnalysis

_NUMBERED = re.compile(r"strategy\s*([1-4])\b", re.IGNORECASE)
_TYPICAL_WORDS: dict[Strategy, tuple[str, ...]] = {
    "dummy": ("dummy", "emergency"),
    "cpu": ("cpu",),
    "tiled": ("tiled", "tile"),
    "direct": ("direct", "standard", "normal"),
}
COLOURS = 3


class UsedStrategy(NamedTuple):
    """The strategy that gave the latent: what it is called, and which one it is, if that is known."""

    name: str | None
    strategy: Strategy | None

    @property
    def number(self) -> int | None:
        """1 to 4; None for words of the caller's own."""
        return None if self.strategy is None else strategy_number(self.strategy)


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


def attempts_of(
    record: EncodingRecord | None,
    seen: tuple[StrategyAttempt, ...],
    used: UsedStrategy,
    seconds: float | None,
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
    """Attempts as an analysis holds them: in MiB, with number and name."""
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


def performance_analysis(
    elapsed: object,
    strategy: str | None,
    video: Video,
    *,
    colours: int | None = None,
    input_mb: float | None = None,
) -> PerformanceAnalysis:
    """Sizes and rates of an encoding or decoding.

    Data is counted at a byte a colour (16 frames of 512x512 are 12 MB), so that rates compare
    whatever type the pictures were handed over in; `input_mb` has their real size.
    """
    seconds, why_no_time = checked_seconds(elapsed)
    if seconds == 0:
        why_no_time = "it took no measurable time"
    sizes = {"frames": video.length, "height": video.height, "width": video.width}
    missing = ", ".join(name for name, size in sizes.items() if size is None)
    pixels = None if missing else prod(size or 0 for size in sizes.values())
    megabytes = None if pixels is None else pixels * (colours or COLOURS) / MIB

    def by_second(amount: int | float | None) -> tuple[float | None, str]:
        rate = amount / seconds if amount is not None and seconds else None
        return rate, why_no_time or "the size of the video is unknown"

    return with_reasons(
        PerformanceAnalysis,
        {
            "total_pixels": (pixels, f"unknown of the video: {missing}"),
            "total_mb": (megabytes, f"unknown of the video: {missing}"),
            "input_mb": (input_mb, "the pictures were not looked at"),
            "elapsed_time": (seconds, why_no_time),
            "strategy_used": (strategy, "no strategy was named"),
            "pixels_per_second": by_second(pixels),
            "mb_per_second": by_second(megabytes),
            "frames_per_second": by_second(video.length),
        },
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
    if isinstance(measured, Mapping):
        changes = (mib(nbytes_in(measured, "allocated_change")), mib(nbytes_in(measured, "reserved_change")))
        return _changes_dict(changes, "caller", "the caller's measurement lacks it")
    device = None if impact is None else impact.current.device_in_use()
    if impact is None or device is None:
        return _changes_dict((None, None), by, NO_BASELINE if impact is None else NO_ACCELERATOR)
    before, after = impact.baseline.accelerator(device), impact.current.accelerator(device)
    changes = (
        mib(change(before.allocated_bytes, after.allocated_bytes)),
        mib(change(before.reserved_bytes, after.reserved_bytes)),
    )
    return _changes_dict(changes, by, "the device does not tell")


def _changes_dict(changes: tuple[float | None, float | None], by: str, reason: str) -> GpuChanges:
    readings = {"allocated_change_mb": (changes[0], reason), "reserved_change_mb": (changes[1], reason)}
    return with_reasons(GpuChanges, readings, measured_by=by)


def memory_efficiency(impact: MemoryImpact | None, peak: object) -> MemoryEfficiency:
    """How the device's allocator stands after the encoding, and the share of the growth that was given back."""
    device = None if impact is None else impact.current.device_in_use()
    before = after = AcceleratorMemory("")
    if impact is not None and device is not None:
        before, after = impact.baseline.accelerator(device), impact.current.accelerator(device)
    reason = NO_BASELINE if impact is None else "the device does not tell" if device else NO_ACCELERATOR
    return with_reasons(
        MemoryEfficiency,
        {
            "allocated_reserved_ratio": (after.allocated_ratio(), reason),
            "fragmentation": (after.fragmentation(), reason),
            "free_vram_change_mb": (mib(change(before.free_bytes, after.free_bytes)), reason),
            "cleanup_effectiveness": cleanup_effectiveness(peak, impact),
        },
    )
