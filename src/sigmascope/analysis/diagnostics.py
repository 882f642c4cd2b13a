"""Findings on a record, most of them from rules: what was seen, why it matters, what to do.

`diagnose` applies all rules (`RULES`) to a run; the files of rules declare them. Three other
functions collect what the record already holds: findings of stages' analyses, records of encodings and decodings that no
analysis has read, and models that changed from one stage to the next.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar, get_args

from sigmascope.analysis import (  # noqa: F401 - each declares its rules
    lora_idle,
    memory,
    processor_waits,
    rules_model,
    rules_series,
    rules_time,
)
from sigmascope.analysis.generations import Case, cases
from sigmascope.analysis.lora_in_weights import left_in_weights, saw_merging
from sigmascope.analysis.rules import RULES, LooksAt, Rule, Seen, rule
from sigmascope.records.latents import RECORD_FACT, encoding_record, findings_of_record
from sigmascope.records.merge import ranks_of
from sigmascope.records.recorded import Recorded, run_of
from sigmascope.records.run import (
    IDLE_LORAS,
    Finding,
    Run,
    Severity,
    Stage,
    folded_in_words,
    is_duration,
)
from sigmascope.units import printable

__all__ = ["RULES", "diagnose"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SUBJECTS: Final = ("component", "device", "class", "prompt")
"""Names of evidence that tell findings of one rule apart."""
_SEVERITIES: Final = ("critical", "error", "warning", "info")
MODEL_STATE = "model_state."
"""Prefix, before the model's type, of the fact with that model's state at the end of a stage."""
_SAID_BY_SERIES: Final = {rules_series.RECUR: "time.first_step_compiles"}
"""What a finding on the series says better than one on each of its generations."""
_BESIDE_A_FAILURE: Final = ("time", "steps", "an idle device", "a slow device")
"""What rules are about that say nothing of a generation that failed, or of which no valid time is known."""
EXPECTED_IN = frozenset({"model_loading", "lora_application", "model_sampling"})
"""Stages that are meant to change a model."""
_CHANGES_ALL = frozenset({"model_loading", "lora_application"})
_HARMLESS = frozenset({"device"})
_NOT_COMPARED = frozenset({"changed", "unavailable", "wrapper_class"})


def diagnose(run: Recorded) -> tuple[Finding, ...]:
    """What is wrong or slow in a run, what to do about it, and how much that would gain; the gravest first.

    A finding that several generations of the run share is given once, with `generations` in its evidence. A rule that
    fails on an odd record is skipped, with a line in the log.

    Args:
        run: Some rules need `PipelineFacts` and `CallFacts` among the facts of the run or its stages (`pipeline`,
            `call`); without these they find nothing. In a merged run each rank is judged by itself, with its name in the
            evidence, and then the ranks are compared.
    """
    run = run_of(run)
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


def _was_interrupted(stage: Stage) -> bool:
    """Whether the user stopped it, maybe since it was slow."""
    return stage.error is not None and stage.error.startswith("KeyboardInterrupt")


def _findings(subject: Any, looks_at: LooksAt, but: Collection[str] = ()) -> list[Finding]:
    """What the rules for such a subject find in it, without those about some things."""
    rules = [rule for rule in RULES.values() if rule.looks_at == looks_at and rule.about not in but]
    return [finding for rule in rules for finding in _findings_of_rule(rule, subject)]


def _findings_of_rule(rule: Rule, subject: Any) -> list[Finding]:
    return _or_nothing(lambda: list(rule.findings(subject)), rule.id)


def _or_nothing(read: Callable[[], list[T]], what: str) -> list[T]:
    try:
        return read()
    except Exception as failure:  # noqa: BLE001 - a record may come from anywhere, and one rule must not stop the others
        _log.warning("%s failed: %s: %s", what, type(failure).__name__, printable(failure))
        return []


def _findings_of_process(run: Run) -> list[Finding]:
    by_subject: dict[tuple[str, str | None, str], list[tuple[Finding, int | None]]] = {}
    for case in _readable_cases(run):
        failed = any(not stage.success and not _was_interrupted(stage) for stage in case.stages)
        is_timed = not failed and is_duration(case.seconds)
        for finding in _findings(case, "generation", but=() if is_timed else _BESIDE_A_FAILURE):
            about = next((finding.evidence[name] for name in _SUBJECTS if name in finding.evidence), None)
            alike = by_subject.setdefault((finding.id, finding.stage, str(about)), [])
            alike.append((finding, case.number))
    broke = any(not stage.success and not _was_interrupted(stage) for stage in run.stages)
    of_run = _findings(run, "run", but=_BESIDE_A_FAILURE if broke else ())
    said = {_SAID_BY_SERIES.get(finding.id) for finding in of_run}
    of_generations = [finding for finding in map(_as_one, by_subject.values()) if finding.id not in said]
    return _advised([*of_generations, *of_run])


def _advised(findings: list[Finding]) -> list[Finding]:
    """The findings; a missed target refers to the others only if one of them says what it would save."""
    if any("gain_seconds" in finding.evidence for finding in findings):
        return findings
    return [
        replace(finding, advice=None) if finding.id == rules_time.TARGET_MISSED else finding
        for finding in findings
    ]


@rule("record.folded", "info", about="the record", looks_at="run")
def folded(run: Run) -> Iterator[Seen]:
    """Earlier generations are kept only as sums, which rules cannot judge."""
    if run.folded is not None:
        yield Seen(
            message=f"The findings leave out {folded_in_words(run.folded)}.",
            evidence={"kept": run.folded.kept, "folded_generations": run.folded.generations},
        )


def _readable_cases(run: Run) -> Iterator[Case]:
    """The run's cases that can be read."""
    try:
        yield from cases(run)
    except ValueError as failure:
        _log.warning(
            "The facts of run %s about its pipeline cannot be read: %s", printable(run.id), printable(failure)
        )


def _as_one(alike: list[tuple[Finding, int | None]]) -> Finding:
    """The first of them, with the number of generations in its evidence."""
    first = alike[0][0]
    generations = {number for _, number in alike if number is not None}
    if len(generations) < 2:
        return first
    return replace(first, evidence={**first.evidence, "generations": len(generations)})


def find_stage_findings(run: Run) -> list[Finding]:
    """The findings that analyses put on their stages, in the order of the stages; of idle LoRAs each kind once.

    A remark on how LoRAs are set is given as the last change left them, and none on what was undone before any call.
    """
    settled = {lora_idle.MERGED_AT_ZERO} if saw_merging(run) else set()
    settled |= {lora_idle.NOT_SEEN} if left_in_weights(run) else set()
    undone = lora_idle.undone_before_a_call(run)
    by_stage = [
        (
            stage,
            [
                finding
                for finding in _findings_in_analysis(stage)
                if finding.id not in undone.get(id(stage), ())
            ],
        )
        for stage in run.walk()
    ]
    last = {_subject_of(stage): stage for stage, _ in by_stage if stage.facts.get(stage.name) is not None}
    findings = [
        finding
        for stage, found in by_stage
        for finding in found
        if finding.id not in settled
        and (finding.id not in _AS_IT_STANDS or last.get(_subject_of(stage)) is stage)
    ]
    known = {finding.id for finding in findings} | settled
    known |= {lora_idle.IS_ZERO} if lora_idle.UNTRAINED in known else set()
    idle = [finding for stage in run.walk() for finding in _read(stage.facts.get(IDLE_LORAS), stage)]
    if at_zero := lora_idle.merged_at_zero(run):
        call = next(stage for stage in reversed([*run.walk()]) if stage.facts.get(IDLE_LORAS))
        idle += _read([at_zero], call)
    return findings + list({finding.id: finding for finding in idle if finding.id not in known}.values())


_AS_IT_STANDS: Final = frozenset({"lora_inactive"})
"""Remarks on how LoRAs are set, which a later change of the same models replaces."""


def _subject_of(stage: Stage) -> tuple[str, object]:
    return stage.name, stage.facts.get("component")


def _findings_in_analysis(stage: Stage) -> Iterator[Finding]:
    analysis = stage.facts.get(stage.name)
    return _read(analysis.get("findings") if isinstance(analysis, Mapping) else None, stage)


def _read(findings: object, stage: Stage) -> Iterator[Finding]:
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

    A stage with an analysis already has them: see `find_stage_findings`.
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
    """A finding for each model that changed in a stage that should not change it."""
    findings: list[Finding] = []
    last_states: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for stage in run.walk():
        if stage.name in _CHANGES_ALL:
            last_states.clear()  # its facts hold one model's state, and it may have changed the others too
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
        message=f"{stage} changed {model_type}, compared with the end of {earlier}: {', '.join(changed)}.",
        evidence=evidence,
        advice=None if severity == "info" else "Find the node or call that replaced or patched the model.",
        stage=stage,
    )
