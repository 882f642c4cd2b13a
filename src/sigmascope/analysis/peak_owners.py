"""Whose the highest memory of a stage and of a run is: when it was, in which stage, by which component.

A stage's peak belongs to the innermost stage that was open at its moment and saw as much. The component is
the one that this stage, or the step at that moment, ran; memory that others hold besides it is part of the
peak.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from sigmascope.records.performance import PROCESS, readable_curves
from sigmascope.records.run import Run, Stage

FACT: Final = "peak_owner"
SLACK_SECONDS: Final = 1e-6
"""By how much two figures of one moment may differ."""


@dataclass(frozen=True, slots=True)
class PeakOwner:
    """One peak and whose it is.

    Attributes:
        where: "process" (its resident memory) or a device (what is allocated there).
        bytes: How much it was.
        at_seconds: When, since the run began.
        stage: The stage that was at work, with those around it: "generation/latent_decoding".
        component: The pipeline's component that was at work; None: the stage ran none, or several took turns in it and
            it is not known which of them it was.
        component_bytes: Of its weights; None: not known.
        grown_bytes: By how much the peak is above what was in use when that stage began.
    """

    where: str
    bytes: int
    at_seconds: float | None
    stage: str
    component: str | None = None
    component_bytes: int | None = None
    grown_bytes: int | None = None


def peak_owners(run: Run) -> tuple[PeakOwner, ...]:
    """The owners of the run's highest memory: of the process's and of each device's."""
    highest: dict[str, PeakOwner] = {}
    for stage in run.stages:
        for owner in owners_of(stage):
            if owner.where not in highest or owner.bytes > highest[owner.where].bytes:
                highest[owner.where] = owner
    return tuple(highest.values())


def owners_of(stage: Stage, around: tuple[Stage, ...] = ()) -> Iterator[PeakOwner]:
    """The owners of one stage's peaks."""
    for where, nbytes, at_seconds in _peaks(stage):
        path = [*around, stage]
        while (inner := _inside(path[-1], where, nbytes, at_seconds)) is not None:
            path.append(inner)
        name = component_of_peak(path, where, nbytes, at_seconds)
        baseline = _baseline(path[-1], where)
        yield PeakOwner(
            where,
            nbytes,
            at_seconds,
            "/".join(outer.name for outer in path),
            name,
            _component_bytes(path, name),
            None if baseline is None else nbytes - baseline,
        )


def _peaks(stage: Stage) -> Iterator[tuple[str, int, float | None]]:
    """Where, how much, and when since the run began."""
    peak = stage.peak
    if peak is None:
        return
    peaks = [(PROCESS, peak.rss_bytes, peak.rss_at_seconds)]
    peaks += [
        (device.device, device.allocated_bytes, device.allocated_at_seconds) for device in peak.accelerators
    ]
    for where, nbytes, at_seconds in peaks:
        if nbytes is not None:
            yield where, nbytes, None if at_seconds is None else stage.started_seconds + at_seconds


def _inside(stage: Stage, where: str, nbytes: int, at_seconds: float | None) -> Stage | None:
    """The stage inside that saw as much at that moment."""
    if at_seconds is None:
        return None
    for child in stage.children:
        begun = child.started_seconds - SLACK_SECONDS
        is_open = begun <= at_seconds <= child.started_seconds + child.seconds + SLACK_SECONDS
        if is_open and any(name == where and seen >= nbytes for name, seen, _ in _peaks(child)):
            return child
    return None


def _baseline(stage: Stage, where: str) -> int | None:
    if stage.memory is None:
        return None
    before = stage.memory.baseline
    return before.process_rss_bytes if where == PROCESS else before.accelerator(where).allocated_bytes


def _component_bytes(path: list[Stage], name: str | None) -> int | None:
    """The bytes of a component's weights, as the pipeline's facts around it say."""
    for stage in reversed(path):
        facts: Any = stage.facts
        for key in ("pipeline", "components", name, "module", "nbytes"):
            facts = facts.get(key) if isinstance(facts, Mapping) else None
        if isinstance(facts, int):
            return facts
    return None


def with_owners(run: Run) -> Run:
    """The same run, in which it and each of its stages say under `peak_owner` whose their peaks are."""
    owners = peak_owners(run)
    stages = tuple(_stage_with_owners(stage, ()) for stage in run.stages)
    return replace(run, stages=stages, facts={**run.facts, FACT: _plain(owners)} if owners else run.facts)


def _stage_with_owners(stage: Stage, around: tuple[Stage, ...]) -> Stage:
    owners = _plain(tuple(owners_of(stage, around)))
    inner = tuple(_stage_with_owners(child, (*around, stage)) for child in stage.children)
    return replace(stage, children=inner, facts={**stage.facts, FACT: owners} if owners else stage.facts)


def _plain(owners: tuple[PeakOwner, ...]) -> dict[str, Any]:
    return {
        owner.where: {name: value for name, value in asdict(owner).items() if name != "where"}
        for owner in owners
    }


def component_of_peak(path: Sequence[Stage], where: str, nbytes: int, at_seconds: float | None) -> str | None:
    """The component that was at work when the memory of a place was highest.

    Returns:
        Its name; None where no stage of the path ran one, or several took turns and it is not known which it was.
    """
    worker = next((stage for stage in reversed(path) if stage.facts.get("component")), None)
    if worker is None or not worker.facts.get("component_turns"):
        return None if worker is None else worker.facts["component"]
    if at_seconds is None:
        return None
    since = _not_before(path, nbytes, at_seconds) if where == PROCESS else at_seconds
    return _only_one_between(worker, since, at_seconds)


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
