"""The sections of a LoRA application's summary (the seed's section 11)."""

from collections.abc import Iterator

from sigmascope.lora.verdict.file_family import title_of
from sigmascope.stages.figures import mb, mb_change, number, printable, reason_for, seconds, unknown
from sigmascope.stages.lora.report_models import patch_rows, weight_rows
from sigmascope.stages.shared_rows import BAD, NO_ACCELERATOR, Facts, error_rows, part, peak_rows
from sigmascope.stages.summary import Row, Section, as_it_is, shown

TITLE = "LORA APPLICATION ANALYSIS SUMMARY"
GOOD, NOTABLE = "green", "yellow"
_STYLES = {"info": "cyan", "warning": NOTABLE}
_MARKS = {"info": "🔍", "warning": "⚠️ ", "error": "❌", "critical": "❌"}
_SIDES = (("unet", "UNET"), ("clip", "CLIP"))


def sections(analysis: Facts) -> Iterator[Section]:
    """Every section of the summary; an analysis that lacks a part lacks its section, a foreign one is as it is."""
    if "lora_application_success" not in analysis:
        yield from as_it_is(analysis)
        return
    icon = "✅" if analysis.get("success") else "❌"
    yield Section(icon, "LORA APPLICATION", list(_basics(analysis)))
    yield Section("📊", "LORA FILE", list(_file(part(analysis, "lora_file"))))
    yield Section("🔍", "FILE AGAINST MODEL", list(_verdict(analysis)))
    for side, name in _SIDES:
        yield Section("🔧", f"{name} MODEL CHANGES", list(_identity(part(analysis, f"{side}_changes"))))
        yield Section("🔧", f"{name} WEIGHTS", list(weight_rows(part(analysis, f"{side}_weight_changes"))))
        yield Section("🔧", f"{name} LORA PATCHES", list(patch_rows(part(analysis, f"{side}_lora_patches"))))
    yield Section("🔧", "PLACEMENT", list(_placement(part(analysis, "placement_changes"))))
    yield Section("💾", "MEMORY IMPACT", list(_memory(analysis)))
    yield Section("📊", "PEAK MEMORY", list(peak_rows(analysis)) if "peak_memory" in analysis else [])
    yield Section("⚠️ ", "FINDINGS", list(_findings(analysis)))
    yield Section("❌", "ERRORS", list(error_rows(analysis)))


def _basics(analysis: Facts) -> Iterator[Row]:
    success = analysis.get("lora_application_success")
    yield Row("LoRA application success", "✅ YES" if success else "❌ NO", GOOD if success else BAD)
    yield Row("Models returned", number(analysis.get("models_returned")))
    if "effective" in analysis:
        effective = analysis["effective"]
        text, style = {True: ("✅ YES", GOOD), False: ("❌ NO", BAD)}.get(effective, (unknown(), ""))
        yield Row(
            "Anything changed",
            text if effective is not None else unknown(reason_for(analysis, "effective")),
            style,
        )
    if "elapsed_time" in analysis:
        yield Row("Time", seconds(analysis["elapsed_time"], reason_for(analysis, "elapsed_time")))


def _file(facts: Facts) -> Iterator[Row]:
    if not facts or facts.get("filename") is None:
        return
    yield Row("File", printable(facts["filename"]))
    exists = facts.get("file_exists")
    yield Row("Exists", "✅ yes" if exists else "❌ no", GOOD if exists else BAD)
    if not exists:
        return
    yield Row("Size", mb(facts.get("file_size"), reason_for(facts, "file_size")))
    yield Row("Format", printable(facts.get("format") or unknown(reason_for(facts, "format"))))
    yield Row("Modules", number(facts.get("modules"), reason_for(facts, "modules")))
    for name in ("rank", "alpha"):
        others = len(facts.get(f"{name}s") or ()) - 1
        text = number(facts.get(name), reason_for(facts, name))
        yield Row(name.capitalize(), f"{text}, and {others} others" if others > 0 else text)
    hint = facts.get("base_hint")
    yield Row("Base model", printable(hint) if hint else unknown(reason_for(facts, "base_hint")))


def _verdict(analysis: Facts) -> Iterator[Row]:
    verdict = part(analysis, "verdict")
    if not verdict:
        return
    if verdict.get("error"):
        yield Row("Not read", printable(verdict["error"]), BAD)
        return
    matched, total = verdict.get("matched_modules"), verdict.get("total_modules")
    whole = matched == total and bool(total)
    mark = "✅" if whole else "⚠️ " if matched else "❌"
    yield Row("Modules matched", f"{mark} {number(matched)} of {number(total)}", GOOD if whole else BAD)
    on_model = part(analysis, "applied_verdict")
    if on_model.get("total_modules"):
        there, complete = on_model.get("modules_there"), on_model.get("complete")
        text = f"{'✅' if complete else '❌'} {number(there)} of {number(on_model['total_modules'])}"
        yield Row("Modules on the model", text, GOOD if complete else BAD)
    yield Row("Made for", _family(verdict.get("file_family")))
    yield Row("The model is", _family(verdict.get("model_family")))
    for reason, count in part(verdict, "reasons").items():
        yield Row("Unmatched", f"{number(count)}: {printable(reason).replace('_', ' ')}", BAD)
    unmatched = [module for module in verdict.get("modules", ()) if not module.get("matched")]
    for module in unmatched[:5]:
        nearest = ", ".join(printable(name, 80) for name in (module.get("nearest") or ())[:2])
        hint = f" (nearest: {nearest})" if nearest else ""
        yield Row(f"  ✗ {printable(module.get('name'), 80)}", f"{printable(module.get('detail'))}{hint}")
    if len(unmatched) > 5:
        yield Row("  …", f"{len(unmatched) - 5} more")


def _family(family: object) -> str:
    return title_of(family) if isinstance(family, str) else "an unknown family"


def _identity(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    labels = {
        "model_cloned": "Model cloned",
        "class_changed": "Class changed",
        "patches_added": "Patches added",
        "uuid_changed": "UUID changed",
        "original_patch_count": "Patches before",
        "modified_patch_count": "Patches now",
    }
    if all(facts.get(name) is None for name in labels):
        yield Row("Model", unknown(next(iter(part(facts, "unavailable").values()), None)))
        return
    for name, label in labels.items():
        value = facts.get(name)
        yield Row(label, shown(value) if value is not None else unknown(reason_for(facts, name)))


def _placement(both: Facts) -> Iterator[Row]:
    for side, name in _SIDES:
        facts = part(both, side)
        if facts.get("modified_device") is None:
            continue
        before, now = printable(facts.get("original_device") or "-"), printable(facts["modified_device"])
        moved = facts.get("model_device_changed")
        yield Row(name, f"{before} → {now}" if moved else f"{now}, unchanged", NOTABLE if moved else "")
        for kind in ("load", "offload"):
            if facts.get(f"{kind}_device_changed"):
                old, new = facts.get(f"original_{kind}_device"), facts.get(f"modified_{kind}_device")
                yield Row(f"{name} {kind} device", f"{printable(old)} → {printable(new)}", NOTABLE)


def _memory(analysis: Facts) -> Iterator[Row]:
    impact = part(analysis, "memory_impact")
    ram, process, gpus = part(impact, "ram"), part(impact, "process"), part(impact, "gpus")
    if not impact:
        return
    if ram:
        before, after = mb(ram.get("baseline_used_mb")), mb(ram.get("current_used_mb"))
        yield Row("RAM used", f"{before} → {after}, {mb_change(ram.get('used_change_mb'))}")
        before, after = mb(process.get("baseline_rss_mb")), mb(process.get("current_rss_mb"))
        change = mb_change(process.get("rss_change_mb"), process.get("rss_change_pct"))
        yield Row("Process", f"{before} → {after}, {change}")
    else:
        yield Row("Memory", unknown(reason_for(analysis, "memory_impact")))
    if not gpus:
        yield Row("GPU", NO_ACCELERATOR)
    for device, gpu in gpus.items():
        for what in ("allocated", "reserved"):
            change = mb_change(gpu.get(f"{what}_change_mb"), gpu.get(f"{what}_change_pct"))
            before, after = mb(gpu.get(f"baseline_{what}_mb")), mb(gpu.get(f"current_{what}_mb"))
            yield Row(f"{printable(device)} {what}", f"{before} → {after}, {change}")
    for side, name in _SIDES:
        size = part(impact, f"{side}_memory_change").get("model_size_mb")
        if size is not None:
            yield Row(f"{name} weights", mb(size))


def _findings(analysis: Facts) -> Iterator[Row]:
    for finding in analysis.get("findings") or ():
        severity = str(finding.get("severity"))
        advice = f" {finding['advice']}" if finding.get("advice") else ""
        text = printable(f"{finding.get('message')}{advice}", 600)
        yield Row(f"{_MARKS.get(severity, '🔍')} {severity.capitalize()}", text, _STYLES.get(severity, BAD))
