"""Whether the models of a workflow stayed what they were from stage to stage."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.records.finding import Finding, Severity
from sigmascope.records.run import Run, Stage

MODEL_STATE = "model_state."
"""Before the model's type: the fact of a stage that holds the state of that model at its end."""

EXPECTED_IN = frozenset({"model_loading", "lora_application", "model_sampling"})
"""Stages whose work is to change a model."""

_HARMLESS = frozenset({"device"})
_NOT_COMPARED = frozenset({"changed", "unavailable", "wrapper_class"})


def find_model_changes(run: Run) -> tuple[Finding, ...]:
    """A finding for each model that another stage than those meant for it has changed.

    Args:
        run: The record, with the states that `WorkflowMonitor.end_monitoring` notes.
    """
    findings: list[Finding] = []
    last: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for stage in run.walk():
        for model_type, state in _states(stage):
            if model_type in last and stage.name not in EXPECTED_IN:
                findings += _finding(model_type, stage.name, *last[model_type], state)
            last[model_type] = (stage.name, state)
    return tuple(findings)


def _states(stage: Stage) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, state in stage.facts.items():
        if name.startswith(MODEL_STATE) and isinstance(state, Mapping):
            yield name.removeprefix(MODEL_STATE), state


def _finding(
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
