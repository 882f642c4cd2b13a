"""Which numbers of a record can be times, and where in a run there are others: only by hand does a file get those."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from sigmascope.records.peak import PeakMemory
from sigmascope.records.run import Run, Stage
from sigmascope.records.stage_seconds import DEVICE_SECONDS, LONGEST_SECONDS, is_duration
from sigmascope.records.steps import Steps

NO_TIME: Final = "which is no time"


def impossible_times(run: Run) -> Iterator[str]:
    """Each field of a run that holds what cannot be a time, by its place in the file, such as "run.seconds is nan, …".

    A duration is finite and not negative; a beginning may be before that of what it counts from.
    """
    if not _is_moment(run.started_at):
        yield f"run.started_at is {_shown(run.started_at)}, {NO_TIME}"
    if not is_duration(run.seconds):
        yield f"run.seconds is {run.seconds}, {NO_TIME}"
    for index, stage in enumerate(run.stages):
        yield from _of_stage(stage, f"run.stages[{index}]")


def _of_stage(stage: Stage, place: str) -> Iterator[str]:
    fields: list[tuple[str, object, bool]] = [
        ("started_seconds", stage.started_seconds, _is_beginning(stage.started_seconds)),
        ("seconds", stage.seconds, is_duration(stage.seconds)),
        *_of_steps(stage.steps),
        *(() if stage.peak is None else _of_peak(stage.peak)),
    ]
    if DEVICE_SECONDS in stage.facts:
        on_device = stage.facts[DEVICE_SECONDS]
        fields.append((f"facts.{DEVICE_SECONDS}", on_device, is_duration(on_device)))
    yield from (
        f"{place}.{name} is {_shown(value)}, {NO_TIME}" for name, value, is_time in fields if not is_time
    )
    for index, child in enumerate(stage.children):
        yield from _of_stage(child, f"{place}.children[{index}]")


def _of_steps(steps: Steps) -> Iterator[tuple[str, object, bool]]:
    for row, started in enumerate(steps.started):
        yield f"steps.started[{row}]", started, _is_beginning(started)
    for name, column in (("seconds", steps.seconds), ("gpu_seconds", steps.gpu_seconds)):
        yield from _known(f"steps.{name}", column)


def _known(name: str, column: Iterable[float | None]) -> Iterator[tuple[str, object, bool]]:
    for row, value in enumerate(column):
        if value is not None:
            yield f"{name}[{row}]", value, is_duration(value)


def _of_peak(peak: PeakMemory) -> Iterator[tuple[str, object, bool]]:
    moments = {"rss_at_seconds": peak.rss_at_seconds, "ram_used_at_seconds": peak.ram_used_at_seconds}
    for index, device in enumerate(peak.accelerators):
        moments[f"accelerators[{index}].allocated_at_seconds"] = device.allocated_at_seconds
        moments[f"accelerators[{index}].reserved_at_seconds"] = device.reserved_at_seconds
    for name, value in moments.items():
        if value is not None:
            yield f"peak.{name}", value, _is_beginning(value)


def _is_beginning(value: float) -> bool:
    return -LONGEST_SECONDS < value < LONGEST_SECONDS


def _is_moment(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
