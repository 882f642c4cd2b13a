"""The sections of the summary that the seed does not have: strategies, details, efficiency, findings."""

from collections.abc import Iterator

from sigmascope.stages.figures import mb, number, printable, reason_for, shape, unknown
from sigmascope.stages.latents import words
from sigmascope.stages.latents.words import is_number
from sigmascope.stages.shared_rows import Facts, part
from sigmascope.stages.summary import Row, Section

_STYLES = {"info": "cyan", "warning": "yellow"}
_MARKS = {"succeeded": "✅", "failed": "❌", "skipped": "⏭️ "}


def detail_sections(analysis: Facts) -> Iterator[Section]:
    """One after the other; those of which nothing is known have no rows and are left out."""
    yield Section(
        "🔁", "STRATEGIES", [row for one in _dicts(analysis, "strategies") for row in _strategy(one)]
    )
    yield Section("🖼️ ", "PICTURES", list(_pictures(part(analysis, "pictures"))))
    yield Section("🔬", "LATENT DETAILS", list(_latent_detail_rows(analysis)))
    yield Section("♻️ ", "MEMORY EFFICIENCY", list(_efficiency(analysis)))
    yield Section("🔒", "VALIDATION", list(_validation(part(analysis, "validation"))))
    yield Section("🚨", "FINDINGS", [_finding(finding) for finding in _dicts(analysis, "findings")])
    yield Section("🚨", "ERRORS", list(_errors(analysis)))


def _dicts(analysis: Facts, name: str) -> list[Facts]:
    found = analysis.get(name)
    return [one for one in found if hasattr(one, "get")] if isinstance(found, list | tuple) else []


def _strategy(attempt: Facts) -> Iterator[Row]:
    outcome = str(attempt.get("outcome", ""))
    mark = _MARKS.get(outcome, "❓")
    took = attempt.get("seconds")
    parts = [
        outcome,
        f"{took:.2f} s" if is_number(took) else "",
        _peak_words(attempt),
        _tile(part(attempt, "tile")),
    ]
    label = f"{mark} {words.strategy(printable(attempt.get('name')), attempt.get('number'))}"
    yield Row(label, ", ".join(filter(None, parts)), "" if outcome == "succeeded" else "yellow")
    if attempt.get("reason"):
        yield Row("   Reason", printable(attempt["reason"]))


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


def _pictures(pictures: Facts) -> Iterator[Row]:
    if not pictures:
        return
    if pictures.get("shape") is None:
        yield Row("Pictures", unknown(reason_for(pictures, "shape")))
        return
    layout = pictures.get("layout")
    yield Row("Shape", f"{shape(pictures['shape'])}{f' {printable(layout)}' if layout else ''}")
    form, dtype, device = (printable(pictures.get(name)) for name in ("form", "dtype", "device"))
    yield Row("Given as", f"{form}, {dtype} on {device}, {words.size(pictures, 'size_mb')}")
    low, high = pictures.get("min"), pictures.get("max")
    if is_number(low) and is_number(high):
        yield Row("Values", f"{number(low)} to {number(high)}")


def _latent_detail_rows(analysis: Facts) -> Iterator[Row]:
    latent, rates = part(analysis, "latent_analysis"), part(analysis, "performance_analysis")
    if rates.get("pixels_per_second") is not None:
        yield Row("Pixel Throughput", f"{words.count(rates, 'pixels_per_second')} pixels/second")
    if latent.get("shape") is None:
        return
    layout, evidence = latent.get("latent_layout"), printable(latent.get("layout_evidence") or "")
    yield Row("Layout", f"{layout} ({evidence})" if layout else unknown(reason_for(latent, "latent_layout")))
    numbers = part(latent, "statistics")
    if numbers.get("mean") is None:
        yield Row("Statistics", unknown(reason_for(latent, "mean")))
    else:
        shown = ", ".join(f"{name} {number(numbers.get(name))}" for name in ("min", "max", "mean", "std"))
        yield Row("Statistics", shown)


def _efficiency(analysis: Facts) -> Iterator[Row]:
    facts = part(analysis, "efficiency")
    if not facts:
        return
    yield _share(facts, "cleanup_effectiveness", "Memory Given Back")
    impact = part(analysis, "memory_impact")
    if not part(impact, "gpus"):
        return
    yield _share(facts, "allocated_reserved_ratio", "Allocated of Reserved")
    yield _share(facts, "fragmentation", "Fragmentation")
    free, reason = facts.get("free_vram_change_mb"), reason_for(facts, "free_vram_change_mb")
    yield Row("Free VRAM", words.signed_mb(free, None) if is_number(free) else unknown(reason))
    yield from _immediate(part(analysis, "immediate_gpu_changes"))
    yield from _ram(impact)


def _share(facts: Facts, name: str, label: str) -> Row:
    share = facts.get(name)
    return Row(label, f"{100 * share:.1f}%" if is_number(share) else unknown(reason_for(facts, name)))


def _immediate(changes: Facts) -> Iterator[Row]:
    if changes.get("measured_by") == "caller":
        both = (words.signed_mb(changes.get(f"{name}_change_mb"), None) for name in ("allocated", "reserved"))
        yield Row("Right After", "allocated {}, reserved {}".format(*both))


def _ram(impact: Facts) -> Iterator[Row]:
    ram, process = part(impact, "ram"), part(impact, "process")
    yield Row(
        "RAM Used",
        f"{words.gb(ram.get('current_used_mb'))}, {words.signed_mb(ram.get('used_change_mb'), None)}",
    )
    yield Row("Process", words.signed_mb(process.get("rss_change_mb"), process.get("rss_change_pct")))


def _validation(validation: Facts) -> Iterator[Row]:
    for name in ("input", "output", "vae"):
        if name not in validation:
            continue
        passed = part(validation, name).get("passed")
        state = (
            ("passed", "green")
            if passed is True
            else ("FAILED", "red")
            if passed is False
            else ("not checked", "")
        )
        yield Row("VAE" if name == "vae" else name.capitalize(), *state)


def _finding(finding: Facts) -> Row:
    severity = str(finding.get("severity", ""))
    advice = f" {finding['advice']}" if finding.get("advice") else ""
    style = _STYLES.get(severity, "red")
    return Row(severity.capitalize(), printable(f"{finding.get('message')}{advice}", 600), style)


def _errors(analysis: Facts) -> Iterator[Row]:
    if analysis.get("error"):
        yield Row("Error", printable(analysis["error"]), "red")
    details = part(analysis, "exception_details")
    for line in str(details.get("traceback", "")).splitlines()[-6:]:
        yield Row("  ", printable(line, 160))
