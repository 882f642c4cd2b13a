"""What the rules and the analyses of its stages find in a run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from sigmascope.analysis.diagnostics import (
    diagnose,
    find_model_changes,
    find_stage_findings,
    find_vae_findings,
)
from sigmascope.monitor.guard import Guard
from sigmascope.records.run import Finding, Run

_SAID_BY_ANALYSES: Final[Mapping[str, tuple[str, ...]]] = {
    "values.not_finite": ("latent_not_finite", "pictures_not_finite", "vace_not_finite"),
    "memory.kept_after_stage": ("memory_kept",),
    "lora.modules_unmatched": ("lora_",),
}
"""By rule, how the findings of analyses begin that tell the same."""

_LEFT_TO_RULES: Final = frozenset({"memory_fragmented"})
"""What an analysis says of its stage alone, and a rule judges by the whole run: a cache that all of it needs is
healthy."""


def with_findings(run: Run, guard: Guard) -> Run:
    """The run with what the analyses find in it, or why one of them could not look."""
    found: list[Finding] = list(run.findings)
    unavailable = dict(run.unavailable)
    analyses = (
        ("rules", diagnose),
        ("model_changes", find_model_changes),
        ("stages", find_stage_findings),
        ("vae", find_vae_findings),
    )
    for name, analysis in analyses:
        findings, reason = guard.read(name, lambda analysis=analysis: analysis(run))  # type: ignore[misc]
        found += findings or ()
        if reason is not None:
            unavailable[f"findings.{name}"] = reason
    kept = tuple(
        finding
        for finding in found
        if finding.id not in _LEFT_TO_RULES and not _is_said_better(finding, found)
    )
    return replace(run, findings=kept, unavailable=unavailable)


def _is_said_better(rule: Finding, found: list[Finding]) -> bool:
    """Whether a stage's own analysis, which has seen more than the record, says the same as the rule."""
    known = _SAID_BY_ANALYSES.get(rule.id, ())
    return any(one.stage == rule.stage and one.id.startswith(known) for one in found) if known else False
