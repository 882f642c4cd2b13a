"""The summary of a latent encoding or decoding, and the lines that are printed while one goes on.

The summary begins with the latent, rates and memory; strategies, pictures, details, efficiency, validation
and findings follow. What is unknown is a dash with its reason.
"""

from collections.abc import Iterator

from rich.console import Console

from sigmascope import units
from sigmascope.records.latents import (
    Direction,
    EncodingEvent,
    EncodingRecord,
    Strategy,
    StrategyAttempt,
    TileFacts,
    norms_saw,
    strategy_label,
    strategy_number,
    tiles_cost,
)
from sigmascope.records.memory import PeakMemory, mib
from sigmascope.stages.summary import (
    BAD,
    GOOD,
    NO_ACCELERATOR,
    NOTABLE,
    Facts,
    Row,
    Section,
    check_row,
    error_rows,
    figure,
    finding_rows,
    is_number,
    mb,
    number,
    part,
    print_line,
    printable,
    reason_for,
    shape,
    statistics_row,
    unknown,
)

ENCODING_TITLE = "LATENT GENERATION ANALYSIS SUMMARY"
DECODING_TITLE = "LATENT DECODING ANALYSIS SUMMARY"
_MARKS = {"succeeded": "✅", "failed": "❌", "skipped": "⏭️ "}
Line = tuple[str, str]
"""A line and rich's style for it."""
_MB_IN_GB = 1024


def latent_sections(analysis: Facts) -> Iterator[Section]:
    """Every section; an analysis that lacks a part lacks its section."""
    yield Section("", "", list(_overview(analysis)))
    which = "INPUT" if is_decoding(analysis) else "OUTPUT"
    yield Section("📐", f"LATENT {which} ANALYSIS", list(_latent_rows(part(analysis, "latent_analysis"))))
    yield Section("⚡", "PERFORMANCE ANALYSIS", list(_performance(part(analysis, "performance_analysis"))))
    yield Section("💾", "MEMORY IMPACT", list(_memory_rows(analysis)))
    what = "DECODING" if is_decoding(analysis) else "GENERATION"
    yield Section("📊", f"PEAK MEMORY DURING LATENT {what}", list(_peak_rows(analysis)))
    yield from detail_sections(analysis)


def _overview(analysis: Facts) -> Iterator[Row]:
    success = analysis.get("encoding_success") is True
    verb = "Decoding" if is_decoding(analysis) else "Encoding"
    mark, answer, style = ("✅", "YES", GOOD) if success else ("❌", "NO", BAD)
    yield Row(f"{mark} VAE {verb} Success", answer, style)
    if analysis.get("dummy"):
        yield Row("🚨 NOT REAL", f"this is a placeholder, not the result of {verb.lower()}", BAD)
    yield Row("⏱️  Total Execution Time", figure(analysis, "elapsed_time", seconds))
    name = analysis.get("strategy_used")
    used = strategy(printable(name), analysis.get("strategy_number"))
    yield Row("🎯 Strategy Used", used if name else unknown(reason_for(analysis, "strategy_used")))


def _latent_rows(latent: Facts) -> Iterator[Row]:
    if not latent:
        return
    status = str(latent.get("status", ""))
    good = status == "success"
    yield Row(f"{'✅' if good else '❌'} Status", status.upper(), GOOD if good else BAD)
    if latent.get("shape") is None:
        yield Row("❓ Reason", unknown(reason_for(latent, "shape")), BAD)
        return
    unpacked = latent.get("unpacked_shape")
    packed = f", packed; unpacked {shape(unpacked)}" if unpacked else ""
    yield Row("🎯 Latent Type", printable(latent.get("latent_type")))
    yield Row("📐 Shape", f"{shape(latent.get('shape'))}{packed}")
    yield Row("🏷️  Data Type", f"torch.{printable(latent.get('dtype'))}")
    yield Row("📱 Device", printable(latent.get("device")))
    yield Row("💾 Size", figure(latent, "size_mb", size))
    yield Row("🔢 Elements", figure(latent, "num_elements", count))
    for icon, which in (("📏", "Spatial"), ("⏱️ ", "Temporal")):
        name = f"{which.lower()}_compression"
        yield Row(f"{icon} {which} Compression", times(latent, name, f"nominal_{name}"))


def _performance(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    yield Row("📊 Video Dimensions", dimensions({**part(facts, "video_dimensions"), **facts}))
    yield Row("📊 Total Pixels", figure(facts, "total_pixels", count))
    yield Row("📊 Total Data", figure(facts, "total_mb", size))
    yield Row(
        "⚡ Processing Speed",
        figure(facts, "frames_per_second", lambda rate: f"{_short(rate, 1)} frames/second"),
    )
    yield Row(
        "⚡ Data Throughput", figure(facts, "mb_per_second", lambda rate: f"{_short(rate, 1)} MB/second")
    )


def _memory_rows(analysis: Facts) -> Iterator[Row]:
    impact = part(analysis, "memory_impact")
    if not impact:
        yield Row("❓ Memory", unknown(reason_for(analysis, "memory_impact")))
        return
    gpu = part(impact, "gpu")
    if not part(impact, "gpus"):
        yield Row("🎮 GPU", NO_ACCELERATOR)
        yield from ram_rows(impact)
        return
    yield Row("🎮 GPU CHANGES", "")
    for name in ("allocated", "reserved"):
        change = signed_mb(gpu.get(f"{name}_change_mb"), gpu.get(f"{name}_change_pct"))
        yield Row(f"   {name.capitalize()}", change)
    yield Row("   Total VRAM", plain_mb(gpu.get("current_total_mb")))


def _peak_rows(analysis: Facts) -> Iterator[Row]:
    peak = part(analysis, "peak_memory")
    if not peak:
        yield Row("❓ Peaks", unknown(reason_for(analysis, "peak_memory")))
        return
    gpu, ram, process = (part(peak, name) for name in ("gpu", "ram", "process"))
    has_gpu = bool(part(peak, "gpus"))
    yield Row("🖥️  RAM Peak", gb(ram.get("peak_used_mb")))
    if not has_gpu:
        yield Row("🖥️  Process Peak", gb(process.get("peak_rss_mb")))
    for name in ("allocated", "reserved") if has_gpu else ():
        yield Row(f"🎮 GPU {name.capitalize()} Peak", plain_mb(gpu.get(f"peak_{name}_mb")))
    yield Row("⏱️  Peak Timestamps", "")
    for name in ("allocated", "reserved") if has_gpu else ():
        when = at(gpu.get(f"peak_{name}_mb"), gpu.get(f"peak_{name}_at_seconds"))
        yield Row(f"   gpu_{name}", when)
    if not has_gpu:
        yield Row("   ram", at(ram.get("peak_used_mb"), ram.get("peak_used_at_seconds")))
        yield Row("   process", at(process.get("peak_rss_mb"), process.get("peak_rss_at_seconds")))


def is_decoding(analysis: Facts) -> bool:
    """Whether it is the analysis of a decoding."""
    return analysis.get("direction") == "decoding"


def detail_sections(analysis: Facts) -> Iterator[Section]:
    """One after the other; those of which nothing is known have no rows and are left out."""
    attempts = _dicts(analysis, "strategies")
    yield Section("🔁", "STRATEGIES", [row for attempt in attempts for row in _strategy_rows(attempt)])
    yield Section("🖼️ ", "PICTURES", list(_pictures(part(analysis, "pictures"))))
    yield Section("🔬", "LATENT DETAILS", list(_latent_detail_rows(analysis)))
    yield Section("♻️ ", "MEMORY EFFICIENCY", list(_efficiency(analysis)))
    yield Section("🔒", "VALIDATION", list(_validation(part(analysis, "validation"))))
    yield Section("🚨", "FINDINGS", list(finding_rows(_dicts(analysis, "findings"))))
    yield Section("🚨", "ERRORS", list(error_rows(analysis)))


def _dicts(analysis: Facts, name: str) -> list[Facts]:
    items = analysis.get(name)
    return [item for item in items if hasattr(item, "get")] if isinstance(items, list | tuple) else []


def _strategy_rows(attempt: Facts) -> Iterator[Row]:
    outcome = str(attempt.get("outcome", ""))
    mark = _MARKS.get(outcome, "❓")
    took = attempt.get("seconds")
    parts = [
        outcome,
        f"{took:.2f} s" if is_number(took) else "",
        _peak_words(attempt),
        _tile(part(attempt, "tile")),
    ]
    label = f"{mark} {strategy(printable(attempt.get('name')), attempt.get('number'))}"
    yield Row(label, ", ".join(filter(None, parts)), "" if outcome == "succeeded" else NOTABLE)
    if attempt.get("reason"):
        yield Row("   Reason", printable(attempt["reason"]))
    yield from _tile_rows(part(attempt, "tile"))


def _peak_words(attempt: Facts) -> str:
    measured, predicted = attempt.get("measured_peak_mb"), attempt.get("predicted_peak_mb")
    shown = f"peak +{mb(measured)}" if is_number(measured) else ""
    if not is_number(predicted):
        return shown
    basis = attempt.get("prediction_basis")
    expected = f"predicted +{mb(predicted)}" + (f" ({printable(basis)})" if basis else "")
    return f"{shown}, {expected}" if shown else expected


def _tile(tile: Facts) -> str:
    if not tile:
        return ""
    sizes = f"{tile.get('width')}x{tile.get('height')}"
    overlap = f"{tile.get('overlap_width')}x{tile.get('overlap_height')}"
    pieces = tile.get("count")
    return f"{f'{pieces} ' if is_number(pieces) else ''}tiles of {sizes}, overlap {overlap}"


def _tile_rows(tile: Facts) -> Iterator[Row]:
    """What group norms saw, and what the tiles cost as far as their overlaps tell."""
    norms = tile.get("norm_statistics")
    if norms:
        reason = f": {printable(tile['norm_reason'])}" if tile.get("norm_reason") else ""
        yield Row("   Norms", f"saw {norms_saw(norms)}{reason}", "" if norms == "whole" else NOTABLE)
    difference = tile.get("overlap_difference")
    if is_number(difference):
        yield Row("   Tiles", tiles_cost(difference))
    elif tile.get("by") == "vae":
        yield Row(
            "   Tiles", "the VAE tiled by itself, so the difference between tiles was not measured", NOTABLE
        )


def _pictures(pictures: Facts) -> Iterator[Row]:
    if not pictures:
        return
    if pictures.get("shape") is None:
        yield Row("Pictures", unknown(reason_for(pictures, "shape")))
        return
    layout = pictures.get("layout")
    yield Row("Shape", f"{shape(pictures['shape'])}{f' {printable(layout)}' if layout else ''}")
    form, dtype, device = (printable(pictures.get(name)) for name in ("form", "dtype", "device"))
    yield Row("Given as", f"{form}, {dtype} on {device}, {figure(pictures, 'size_mb', size)}")
    low, high = pictures.get("min"), pictures.get("max")
    if is_number(low) and is_number(high):
        yield Row("Values", f"{number(low)} to {number(high)}")


def _latent_detail_rows(analysis: Facts) -> Iterator[Row]:
    latent, rates = part(analysis, "latent_analysis"), part(analysis, "performance_analysis")
    if rates.get("pixels_per_second") is not None:
        yield Row("Pixel Throughput", f"{figure(rates, 'pixels_per_second', count)} pixels/second")
    if latent.get("shape") is None:
        return
    layout, evidence = latent.get("latent_layout"), printable(latent.get("layout_evidence") or "")
    yield Row("Layout", f"{layout} ({evidence})" if layout else unknown(reason_for(latent, "latent_layout")))
    yield statistics_row(latent)


def _efficiency(analysis: Facts) -> Iterator[Row]:
    facts = part(analysis, "efficiency")
    if not facts:
        return
    yield Row("Memory Given Back", figure(facts, "cleanup_effectiveness", _share))
    impact = part(analysis, "memory_impact")
    if not part(impact, "gpus"):
        return
    yield Row("Allocated of Reserved", figure(facts, "allocated_reserved_ratio", _share))
    yield Row("Fragmentation", figure(facts, "fragmentation", _share))
    yield Row("Free VRAM", figure(facts, "free_vram_change_mb", signed_mb))
    yield from _immediate(part(analysis, "immediate_gpu_changes"))
    yield from _short_ram_rows(impact)


def _share(share: int | float) -> str:
    return f"{100 * share:.1f}%"


def _immediate(changes: Facts) -> Iterator[Row]:
    if changes.get("measured_by") == "caller":
        both = (signed_mb(changes.get(f"{name}_change_mb")) for name in ("allocated", "reserved"))
        yield Row("Right After", "allocated {}, reserved {}".format(*both))


def _short_ram_rows(impact: Facts) -> Iterator[Row]:
    ram, process = part(impact, "ram"), part(impact, "process")
    yield Row(
        "RAM Used",
        f"{gb(ram.get('current_used_mb'))}, {signed_mb(ram.get('used_change_mb'))}",
    )
    yield Row("Process", signed_mb(process.get("rss_change_mb"), process.get("rss_change_pct")))


def _validation(validation: Facts) -> Iterator[Row]:
    for name in ("input", "output", "vae"):
        if name in validation:
            yield check_row("VAE" if name == "vae" else name.capitalize(), part(validation, name))


def ram_rows(impact: Facts) -> Iterator[Row]:
    """RAM and the process before and after."""
    ram, process = part(impact, "ram"), part(impact, "process")
    used, available = ram.get("current_used_mb"), ram.get("current_available_mb")
    yield Row("🖥️  RAM Used", f"{gb(used)}, {signed_mb(ram.get('used_change_mb'))}")
    change = signed_mb(ram.get("available_change_mb"))
    yield Row("🖥️  RAM Available", f"{gb(available)}, {change}")
    change = signed_mb(process.get("rss_change_mb"), process.get("rss_change_pct"))
    yield Row("🖥️  Process", f"{gb(process.get('current_rss_mb'))}, {change}")


def print_lines(lines: Iterator[Line], console: Console | None = None) -> None:
    """Print lines with their styles, to standard output by default."""
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
    used, available = gb(ram.get("used_mb")), gb(ram.get("available_mb"))
    yield f"   Baseline RAM: {used} used, {available} available", ""
    if part(memory, "gpus"):
        figures = (plain_mb(gpu.get(f"{name}_mb"), 0) for name in ("allocated", "reserved"))
        yield "   Baseline GPU: {} allocated, {} reserved".format(*figures), ""
    else:
        yield f"   Baseline GPU: {NO_ACCELERATOR}", ""
    pictures = part(baseline, "pictures")
    if pictures.get("length") is not None:
        channels = pictures.get("channels")
        colours = f", {channels} channels" if channels is not None else ""
        yield f"   Video Dimensions: {dimensions(pictures)}{colours}", ""


def end_lines(
    step: str,
    seconds: float | None,
    peak: PeakMemory | None,
    error: str | None,
    process: EncodingRecord | None = None,
) -> Iterator[Line]:
    """How a step went, its time, and the highest memory of the accelerator in use."""
    name = printable(step.upper(), 60)
    if process is not None:
        yield from _process_lines(process)
    if error is not None:
        yield f"   ❌ {name} failed: {printable(error, 240)}", BAD
    elif process is None:
        yield f"   ✅ {name} completed", GOOD
    if seconds is not None:
        yield f"   ⏱️  Processing Time: {seconds:.2f} seconds", ""
    if peak is not None:
        yield from _peak_lines(peak)


def event_lines(event: EncodingEvent) -> Iterator[Line]:
    """The lines of one event; none for those that say nothing new."""
    if event.kind == "began":
        yield "", ""
        yield f"🔧 VAE {event.direction.upper()} PROCESS:", "bold"
    if event.kind == "attempt_began" and event.strategy is not None:
        yield f"   🎯 {_titled(event.strategy, event.direction)}{_in_tiles(event.tile)}", ""
    if event.kind == "attempt_ended" and event.attempt is not None:
        yield from _not_succeeded(event.attempt, event.direction)
    if event.kind == "ended" and event.record is not None:
        yield from _ended(event.record)


def _process_lines(record: EncodingRecord) -> Iterator[Line]:
    """All that its events would have told, but time and memory, which are the step's."""
    direction = record.direction
    yield from event_lines(EncodingEvent("began", direction))
    for attempt in record.attempts:
        if attempt.outcome != "skipped":
            yield from event_lines(
                EncodingEvent("attempt_began", direction, strategy=attempt.name, tile=attempt.tile)
            )
        yield from event_lines(EncodingEvent("attempt_ended", direction, attempt=attempt))
    yield from _outcome(record)


def _titled(strategy: Strategy, direction: Direction) -> str:
    return f"Strategy {strategy_number(strategy)}: {_lowered(strategy, direction)}"


def _lowered(strategy: Strategy, direction: Direction) -> str:
    """The strategy's name with the last word in small letters."""
    words_before, last = strategy_label(strategy, direction).rsplit(" ", 1)
    return f"{words_before} {last.lower()}"


def _in_tiles(tile: TileFacts | None) -> str:
    """The size of an attempt's tiles, width first, which tells apart attempts of one strategy."""
    return "" if tile is None else f", tiles of {tile.width}×{tile.height}"


def _not_succeeded(attempt: StrategyAttempt, direction: Direction) -> Iterator[Line]:
    reason = printable(attempt.reason or "for an unknown reason", 240)
    if attempt.outcome == "skipped":
        yield f"   ⏭️  {_titled(attempt.name, direction)}{_in_tiles(attempt.tile)} skipped: {reason}", NOTABLE
    if attempt.outcome == "failed":
        after = f" after {attempt.seconds:.2f} seconds" if attempt.seconds is not None else ""
        yield (
            f"   ❌ {_lowered(attempt.name, direction)}{_in_tiles(attempt.tile)} failed{after}: {reason}",
            BAD,
        )


def _outcome(record: EncodingRecord) -> Iterator[Line]:
    direction = record.direction
    if record.dummy:
        yield f"   🚨 NOT REAL: this is a placeholder, not the result of {direction}", BAD
    elif record.success:
        yield f"   ✅ VAE {direction} completed successfully", GOOD
    else:
        yield f"   ❌ VAE {direction} failed", BAD
    if record.output is not None:
        what = "latent" if direction == "encoding" else "picture"
        yield f"   📐 Generated {what} shape: {shape(record.output.tensor.shape)}", ""
        nan, inf = record.output.tensor.nan_count, record.output.tensor.inf_count
        if nan or inf:
            yield f"   🚨 Not finite: {nan or 0:,} NaN, {inf or 0:,} Inf", BAD


def _ended(record: EncodingRecord) -> Iterator[Line]:
    yield from _outcome(record)
    if record.seconds is not None:
        yield f"   ⏱️  Processing Time: {record.seconds:.2f} seconds", ""
    used = next((attempt for attempt in reversed(record.attempts) if attempt.outcome == "succeeded"), None)
    if used is not None and used.peak is not None:
        yield from _peak_lines(used.peak)


def _peak_lines(peak: PeakMemory) -> Iterator[Line]:
    device = peak.busiest_device()
    if device is not None:
        allocated = mib(peak.accelerator(device).allocated_bytes)
        yield f"   💾 Peak GPU Memory: {plain_mb(allocated, 0)} allocated", ""
    elif peak.rss_bytes is not None:
        yield f"   💾 Peak Memory: {plain_mb(mib(peak.rss_bytes), 0)} in this process", ""


def size(amount: int | float) -> str:
    """MiB with two decimals, more digits for what is smaller than 0.1 MB."""
    return mb(amount) if 0 < amount < 0.1 else f"{amount:,.2f} MB"


def plain_mb(amount: object, decimals: int = 1) -> str:
    """MiB without commas between thousands."""
    return f"{amount:.{decimals}f} MB" if is_number(amount) else unknown()


def gb(amount_mb: object) -> str:
    """MiB as GiB with one decimal."""
    return f"{amount_mb / _MB_IN_GB:.1f} GB" if is_number(amount_mb) else unknown()


def seconds(amount: int | float) -> str:
    """Seconds with two decimals; three significant digits below 0.1."""
    return f"{_short(amount, 2)} seconds"


def _short(amount: int | float, decimals: int) -> str:
    return f"{amount:.3g}" if 0 < amount < 0.1 else f"{amount:,.{decimals}f}"


def count(amount: int | float) -> str:
    """A whole number with commas."""
    return f"{amount:,.0f}"


def times(facts: Facts, name: str, nominal: str) -> str:
    """A ratio such as 64.0x, with the VAE's own where that is another."""
    amount, factor = facts.get(name), facts.get(nominal)
    if not is_number(amount):
        return unknown(reason_for(facts, name))
    differs = is_number(factor) and f"{factor:.1f}" != f"{amount:.1f}"
    return f"{amount:.1f}x (nominal {factor:g}x)" if differs else f"{amount:.1f}x"


def signed_mb(amount: object, percent: object = None) -> str:
    """A change in MiB with its percentage."""
    share = f" ({units.signed(percent)}%)" if is_number(percent) else ""
    return f"{units.signed(amount).replace(',', '')} MB{share}" if is_number(amount) else unknown()


def at(amount_mb: object, at_seconds: object) -> str:
    """A peak and when it was."""
    return f"{plain_mb(amount_mb)} at {at_seconds:.2f}s" if is_number(at_seconds) else plain_mb(amount_mb)


def dimensions(video: Facts) -> str:
    """Frames of the whole batch and the size of each, width first, as in 832x480."""
    total, height, width = (video.get(name) for name in ("total_frames", "height", "width"))
    frames = f"{total:,} frame{'' if total == 1 else 's'}" if is_number(total) else "unknown frames"
    picture = f"{width}x{height}" if is_number(width) and is_number(height) else "unknown size"
    return f"{frames}, {picture}"


def strategy(name: object, number: object) -> str:
    """A strategy's name with its number behind it, once."""
    shown = str(name)
    return f"{shown} (Strategy {number})" if is_number(number) and "(Strategy" not in shown else shown
