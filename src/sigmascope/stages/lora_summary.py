"""The summary of a LoRA's application: what the file holds, what is on each model, how much that changes, and what was found.

What is unknown is a dash with its reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.analysis.lora_facts import estimate_in
from sigmascope.lora.file_family import title_of
from sigmascope.stages.summary import (
    BAD,
    GOOD,
    NOTABLE,
    Facts,
    Row,
    Section,
    as_it_is,
    error_rows,
    figure,
    finding_rows,
    mb,
    memory_rows,
    number,
    part,
    peak_rows,
    printable,
    reason_for,
    seconds,
    shown,
    unknown,
)
from sigmascope.stages.weight_changes import NOT_COARSE
from sigmascope.units import counted, rough_percent, with_noise

TITLE = "LORA APPLICATION ANALYSIS SUMMARY"
_SIDES = (("unet", "UNET"), ("clip", "CLIP"))
_BAR, _MOST_BLOCKS, _MOST_FAILED = 16, 24, 3


def lora_sections(analysis: Facts) -> Iterator[Section]:
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
    yield Section("⚠️ ", "FINDINGS", list(finding_rows(analysis.get("findings") or ())))
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
        yield Row("Time", figure(analysis, "elapsed_time", seconds))


def _file(facts: Facts) -> Iterator[Row]:
    if not facts or facts.get("filename") is None:
        return
    yield Row("File", printable(facts["filename"]))
    exists = facts.get("file_exists")
    yield Row("Exists", "✅ yes" if exists else "❌ no", GOOD if exists else BAD)
    if not exists:
        return
    yield Row("Size", figure(facts, "file_size", mb))
    yield Row("Format", printable(facts.get("format") or unknown(reason_for(facts, "format"))))
    yield Row("Modules", figure(facts, "modules", number))
    for name in ("rank", "alpha"):
        others = len(facts.get(f"{name}s") or ()) - 1
        text = figure(facts, name, number)
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
    if not impact:
        return
    yield from memory_rows(analysis)
    for side, name in _SIDES:
        size = part(impact, f"{side}_memory_change").get("model_size_mb")
        if size is not None:
            yield Row(f"{name} weights", mb(size))


def weight_rows(facts: Facts) -> Iterator[Row]:
    """Names, values and strength by block."""
    if not facts or facts.get("total_keys_modified") is None:
        return
    counts = {"keys_added": "Keys added", "keys_removed": "Keys removed", "keys_modified": "Keys in both"}
    before, now = number(facts.get("total_keys_original")), number(facts.get("total_keys_modified"))
    yield Row("Keys", f"{before} → {now}")
    for name, label in counts.items():
        yield Row(label, number(len(facts.get(name) or ())))
    yield from _changed_fact_rows(facts)
    changed = facts.get("keys_value_changed") or {}
    how = ", predicted from the changes" if facts.get("predicted") else ""
    yield Row(
        "Weights with effect",
        f"{number(len(changed))}{how}" if changed else "none",
        "" if changed else NOTABLE,
    )
    if changed:
        yield Row("‖ΔW‖", figure(facts, "delta_norm", number))
        if (estimate := estimate_in(facts)) is not None:
            yield Row("  estimated", estimate, NOTABLE)
        yield Row("‖ΔW‖ / ‖W‖", figure(facts, "relative_change", _share))
    yield from _checked_rows(part(facts, "checked"))
    yield from _arriving_rows(facts)
    drift = facts.get("drift") or {}
    if drift.get("keys"):
        largest = drift.get("largest_relative_change")
        size = "" if largest is None else f", at most {largest:.1e}"
        yield Row("Drift", f"{counted(len(drift['keys']), 'weight')} by rounding{size}: no change")
    yield from _block_rows(facts.get("by_block") or ())


def _checked_rows(checks: Facts) -> Iterator[Row]:
    """How many of the strongest layers really use what the changes say, and which do not."""
    if not checks:
        return
    against = {key: check for key, check in checks.items() if check.get("result") == "contradicted"}
    yield Row("Checked by the weights in use", _checked_in_words(checks), BAD if against else "")
    for key, check in list(against.items())[:_MOST_FAILED]:
        words = f"changed by {number(check.get('used_norm'))}, not by {number(check.get('predicted_norm'))}"
        yield Row(f"  ❌ {printable(key, 80)}", words, BAD)


def _checked_in_words(checks: Mapping[str, Any]) -> str:
    """Such as "7 confirmed, 1 unavailable (the layer has no such weight)"."""
    counts = Counter(str(check.get("result")) for check in checks.values())
    unread = (
        check.get("unavailable") or {} for check in checks.values() if check.get("result") == "unavailable"
    )
    why = next((printable(reason) for reasons in unread for reason in reasons.values()), None)
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + (f" ({why})" if why else "")


def _arriving_rows(facts: Facts) -> Iterator[Row]:
    """What arrived of the changes that were merged into coarsely stored weights."""
    arriving, why = part(facts, "arriving"), reason_for(facts, "arriving")
    if arriving:
        share, noise = figure(arriving, "share", _share), figure(arriving, "noise", _noise)
        weights = counted(int(arriving.get("weights") or 0), "weight")
        stored = printable(arriving.get("stored"))
        yield Row("Arrived", f"{share}, {noise} ({weights} measured, stored as {stored})")
    elif why and why != NOT_COARSE:
        yield Row("Arrived", unknown(why))


def _changed_fact_rows(facts: Facts) -> Iterator[Row]:
    weights = (facts.get("weight_changes") or {}).values()
    for what in ("shape", "dtype", "device"):
        count = sum(bool(weight.get(f"{what}_changed")) for weight in weights)
        if count:
            yield Row(f"{what.capitalize()} changed", number(count), NOTABLE)


def _share(value: int | float) -> str:
    return rough_percent(value, 3)


def _noise(value: int | float) -> str:
    return with_noise(value, f"{_share(value)} of")


def _block_rows(blocks: Any) -> Iterator[Row]:
    measured = [block for block in blocks if block.get("delta_norm")]
    largest = max((_strength(block) for block in measured), default=0.0)
    for block in measured[:_MOST_BLOCKS]:
        bar = "█" * max(1, round(_BAR * _strength(block) / largest)) if largest else ""
        yield Row(
            f"  {printable(block.get('name'), 40)}", f"{figure(block, 'relative_change', _share)} {bar}"
        )
    if len(measured) > _MOST_BLOCKS:
        yield Row("  …", f"{len(measured) - _MOST_BLOCKS} more blocks")


def _strength(block: Facts) -> float:
    return float(block.get("relative_change") or 0.0)


def patch_rows(facts: Facts) -> Iterator[Row]:
    """What is on the model."""
    total = facts.get("total_patched_keys")
    if total is None:
        if facts:
            yield Row("Patched keys", unknown(reason_for(facts, "total_patched_keys")))
        return
    yield Row("Patched keys", number(total))
    if not total:
        return
    yield Row("States", _counts_words(facts.get("states")))
    yield Row("Kinds", _counts_words(facts.get("adapter_types")))
    for name, lora in (facts.get("loras") or {}).items():
        yield Row(printable(name, 60), _lora_words(lora))
    failed = facts.get("failed") or {}
    for key, reason in list(failed.items())[:_MOST_FAILED]:
        yield Row(f"  ❌ {printable(key, 80)}", printable(reason), BAD)
    if len(failed) > _MOST_FAILED:
        yield Row("  …", f"{len(failed) - _MOST_FAILED} more failed", BAD)
    for pair in facts.get("overlaps") or ():
        names = f"{printable(pair.get('a'), 40)} and {printable(pair.get('b'), 40)}"
        chance = f", chance {number(pair.get('chance'))}" if pair.get("chance") is not None else ""
        yield Row(f"Overlap of {names}", f"{figure(pair, 'overall', number)}{chance}")


def _counts_words(counts: object) -> str:
    items = counts.items() if isinstance(counts, Mapping) else ()
    return ", ".join(f"{number(count)} {printable(name, 40)}" for name, count in items) or shown(None)


def _lora_words(lora: Facts) -> str:
    strengths = ", ".join(f"{strength:.4g}" for strength in (lora.get("strengths") or ())[:4])
    parts = [f"{number(lora.get('keys'))} keys", f"strength {strengths or '-'}"]
    ranks = list(lora.get("ranks") or ())
    if ranks:
        parts.append(f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}")
    if lora.get("delta_norm") is not None:
        parts.append(f"‖ΔW‖ {number(lora['delta_norm'])}")
    if lora.get("not_finite"):
        parts.append(f"❌ NaN or Inf in {len(lora['not_finite'])}")
    return ", ".join(parts)
