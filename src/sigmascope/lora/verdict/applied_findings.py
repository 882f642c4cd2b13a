"""What it comes to that modules of a file are, or are not, on a model."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from sigmascope.lora.verdict.applied_verdict import AppliedModule
from sigmascope.records.facts import JsonScalar
from sigmascope.records.finding import Finding

_NAMED: Final = 3


def applied_findings(modules: Sequence[AppliedModule]) -> tuple[Finding, ...]:
    """Findings for the modules of one file, the worst first."""
    return (*_missing(modules), *_idle(modules), *_twice(modules))


def _missing(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    missing = [module for module in modules if not module.is_there]
    if not missing:
        return
    why, _ = Counter(_kind(module.detail or "") for module in missing).most_common(1)[0]
    evidence: dict[str, JsonScalar] = {
        "modules": len(modules),
        "missing": len(missing),
        "first": missing[0].name,
        "detail": missing[0].detail,
    }
    advice = (
        "Judge the file by the model (sigmascope lora inspect FILE --model MODEL): it says why, name by name."
    )
    if len(missing) == len(modules):
        message = (
            f"None of the file's {len(modules)} modules is on the model, although it was to be loaded: {why}."
        )
        yield Finding("lora_not_loaded", "critical", message, evidence, advice)
    else:
        message = (
            f"{len(missing)} of the file's {len(modules)} modules are not on the model: {_named(missing)}."
        )
        yield Finding("lora_partly_loaded", "error", message, evidence, advice)


def _idle(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    idle = [module for module in modules if module.is_there and not module.acts]
    if not idle:
        return
    failed = [module for module in idle if "failed" in module.states]
    reason = idle[0].state_reason or "switched off"
    yield Finding(
        "lora_not_applicable" if failed else "lora_not_acting",
        "error" if failed else "warning",
        f"{len(idle)} of the file's {len(modules)} modules are on the model and change nothing ({reason}): {_named(idle)}.",
        {"modules": len(modules), "idle": len(idle), "failed": len(failed), "reason": reason},
        "Use a LoRA whose shapes fit the model."
        if failed
        else "Set its strength, or make the adapter active.",
    )


def _twice(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    twice = [module for module in modules if module.times > 1]
    if twice:
        yield Finding(
            "lora_applied_twice",
            "warning",
            f"{len(twice)} of the file's {len(modules)} modules are applied more than once: {_named(twice)}.",
            {
                "modules": len(twice),
                "times": max(module.times for module in twice),
                "strength": twice[0].strength,
            },
            "Remove one, unless the doubled strength is meant.",
        )


def _kind(detail: str) -> str:
    """The reason without the weight's name."""
    return "nothing is on the weights that it is for" if detail.startswith("nothing is on") else detail


def _named(modules: Sequence[AppliedModule]) -> str:
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return ", ".join(module.name for module in modules[:_NAMED]) + more
