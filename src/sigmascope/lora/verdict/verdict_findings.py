"""What a verdict comes to: findings, with numbers and with what to do."""

from collections.abc import Iterator, Sequence
from typing import Final

from sigmascope.errors import SigmascopeError
from sigmascope.lora.verdict.file_family import title_of
from sigmascope.lora.verdict.loader_findings import loader_findings
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.lora.verdict.module_verdict import ModuleVerdict, Reason
from sigmascope.records.finding import Finding, Severity

_NAMED: Final = 3
_ORDER: Final = ("critical", "error", "warning", "info")
_SEVERITIES: Final[dict[Reason, Severity]] = {"text_encoder_missing": "warning", "part_missing": "warning"}
REASON_WORDS: Final[dict[Reason, str]] = {
    "other_architecture": "are for another architecture",
    "other_shape": "are for weights of another shape",
    "transposed": "have their factors the wrong way round",
    "text_encoder_missing": "are for a text encoder that the model given does not have",
    "part_missing": "are for a part that the model given does not have",
    "prefix": "have an unknown prefix before a name that the model has",
    "block_missing": "are for blocks that the model does not have",
    "twice": "are for layers that another module of the file is for already",
    "unknown": "have names that the model does not have",
}
REASON_ADVICE: Final[dict[Reason, str]] = {
    "other_architecture": "Use the LoRA with the family of models that it was made for.",
    "other_shape": "Use the LoRA with the model that it was made for: this one has other widths.",
    "transposed": "Make the file again, with up (out, rank) and down (rank, in).",
    "text_encoder_missing": "Give the text encoder too, or take it that the LoRA acts on the denoiser alone.",
    "part_missing": "Give that part of the model too.",
    "prefix": "Rename the keys without the prefix, or load with that prefix where the loader takes one.",
    "block_missing": "Use the LoRA with the model that it was made for: this one has fewer or other blocks.",
    "twice": "Remove one of the two: a loader may apply both.",
    "unknown": "Compare the names with the nearest ones of the model, and convert the file if a naming differs.",
}


def unreadable(error: Exception) -> Finding:
    """The finding for a file, or a model, that cannot be read."""
    message = error.message if isinstance(error, SigmascopeError) else str(error)
    hint = error.hint if isinstance(error, SigmascopeError) else None
    return Finding("lora_unreadable", "critical", message, {"error": type(error).__name__}, hint)


def findings_of(verdict: LoraVerdict, keys: Sequence[str]) -> tuple[Finding, ...]:
    """What is wrong with a LoRA on a model, the worst first.

    Args:
        verdict: With its modules.
        keys: Of the file.
    """
    found = [
        *_nothing(verdict),
        *_by_reason(verdict),
        *_not_finite(verdict),
        *_unused(verdict),
        *loader_findings(verdict, keys),
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def _nothing(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.modules and not verdict.matched:
        reason = max(verdict.reasons, key=lambda reason: verdict.reasons[reason])
        yield Finding(
            "lora_matches_nothing",
            "critical",
            f"None of the {len(verdict.modules)} modules changes a weight of the model: most {REASON_WORDS[reason]}.",
            {
                "modules": len(verdict.modules),
                "matched": 0,
                "file_family": verdict.file_family,
                "model_family": verdict.model_family,
            },
            REASON_ADVICE[reason],
        )


def _by_reason(verdict: LoraVerdict) -> Iterator[Finding]:
    for reason, count in verdict.reasons.items():
        modules = [module for module in verdict.unmatched if module.reason == reason]
        yield Finding(
            f"lora_{reason}",
            _SEVERITIES.get(reason, "error"),
            f"{count} of {len(verdict.modules)} modules {REASON_WORDS[reason]}{_families(verdict, reason)}: {_named(modules)}.",
            {
                "modules": count,
                "of": len(verdict.modules),
                "first": modules[0].name,
                "detail": modules[0].detail,
                "nearest": ", ".join(modules[0].nearest),
            },
            REASON_ADVICE[reason],
        )


def _families(verdict: LoraVerdict, reason: Reason) -> str:
    if reason != "other_architecture":
        return ""
    own = title_of(verdict.file_family) if verdict.file_family else "a U-Net"
    return f" (the file is for {own} by {verdict.family_evidence}, the model is {title_of(verdict.model_family)})"


def _not_finite(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.not_finite:
        modules = [module for module in verdict.modules if module.finite is False]
        yield Finding(
            "lora_not_finite",
            "error",
            f"{len(modules)} of {len(verdict.modules)} modules hold NaN or Inf: {_named(modules)}.",
            {"modules": len(modules), "first": modules[0].name},
            "Make the file again, in bf16 or float if it was fp16. Applied, it makes images black.",
        )


def _unused(verdict: LoraVerdict) -> Iterator[Finding]:
    if verdict.unused_keys:
        shown = ", ".join(verdict.unused_keys[:_NAMED])
        yield Finding(
            "lora_unused_keys",
            "info",
            f"{len(verdict.unused_keys)} keys of the file belong to no module: {shown}.",
            {"keys": len(verdict.unused_keys), "first": verdict.unused_keys[0]},
        )


def _named(modules: Sequence[ModuleVerdict]) -> str:
    shown = [f"{module.name} ({module.detail})" if module.detail else module.name for module in modules[:1]]
    shown += [module.name for module in modules[1:_NAMED]]
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return ", ".join(shown) + more
