"""The sections of a text encoding's summary: prompts, conditionings, performance, models, memory, validation."""

from collections.abc import Iterator, Mapping

from sigmascope.stages.summary import (
    BAD,
    NO_ACCELERATOR,
    Facts,
    Row,
    Section,
    error_rows,
    mb,
    mb_change,
    number,
    part,
    peak_rows,
    printable,
    reason_for,
    seconds,
    shape,
    shown,
    unknown,
)

TITLE = "TEXT ENCODING ANALYSIS SUMMARY"
GOOD = "green"


def sections(analysis: Facts) -> Iterator[Section]:
    """Every section of the summary; an analysis that lacks a part lacks its section."""
    yield Section("📋", "BASIC INFORMATION", list(_basics(analysis)))
    prompts = part(analysis, "text_processing")
    for which in ("positive", "negative"):
        yield Section("📝", f"TEXT PROCESSING, {which.upper()}", list(_prompt(part(prompts, which))))
    for which in ("positive", "negative"):
        facts = part(analysis, f"{which}_conditioning")
        yield Section("📐", f"{which.upper()} CONDITIONING", list(_conditioning(facts)))
    yield Section("⚡", "PERFORMANCE", list(_performance(analysis)))
    yield Section("🔧", "MODEL STATE", list(_models(part(analysis, "model_state"))))
    yield Section("💾", "MEMORY IMPACT", list(_memory(analysis)))
    yield Section("📊", "PEAK MEMORY", list(peak_rows(analysis)))
    yield Section("🔒", "VALIDATION", list(_validation(part(analysis, "validation"))))
    yield Section("🚨", "ERRORS", list(error_rows(analysis)))


def _basics(analysis: Facts) -> Iterator[Row]:
    success = analysis.get("encoding_success")
    yield Row("Text encoding success", "YES" if success else "NO", GOOD if success else BAD)
    yield Row(
        "Total execution time", seconds(analysis.get("elapsed_time"), reason_for(analysis, "elapsed_time"))
    )


def _prompt(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    if facts.get("character_length") is None:
        yield Row("Prompt", unknown(reason_for(facts, "character_length")))
        return
    text = facts.get("text_content")
    sha256 = facts.get("text_sha256")
    if text is not None:
        yield Row("Text", f"“{printable(text, 240)}”")
    else:
        hidden = f"kept as SHA-256 {sha256}" if sha256 else unknown(reason_for(facts, "text_content"))
        yield Row("Text", hidden)
    yield Row("Characters", number(facts["character_length"]))
    yield Row("Words", number(facts.get("word_count")))
    yield Row("Special characters", number(facts.get("special_characters")))
    yield Row("Tokens", number(facts.get("token_count"), reason_for(facts, "token_count")))
    cut = facts.get("truncated_tokens")
    if cut:
        words = facts.get("truncated_words")
        named = f": {printable(' '.join(words), 160)}" if words else ""
        yield Row("Cut off", f"{number(cut)} tokens{named}", BAD)
    elif cut == 0:
        yield Row("Cut off", "nothing")
    weights = [
        f"{printable(w['text'] or '…', 40)} × {w['weight']:.4g}" for w in facts.get("prompt_weights") or ()
    ]
    if weights:
        yield Row("Weights", shown(weights))


def _conditioning(facts: Facts) -> Iterator[Row]:
    if not facts:
        return
    success = facts.get("status") == "success"
    yield Row("Status", str(facts.get("status", "")).upper(), GOOD if success else "")
    if not success:
        yield Row("Reason", unknown(reason_for(facts, "shape")))
        return
    yield Row("Shape", shape(facts.get("shape")))
    yield Row("Data type", printable(facts.get("dtype")))
    yield Row("Device", printable(facts.get("device")))
    yield Row("Size", mb(facts.get("size_mb")))
    yield Row("Elements", number(facts.get("num_elements")))
    yield Row("CLIP variant", printable(facts.get("clip_variant")))
    encoder = part(facts, "encoder")
    yield Row("Encoder", f"{printable(facts.get('encoder_family'))} ({printable(encoder.get('reason', ''))})")
    pooled = part(facts, "pooled")
    if pooled:
        yield Row("Pooled", f"{shape(pooled.get('shape'))} {printable(pooled.get('dtype'))}")
    entries = facts.get("entries") or ()
    if len(entries) > 1:
        yield Row("Entries", f"{len(entries)}, {mb(facts.get('total_size_mb'))} in all")
    if facts.get("metadata"):
        pairs = (f"{printable(k, 40)} {shown(v)}" for k, v in facts["metadata"].items())
        yield Row("Metadata", printable(", ".join(pairs)))
    yield from _statistics(facts)
    if facts.get("tensor_dump"):
        yield Row("Saved as", printable(facts["tensor_dump"]))


def _statistics(facts: Facts) -> Iterator[Row]:
    numbers = part(facts, "statistics")
    if numbers.get("mean") is None:
        yield Row("Statistics", unknown(reason_for(facts, "mean")))
    else:
        values = ", ".join(f"{name} {number(numbers.get(name))}" for name in ("min", "max", "mean", "std"))
        yield Row("Statistics", values)
    broken = {name: numbers.get(key) for name, key in (("NaN", "nan_count"), ("Inf", "inf_count"))}
    if any(broken.values()):
        yield Row("Not finite", ", ".join(f"{count} {name}" for name, count in broken.items()), BAD)


def _performance(analysis: Facts) -> Iterator[Row]:
    times, rates = part(analysis, "performance"), part(analysis, "efficiency")
    labels = {
        "positive_encoding_time": "Positive prompt",
        "negative_encoding_time": "Negative prompt",
        "time_per_character": "By character",
        "time_per_token": "By token",
    }
    for name, label in labels.items() if times else ():
        yield Row(label, seconds(times.get(name), reason_for(times, name)))
    if not rates:
        return
    yield Row(
        "Characters per second",
        number(rates.get("characters_per_second"), reason_for(rates, "characters_per_second")),
    )
    memory = rates.get("memory_per_character_mb")
    yield Row("Memory per character", mb(memory, reason_for(rates, "memory_per_character_mb")))
    busy = rates.get("gpu_utilization")
    yield Row(
        "GPU utilization", unknown(reason_for(rates, "gpu_utilization")) if busy is None else f"{busy:.0f} %"
    )
    cleanup = rates.get("cleanup_effectiveness")
    reason = reason_for(rates, "cleanup_effectiveness")
    yield Row(
        "Memory given back", unknown(reason) if cleanup is None else f"{100 * cleanup:.0f} % of the growth"
    )


def _models(states: Facts) -> Iterator[Row]:
    for name, state in states.items():
        if not isinstance(state, Mapping):
            continue
        if state.get("class_type") is None:
            yield Row(name.upper(), unknown(reason_for(state, "class_type")))
            continue
        patches = state.get("patches_count")
        parts = [printable(state["class_type"]), f"on {printable(state.get('device'))}"]
        if patches is not None:
            parts.append(f"{patches} patches")
        changed = state.get("changed")
        parts.append(f"changed: {', '.join(changed)}" if changed else "unchanged" if changed == [] else "")
        yield Row(name.upper(), ", ".join(filter(None, parts)), BAD if changed else "")


def _memory(analysis: Facts) -> Iterator[Row]:
    impact = part(analysis, "memory_impact")
    if not impact:
        yield Row("Memory", unknown(reason_for(analysis, "memory_impact")))
        return
    ram, process, gpus = part(impact, "ram"), part(impact, "process"), part(impact, "gpus")
    before, after = mb(ram.get("baseline_used_mb")), mb(ram.get("current_used_mb"))
    yield Row("RAM used", f"{before} → {after}, {mb_change(ram.get('used_change_mb'))}")
    available = mb(ram.get("current_available_mb"))
    yield Row("RAM available", f"{available}, {mb_change(ram.get('available_change_mb'))}")
    change = mb_change(process.get("rss_change_mb"), process.get("rss_change_pct"))
    yield Row("Process", f"{mb(process.get('current_rss_mb'))}, {change}")
    if not gpus:
        yield Row("GPU", NO_ACCELERATOR)
    for device, gpu in gpus.items():
        for what in ("allocated", "reserved"):
            change = mb_change(gpu.get(f"{what}_change_mb"), gpu.get(f"{what}_change_pct"))
            yield Row(f"{printable(device)} {what}", f"{mb(gpu.get(f'current_{what}_mb'))}, {change}")


def _validation(validation: Facts) -> Iterator[Row]:
    checks = {name: validation[name] for name in ("input", "output", "performance") if name in validation}
    checks |= part(validation, "compatibility")
    for name, check in checks.items():
        passed = check.get("passed")
        state, style = {True: ("passed", GOOD), False: ("FAILED", BAD)}.get(passed, ("not checked", ""))
        yield Row(name.replace("_", " ").capitalize(), state, style)
        for message in check.get("messages", ()):
            yield Row("  ✗", printable(message), BAD)
    for note in validation.get("notes", ()):
        yield Row("Note", printable(note))
