"""The rows of a summary that tell of one model's weights and of the changes on them."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.stages.figures import number, printable, reason_for, unknown
from sigmascope.stages.shared_rows import Facts
from sigmascope.stages.summary import Row, shown

_BAR, _MOST_BLOCKS, _MOST_FAILED = 16, 24, 3


def weight_rows(facts: Facts) -> Iterator[Row]:
    """Names, values and strength by block."""
    if not facts or facts.get("total_keys_modified") is None:
        return
    counts = {"keys_added": "Keys added", "keys_removed": "Keys removed", "keys_modified": "Keys in both"}
    before, now = number(facts.get("total_keys_original")), number(facts.get("total_keys_modified"))
    yield Row("Keys", f"{before} → {now}")
    for name, label in counts.items():
        yield Row(label, number(len(facts.get(name) or ())))
    yield from _facts_changed(facts)
    changed = facts.get("keys_value_changed") or {}
    how = ", predicted from the changes" if facts.get("predicted") else ""
    yield Row(
        "Weights with effect",
        f"{number(len(changed))}{how}" if changed else "none",
        "" if changed else "yellow",
    )
    if changed:
        yield Row("‖ΔW‖", number(facts.get("delta_norm"), reason_for(facts, "delta_norm")))
        yield Row("‖ΔW‖ / ‖W‖", _share(facts.get("relative_change"), reason_for(facts, "relative_change")))
    drift = facts.get("drift") or {}
    if drift.get("keys"):
        largest = drift.get("largest_relative_change")
        size = "" if largest is None else f", at most {largest:.1e}"
        yield Row("Drift", f"{number(len(drift['keys']))} weights by rounding{size}: no change")
    yield from _blocks(facts.get("by_block") or ())


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
    yield Row("States", _counts(facts.get("states")))
    yield Row("Kinds", _counts(facts.get("adapter_types")))
    for name, lora in (facts.get("loras") or {}).items():
        yield Row(printable(name, 60), _lora(lora))
    failed = facts.get("failed") or {}
    for key, reason in list(failed.items())[:_MOST_FAILED]:
        yield Row(f"  ❌ {printable(key, 80)}", printable(reason), "red")
    if len(failed) > _MOST_FAILED:
        yield Row("  …", f"{len(failed) - _MOST_FAILED} more failed", "red")
    for pair in facts.get("overlaps") or ():
        names = f"{printable(pair.get('a'), 40)} and {printable(pair.get('b'), 40)}"
        chance = f", chance {number(pair.get('chance'))}" if pair.get("chance") is not None else ""
        yield Row(
            f"Overlap of {names}", f"{number(pair.get('overall'), reason_for(pair, 'overall'))}{chance}"
        )


def _facts_changed(facts: Facts) -> Iterator[Row]:
    weights = (facts.get("weight_changes") or {}).values()
    for what in ("shape", "dtype", "device"):
        count = sum(bool(weight.get(f"{what}_changed")) for weight in weights)
        if count:
            yield Row(f"{what.capitalize()} changed", number(count), "yellow")


def _lora(lora: Facts) -> str:
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


def _blocks(blocks: Any) -> Iterator[Row]:
    measured = [block for block in blocks if block.get("delta_norm")]
    largest = max((_strength(block) for block in measured), default=0.0)
    for block in measured[:_MOST_BLOCKS]:
        bar = "█" * max(1, round(_BAR * _strength(block) / largest)) if largest else ""
        yield Row(f"  {printable(block.get('name'), 40)}", f"{_share(block.get('relative_change'))} {bar}")
    if len(measured) > _MOST_BLOCKS:
        yield Row("  …", f"{len(measured) - _MOST_BLOCKS} more blocks")


def _strength(block: Facts) -> float:
    return float(block.get("relative_change") or 0.0)


def _share(value: object, reason: str | None = None) -> str:
    if not isinstance(value, int | float):
        return unknown(reason)
    return f"{100 * value:.3g} %"


def _counts(counts: object) -> str:
    found = counts if isinstance(counts, Mapping) else {}
    return ", ".join(f"{number(count)} {printable(name, 40)}" for name, count in found.items()) or shown(None)
