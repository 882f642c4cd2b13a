"""What an encoding or decoding prints while it goes on: the seed's lines in real time."""

from collections.abc import Iterator

from rich.console import Console

from sigmascope.records.arithmetic import mib
from sigmascope.records.latents import (
    Direction,
    EncodingEvent,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    strategy_label,
    strategy_number,
)
from sigmascope.records.peak import PeakMemory
from sigmascope.stages.figures import printable, shape
from sigmascope.stages.latents import words
from sigmascope.stages.shared_rows import NO_ACCELERATOR, Facts, part
from sigmascope.stages.summary import print_line

Line = tuple[str, str]
"""A line and rich's style for it."""


def print_start(baseline: Facts, step: str, console: Console | None) -> None:
    """See `sigmascope.print_latent_generation_start`."""
    _print(start_lines(baseline, step), console)


def print_event(event: EncodingEvent, console: Console | None) -> None:
    """See `sigmascope.print_encoding_event`."""
    _print(event_lines(event), console)


def _print(lines: Iterator[Line], console: Console | None) -> None:
    target = console or Console()
    for text, style in lines:
        if not text:
            target.print()
            continue
        indent = len(text) - len(text.lstrip(" "))
        print_line(target, (text[indent:], style), indent=indent)


def start_lines(baseline: Facts, step: str) -> Iterator[Line]:
    """Memory and the video's dimensions, before anything is encoded."""
    memory = part(baseline, "memory")
    ram, gpu = part(memory, "ram"), part(memory, "gpu")
    yield f"🔍 STARTING MONITORING FOR: {printable(step.upper(), 60)}", "bold"
    used, available = words.gb(ram.get("used_mb")), words.gb(ram.get("available_mb"))
    yield f"   Baseline RAM: {used} used, {available} available", ""
    if part(memory, "gpus"):
        figures = (words.plain_mb(gpu.get(f"{name}_mb"), 0) for name in ("allocated", "reserved"))
        yield "   Baseline GPU: {} allocated, {} reserved".format(*figures), ""
    else:
        yield f"   Baseline GPU: {NO_ACCELERATOR}", ""
    pictures = part(baseline, "pictures")
    if pictures.get("length") is not None:
        channels = pictures.get("channels")
        colours = f", {channels} channels" if channels is not None else ""
        yield f"   Video Dimensions: {words.dimensions(pictures)}{colours}", ""


def event_lines(event: EncodingEvent) -> Iterator[Line]:
    """The lines of one event; none for those that say nothing new."""
    if event.kind == "began":
        yield "", ""
        yield f"🔧 VAE {event.direction.upper()} PROCESS:", "bold"
    if event.kind == "attempt_began" and event.strategy is not None:
        yield f"   🎯 {_titled(event.strategy, event.direction)}", ""
    if event.kind == "attempt_ended" and event.attempt is not None:
        yield from _not_succeeded(event.attempt, event.direction)
    if event.kind == "ended" and event.record is not None:
        yield from _ended(event.record)


def _titled(strategy: Strategy, direction: Direction) -> str:
    return f"Strategy {strategy_number(strategy)}: {_lowered(strategy, direction)}"


def _lowered(strategy: Strategy, direction: Direction) -> str:
    """The strategy's name with the last word in small letters, as the seed's lines have it."""
    words_before, last = strategy_label(strategy, direction).rsplit(" ", 1)
    return f"{words_before} {last.lower()}"


def _not_succeeded(attempt: StrategyAttempt, direction: Direction) -> Iterator[Line]:
    reason = printable(attempt.reason or "for an unknown reason", 240)
    if attempt.outcome == "skipped":
        yield f"   ⏭️  {_titled(attempt.name, direction)} skipped: {reason}", "yellow"
    if attempt.outcome == "failed":
        after = f" after {attempt.seconds:.2f} seconds" if attempt.seconds is not None else ""
        yield f"   ❌ {_lowered(attempt.name, direction)} failed{after}: {reason}", "red"


def _ended(record: EncodingRecord) -> Iterator[Line]:
    direction = record.direction
    if record.dummy:
        yield f"   🚨 NOT REAL: this is no {direction}, it only has the shape of one", "red"
    elif record.success:
        yield f"   ✅ VAE {direction} completed successfully", "green"
    else:
        yield f"   ❌ VAE {direction} failed", "red"
    if record.output is not None:
        what = "latent" if direction == "encoding" else "picture"
        yield f"   📐 Generated {what} shape: {shape(record.output.tensor.shape)}", ""
    if record.seconds is not None:
        yield f"   ⏱️  Processing Time: {record.seconds:.2f} seconds", ""
    used = next((one for one in reversed(record.attempts) if one.outcome == "succeeded"), None)
    if used is not None and used.peak is not None:
        yield from _peak_lines(used.peak)


def _peak_lines(peak: PeakMemory) -> Iterator[Line]:
    device = peak.busiest_device()
    if device is not None:
        allocated = mib(peak.accelerator(device).allocated_bytes)
        yield f"   💾 Peak GPU Memory: {words.plain_mb(allocated, 0)} allocated", ""
    elif peak.rss_bytes is not None:
        yield f"   💾 Peak Memory: {words.plain_mb(mib(peak.rss_bytes), 0)} in this process", ""
