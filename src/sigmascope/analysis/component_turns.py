"""Which of the components that took turns in a stage was at work when memory was highest."""

from collections.abc import Iterator, Sequence
from typing import Final

from sigmascope.records.memory_over_time import PROCESS, readable_curves
from sigmascope.records.run import Stage

SLACK_SECONDS: Final = 1e-6
"""By how much two figures of one moment may differ."""


def component_of_peak(path: Sequence[Stage], where: str, nbytes: int, at_seconds: float | None) -> str | None:
    """The component that was at work when the memory of a place was highest.

    Args:
        path: From the outermost stage to the innermost one that saw the peak.
        where: "process" or a device.
        nbytes: How much it was.
        at_seconds: When it was seen, since the run began; None: not known.

    Returns:
        Its name; None where no stage of the path ran one, or several took turns and it is not known which it was.
    """
    worker = next((one for one in reversed(path) if one.facts.get("component")), None)
    if worker is None or not worker.facts.get("component_turns"):
        return None if worker is None else worker.facts["component"]
    if at_seconds is None:
        return None
    since = _not_before(path, nbytes, at_seconds) if where == PROCESS else at_seconds
    return _only_one_between(worker, since, at_seconds)


def _only_one_between(stage: Stage, since: float, until: float) -> str | None:
    """The component that ran between two moments of the run; None if several did."""
    turns = stage.facts["component_turns"]
    first, last = (_step_at(stage, at_seconds) for at_seconds in (since, until))
    ran = {*[name for name, step in turns if step <= first][-1:]}
    ran |= {name for name, step in turns if first < step <= last}
    return ran.pop() if len(ran) == 1 else None


def _step_at(stage: Stage, at_seconds: float) -> int:
    """The step that had begun last at a moment of the run; before all of them the first."""
    since = at_seconds - stage.started_seconds + SLACK_SECONDS
    return max(0, sum(started <= since for started in stage.steps.started) - 1)


def _not_before(path: Sequence[Stage], nbytes: int, at_seconds: float) -> float:
    """The earliest moment of the run at which the process may have been as large as it was seen to be later.

    A reading tells of its own moment. What no reading was is the system's running peak, which tells of all the time
    since it was last looked at: when the stage began, or with the last sample.
    """
    sampled = list(_samples(path))
    if any(
        seen == nbytes and abs(when - at_seconds) <= SLACK_SECONDS
        for when, seen in (*sampled, *_readings_after_steps(path[-1]))
    ):
        return at_seconds
    before = [when for when, _ in sampled if when < at_seconds - SLACK_SECONDS]
    return min(at_seconds, max((path[-1].started_seconds, *before)))


def _samples(path: Sequence[Stage]) -> Iterator[tuple[float, int]]:
    """When in the run the sampler read the process's memory, and how much it was."""
    for stage in path:
        curve = readable_curves(stage).get(PROCESS)
        if curve is not None:
            times = (stage.started_seconds + at_seconds for at_seconds in curve.at_seconds)
            yield from zip(times, curve.nbytes, strict=True)


def _readings_after_steps(stage: Stage) -> Iterator[tuple[float, int | None]]:
    steps = stage.steps
    for started, lasted, seen in zip(steps.started, steps.seconds, steps.rss_bytes, strict=False):
        yield stage.started_seconds + started + lasted, seen
