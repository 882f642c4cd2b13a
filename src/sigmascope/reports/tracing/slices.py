"""Stages and steps as slices of time, and the tracks that they lie on.

A viewer draws what lies inside what on one track by time alone. So a track may hold only slices that nest, and
those of other threads, which overlap, get tracks of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sigmascope.records.run import Run, Stage
from sigmascope.reports.tracing.arguments import stage_arguments, step_arguments


def nanoseconds(seconds: float) -> int:
    """Seconds as the nanoseconds that they were computed from, so that edges which met still meet."""
    return round(seconds * 1e9)


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """A stretch of time with a name. `parent` is the stage in which it was recorded."""

    name: str
    kind: Literal["stage", "step"]
    started_ns: int
    ended_ns: int
    parent: "Slice | None" = None
    stage: Stage | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def lies_in(self, other: "Slice") -> bool:
        """Whether `other` is a stage around this one, or a step of such a stage."""
        around = self.parent
        while around is not None:
            if other is around or other.parent is around:
                return True
            around = around.parent
        return False


def slices_of(run: Run, offset_ns: int = 0) -> list[Slice]:
    """Every stage and step of a run, by their beginning, outer ones first.

    Args:
        run: The record.
        offset_ns: Where the trace's clock stands when the run begins.
    """
    found = [part for stage in run.stages for part in _below(stage, None, offset_ns)]
    return sorted(found, key=lambda part: (part.started_ns, -part.ended_ns))


def _below(stage: Stage, parent: Slice | None, offset_ns: int) -> Iterator[Slice]:
    started_ns = offset_ns + nanoseconds(stage.started_seconds)
    ended_ns = started_ns + nanoseconds(stage.seconds)
    own = Slice(stage.name, "stage", started_ns, ended_ns, parent, stage, stage_arguments(stage))
    yield own
    for index, (started, seconds) in enumerate(zip(stage.steps.started, stage.steps.seconds, strict=True)):
        step_ns = started_ns + nanoseconds(started)
        arguments = step_arguments(stage.steps, index)
        yield Slice(
            f"step {index + 1}", "step", step_ns, step_ns + nanoseconds(seconds), own, None, arguments
        )
    for child in stage.children:
        yield from _below(child, own, offset_ns)


def tracks_of(slices: Sequence[Slice]) -> dict[Slice, int]:
    """A track for each slice: that of its stage where it nests there, else the first where it does, from 0.

    Args:
        slices: Sorted as `slices_of` does.
    """
    chosen: dict[Slice, int] = {}
    open_on: list[list[Slice]] = []
    for part in slices:
        for track in open_on:
            while track and track[-1].ended_ns <= part.started_ns:
                track.pop()
        first = chosen.get(part.parent, 0) if part.parent is not None else 0
        order = sorted(range(len(open_on)), key=lambda index: (index != first, index))
        place = next((index for index in order if _fits(part, open_on[index])), len(open_on))
        if place == len(open_on):
            open_on.append([])
        open_on[place].append(part)
        chosen[part] = place
    return chosen


def _fits(part: Slice, open_slices: Sequence[Slice]) -> bool:
    if not open_slices:
        return True
    innermost = open_slices[-1]
    return part.ended_ns <= innermost.ended_ns and part.lies_in(innermost)
