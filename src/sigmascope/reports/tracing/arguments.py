"""What a viewer shows when a slice is clicked: flat names with scalars."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sigmascope.records.arithmetic import mib
from sigmascope.records.facts import ModuleFacts, TensorFacts
from sigmascope.records.finding import Finding
from sigmascope.records.memory_over_time import MEMORY_OVER_TIME, readable_curves
from sigmascope.records.run import Stage
from sigmascope.records.steps import Steps
from sigmascope.records.utilization import UTILIZATION, readable_utilization

LONGEST_TEXT = 300
MOST_FACTS = 100
_DEEPEST = 3


def stage_arguments(stage: Stage) -> dict[str, Any]:
    """What is known of a stage beside its time. What is unknown is left out; memory is in MiB."""
    devices, curves = readable_utilization(stage), readable_curves(stage)
    # As counters; a caller's own fact of such a name is told as it is.
    drawn = {name for name, is_drawn in ((UTILIZATION, devices), (MEMORY_OVER_TIME, curves)) if is_drawn}
    known = {
        "error": stage.error,
        **_memory(stage),
        **{f"{one.device}_busy_percent": one.busy_percent.mean for one in devices if one.busy_percent},
        **{f"module.{name}": _module(facts) for name, facts in stage.modules.items()},
        **{f"tensor.{name}": _tensor(facts) for name, facts in stage.tensors.items()},
        **flat_facts({name: fact for name, fact in stage.facts.items() if name not in drawn}),
        **{f"unavailable.{name}": reason for name, reason in stage.unavailable.items()},
    }
    return {name: _cut(value) for name, value in known.items() if value is not None}


def step_arguments(steps: Steps, index: int) -> dict[str, Any]:
    """One row of the columns. A reading that failed is left out."""
    row = {
        "gpu_ms": None if (seconds := _at(steps.gpu_seconds, index)) is None else seconds * 1e3,
        "process_mib": mib(_at(steps.rss_bytes, index)),
        "allocated_mib": mib(_at(steps.allocated_bytes, index)),
    }
    return {name: value for name, value in row.items() if value is not None}


def finding_arguments(finding: Finding) -> dict[str, Any]:
    """A finding's words and its evidence."""
    told = {"severity": finding.severity, "message": finding.message, "what_to_do": finding.advice}
    evidence = {f"evidence.{name}": value for name, value in finding.evidence.items()}
    return {name: value for name, value in {**told, **evidence}.items() if value is not None}


def flat_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars and their lists, nested names joined by dots; how many there are more, beyond the first 100."""
    flat = dict(_flat(facts, "", 1))
    shown = dict(list(flat.items())[:MOST_FACTS])
    if len(flat) > len(shown):
        shown["facts_left_out"] = len(flat) - len(shown)
    return shown


def _flat(facts: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            if depth < _DEEPEST:
                yield from _flat(value, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if not any(isinstance(item, Mapping) for item in value):
                yield f"{prefix}{key}", ", ".join(map(str, value))
        elif value is not None:
            yield f"{prefix}{key}", value


def _memory(stage: Stage) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    if stage.memory is not None:
        figures["process_change_mib"] = stage.memory.as_dict()["process"]["rss_change_mb"]
    if stage.peak is not None:
        figures["process_peak_mib"] = mib(stage.peak.rss_bytes)
        for device in stage.peak.accelerators:
            figures[f"{device.device}_peak_allocated_mib"] = mib(device.allocated_bytes)
            figures[f"{device.device}_peak_reserved_mib"] = mib(device.reserved_bytes)
    return figures


def _tensor(facts: TensorFacts) -> str:
    shape = "×".join(map(str, facts.shape)) or "scalar"
    return f"{shape} {facts.dtype.removeprefix('torch.')} on {facts.device}"


def _module(facts: ModuleFacts) -> str:
    count = "" if facts.parameters is None else f", {facts.parameters:,} parameters"
    return f"{facts.class_name}{count}"


def _at(column: Sequence[Any], index: int) -> Any:
    return column[index] if column else None


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > LONGEST_TEXT
    return f"{value[:LONGEST_TEXT]}…" if is_long else value
