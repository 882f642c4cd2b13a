"""What the analyses of single stages found, as findings of the run."""

from collections.abc import Iterator, Mapping
from typing import get_args

from sigmascope.records.finding import Finding, Severity
from sigmascope.records.run import Run, Stage


def find_stage_findings(run: Run) -> list[Finding]:
    """The findings that analyses put on their stages, in the order of the stages.

    Args:
        run: Whose stages have an analysis among their facts, under their own names, with a list `findings`.
    """
    return [finding for stage in run.walk() for finding in _of_analysis(stage)]


def _of_analysis(stage: Stage) -> Iterator[Finding]:
    analysis = stage.facts.get(stage.name)
    found = analysis.get("findings") if isinstance(analysis, Mapping) else None
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, Mapping) and entry.get("severity") in get_args(Severity):
            yield Finding(
                str(entry.get("id")),
                entry["severity"],
                str(entry.get("message")),
                dict(entry.get("evidence") or {}),
                entry.get("advice"),
                stage.name,
            )
