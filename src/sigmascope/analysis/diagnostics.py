"""Findings on a record, most of them from rules: what was seen, why it matters, what to do.

`diagnose` holds a run against all rules (`RULES`), which `rules_time`, `memory` and `rules_model` declare. Three others look
for what was noted already: findings of single stages' analyses, records of encodings and decodings that
nobody has analysed, and models that did not stay what they were from stage to stage.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, get_args

from sigmascope.analysis import memory, rules_model, rules_time  # noqa: F401 - each declares its rules
from sigmascope.analysis.generations import Case, cases
from sigmascope.analysis.rules import RULES, LooksAt, Rule, Seen, rule
from sigmascope.records.latents import RECORD_FACT, encoding_record, findings_of_record
from sigmascope.records.merge import ranks_of
from sigmascope.records.run import Finding, Run, Severity, Stage, folded_in_words
from sigmascope.units import printable

__all__ = ["RULES", "diagnose"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_ABOUT: Final = ("component", "device", "class", "prompt")
"""Evidence that tells findings of one rule apart."""
_SEVERITIES: Final = ("critical", "error", "warning", "info")
MODEL_STATE = "model_state."
"""Before the model's type: the fact of a stage that holds the state of that model at its end."""
EXPECTED_IN = frozenset({"model_loading", "lora_application", "model_sampling"})
"""Stages whose work is to change a model."""
_CHANGES_ALL = frozenset({"model_loading", "lora_application"})
_HARMLESS = frozenset({"device"})
_NOT_COMPARED = frozenset({"changed", "unavailable", "wrapper_class"})


def diagnose(run: Run) -> tuple[Finding, ...]:
    """What the record says is wrong or slow, what to do, and what that would gain. The gravest come first.

    Where a run holds several generations, the same finding of several of them is given once, with `generations` in
    its evidence. A rule that fails on an odd record is left out, with a line in the log.

    Args:
        run: With `PipelineFacts` and `CallFacts` among its facts or its stages' (`pipeline`, `call`), for the rules
            that need them; without, those rules are silent. Of merged ranks each is looked at by itself, named in the
            evidence, and then they are compared with each other.
    """
    findings = _findings_of_ranks(run) or _findings_of_process(run)
    return tuple(sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity)))


def _findings_of_ranks(run: Run) -> list[Finding]:
    ranks = _or_nothing(lambda: list(ranks_of(run).items()), "Reading the ranks")
    findings = [
        replace(finding, evidence={**finding.evidence, "rank": name})
        for name, run_of_rank in ranks
        for finding in _findings_of_process(run_of_rank)
    ]
    return findings + _findings(dict(ranks), "ranks")


def _findings(subject: Any, looks_at: LooksAt) -> list[Finding]:
    """What the rules for such a subject find in it."""
    rules = [rule for rule in RULES.values() if rule.looks_at == looks_at]
    return [finding for rule in rules for finding in _findings_of_rule(rule, subject)]


def _findings_of_rule(rule: Rule, subject: Any) -> list[Finding]:
    return _or_nothing(lambda: list(rule.findings(subject)), rule.id)


def _or_nothing(read: Callable[[], list[T]], what: str) -> list[T]:
    try:
        return read()
    except Exception as failure:  # noqa: BLE001 - a record may come from anywhere; the other rules still say theirs
        _log.warning("%s failed: %s: %s", what, type(failure).__name__, printable(failure))
        return []


def _findings_of_process(run: Run) -> list[Finding]:
    by_subject: dict[tuple[str, str | None, str], list[tuple[Finding, int | None]]] = {}
    for case in _readable_cases(run):
        for finding in _findings(case, "generation"):
            about = next((finding.evidence[name] for name in _ABOUT if name in finding.evidence), None)
            alike = by_subject.setdefault((finding.id, finding.stage, str(about)), [])
            alike.append((finding, case.number))
    return [_as_one(alike) for alike in by_subject.values()] + _findings(run, "run")


@rule("record.folded", "info", about="the record", looks_at="run")
def folded(run: Run) -> Iterator[Seen]:
    """Earlier generations are kept as sums, which no rule reads."""
    if run.folded is not None:
        yield Seen(
            message=f"The rules looked at what is in the record in full, and at none of {folded_in_words(run.folded)}.",
            evidence={"kept": run.folded.kept, "folded_generations": run.folded.generations},
        )


def _readable_cases(run: Run) -> Iterator[Case]:
    """What there is to look at, as far as it can be read."""
    try:
        yield from cases(run)
    except ValueError as failure:
        _log.warning(
            "The facts of run %s about its pipeline cannot be read: %s", printable(run.id), printable(failure)
        )


def _as_one(alike: list[tuple[Finding, int | None]]) -> Finding:
    """The first, which says how many generations it is true of."""
    first = alike[0][0]
    generations = {number for _, number in alike if number is not None}
    if len(generations) < 2:
        return first
    return replace(first, evidence={**first.evidence, "generations": len(generations)})


def find_stage_findings(run: Run) -> list[Finding]:
    """The findings that analyses put on their stages, in the order of the stages."""
    return [finding for stage in run.walk() for finding in _findings_in_analysis(stage)]


def _findings_in_analysis(stage: Stage) -> Iterator[Finding]:
    analysis = stage.facts.get(stage.name)
    findings = analysis.get("findings") if isinstance(analysis, Mapping) else None
    for entry in findings if isinstance(findings, list) else ():
        if isinstance(entry, Mapping) and entry.get("severity") in get_args(Severity):
            yield Finding(
                str(entry.get("id")),
                entry["severity"],
                str(entry.get("message")),
                dict(entry.get("evidence") or {}),
                entry.get("advice"),
                stage.name,
            )


def find_vae_findings(run: Run) -> list[Finding]:
    """Stand-ins, fallbacks and failures of `encode_latents` and `decode_latents`.

    Where a stage holds an analysis, that has them already: see `find_stage_findings`.
    """
    return [finding for stage in run.stages for finding in _findings_in_record(stage)]


def _findings_in_record(stage: Stage) -> Iterator[Finding]:
    if stage.name in stage.facts:
        return
    plain = stage.facts.get(RECORD_FACT)
    if isinstance(plain, Mapping):
        yield from findings_of_record(encoding_record(plain))
    for child in stage.children:
        yield from _findings_in_record(child)


def find_model_changes(run: Run) -> tuple[Finding, ...]:
    """A finding for each model that another stage than those meant for it has changed."""
    findings: list[Finding] = []
    last_states: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for stage in run.walk():
        if stage.name in _CHANGES_ALL:
            last_states.clear()  # a step is closed for one model, and may have changed the others as well
        for model_type, state in _model_states(stage):
            if model_type in last_states and stage.name not in EXPECTED_IN:
                findings += _model_change(model_type, stage.name, *last_states[model_type], state)
            last_states[model_type] = (stage.name, state)
    return tuple(findings)


def _model_states(stage: Stage) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, state in stage.facts.items():
        if name.startswith(MODEL_STATE) and isinstance(state, Mapping):
            yield name.removeprefix(MODEL_STATE), state


def _model_change(
    model_type: str, stage: str, earlier: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Finding]:
    changed = [
        name
        for name, value in after.items()
        if name not in _NOT_COMPARED
        and value is not None
        and before.get(name) is not None
        and before[name] != value
    ]
    if not changed:
        return
    severity: Severity = "info" if set(changed) <= _HARMLESS else "warning"
    evidence = {name: f"{before[name]} → {after[name]}" for name in changed}
    yield Finding(
        id="model_state_changed",
        severity=severity,
        message=f"{model_type} is not as {earlier} left it: {', '.join(changed)}.",
        evidence=evidence,
        advice=None if severity == "info" else "Check which node or call replaced or patched the model.",
        stage=stage,
    )
