"""Private prompts in what stages raised: hosts like to quote them in their errors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sigmascope.records.run import Run, Stage

Redact = Callable[[str], str]


def redacted(run: Run, redactions: Sequence[Redact]) -> Run:
    """The run whose errors have passed through every function of `redactions`."""
    if not redactions:
        return run

    def redact(text: str) -> str:
        for one in redactions:
            text = one(text)
        return text

    return replace(run, stages=tuple(_redacted(stage, redact) for stage in run.stages))


def _redacted(stage: Stage, redact: Redact) -> Stage:
    details = stage.exception_details
    return replace(
        stage,
        error=None if stage.error is None else redact(stage.error),
        exception_details=None
        if details is None
        else replace(details, message=redact(details.message), traceback=redact(details.traceback)),
        children=tuple(_redacted(child, redact) for child in stage.children),
    )
