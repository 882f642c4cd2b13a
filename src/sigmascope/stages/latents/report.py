"""The sections of a latent encoding's or decoding's summary: the seed's own, then what else is known."""

from collections.abc import Iterator

from sigmascope.stages.figures import printable, reason_for, shape, unknown
from sigmascope.stages.latents import words
from sigmascope.stages.latents.details import detail_sections
from sigmascope.stages.shared_rows import NO_ACCELERATOR, Facts, part
from sigmascope.stages.summary import Row, Section

ENCODING_TITLE = "LATENT GENERATION ANALYSIS SUMMARY"
DECODING_TITLE = "LATENT DECODING ANALYSIS SUMMARY"
GOOD, BAD = "green", "red"


def sections(analysis: Facts) -> Iterator[Section]:
    """Every section; an analysis that lacks a part lacks its section."""
    yield Section("", "", list(_overview(analysis)))
    which = "INPUT" if is_decoding(analysis) else "OUTPUT"
    yield Section("📐", f"LATENT {which} ANALYSIS", list(_latent_rows(part(analysis, "latent_analysis"))))
    yield Section("⚡", "PERFORMANCE ANALYSIS", list(_performance(part(analysis, "performance_analysis"))))
    yield Section("💾", "MEMORY IMPACT", list(_memory(analysis)))
    what = "DECODING" if is_decoding(analysis) else "GENERATION"
    yield Section("📊", f"PEAK MEMORY DURING LATENT {what}", list(_peaks(analysis)))
    yield from detail_sections(analysis)


def is_decoding(analysis: Facts) -> bool:
    """Whether it is the analysis of a decoding."""
    return analysis.get("direction") == "decoding"


def _overview(analysis: Facts) -> Iterator[Row]:
    success = analysis.get("encoding_success") is True
    verb = "Decoding" if is_decoding(analysis) else "Encoding"
    mark, answer, style = ("✅", "YES", GOOD) if success else ("❌", "NO", BAD)
    yield Row(f"{mark} VAE {verb} Success", answer, style)
    if analysis.get("dummy"):
        yield Row("🚨 NOT REAL", f"this is no {verb.lower()}, it only has the shape of one", BAD)
    yield Row("⏱️  Total Execution Time", words.seconds(analysis, "elapsed_time"))
    name = analysis.get("strategy_used")
    used = words.strategy(printable(name), analysis.get("strategy_number"))
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
    yield Row("💾 Size", words.size(latent, "size_mb"))
    yield Row("🔢 Elements", words.count(latent, "num_elements"))
    for icon, which in (("📏", "Spatial"), ("⏱️ ", "Temporal")):
        name = f"{which.lower()}_compression"
        yield Row(f"{icon} {which} Compression", words.times(latent, name, f"nominal_{name}"))


def _performance(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    yield Row("📊 Video Dimensions", words.dimensions(part(facts, "video_dimensions")))
    yield Row("📊 Total Pixels", words.count(facts, "total_pixels"))
    yield Row("📊 Total Data", words.size(facts, "total_mb"))
    yield Row("⚡ Processing Speed", words.rate(facts, "frames_per_second", "frames"))
    yield Row("⚡ Data Throughput", words.rate(facts, "mb_per_second", "MB"))


def _memory(analysis: Facts) -> Iterator[Row]:
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
        change = words.signed_mb(gpu.get(f"{name}_change_mb"), gpu.get(f"{name}_change_pct"))
        yield Row(f"   {name.capitalize()}", change)
    yield Row("   Total VRAM", words.plain_mb(gpu.get("current_total_mb")))


def ram_rows(impact: Facts) -> Iterator[Row]:
    """RAM and the process before and after."""
    ram, process = part(impact, "ram"), part(impact, "process")
    used, available = ram.get("current_used_mb"), ram.get("current_available_mb")
    yield Row("🖥️  RAM Used", f"{words.gb(used)}, {words.signed_mb(ram.get('used_change_mb'), None)}")
    change = words.signed_mb(ram.get("available_change_mb"), None)
    yield Row("🖥️  RAM Available", f"{words.gb(available)}, {change}")
    change = words.signed_mb(process.get("rss_change_mb"), process.get("rss_change_pct"))
    yield Row("🖥️  Process", f"{words.gb(process.get('current_rss_mb'))}, {change}")


def _peaks(analysis: Facts) -> Iterator[Row]:
    peak = part(analysis, "peak_memory")
    if not peak:
        yield Row("❓ Peaks", unknown(reason_for(analysis, "peak_memory")))
        return
    gpu, ram, process = (part(peak, name) for name in ("gpu", "ram", "process"))
    has_gpu = bool(part(peak, "gpus"))
    yield Row("🖥️  RAM Peak", words.gb(ram.get("peak_used_mb")))
    if not has_gpu:
        yield Row("🖥️  Process Peak", words.gb(process.get("peak_rss_mb")))
    for name in ("allocated", "reserved") if has_gpu else ():
        yield Row(f"🎮 GPU {name.capitalize()} Peak", words.plain_mb(gpu.get(f"peak_{name}_mb")))
    yield Row("⏱️  Peak Timestamps", "")
    for name in ("allocated", "reserved") if has_gpu else ():
        when = words.at(gpu.get(f"peak_{name}_mb"), gpu.get(f"peak_{name}_at_seconds"))
        yield Row(f"   gpu_{name}", when)
    if not has_gpu:
        yield Row("   ram", words.at(ram.get("peak_used_mb"), ram.get("peak_used_at_seconds")))
        yield Row("   process", words.at(process.get("peak_rss_mb"), process.get("peak_rss_at_seconds")))
