"""The clock that a stage's steps are judged by."""

from collections.abc import Iterable

from sigmascope.records.run import Stage
from sigmascope.records.stage_seconds import is_duration


def step_seconds(stage: Stage, *, on_device: bool = True) -> tuple[float | None, ...]:
    """Of a stage's steps, one entry each: by the accelerator's clock where it timed any of them, else by the host's.

    The two are never mixed, since the host's may only tell how long a step took to queue: a step that the accelerator
    was not seen to finish is None. So is what cannot be a time: less than 0, infinite, NaN.

    Args:
        stage: With steps or without.
        on_device: Whether the accelerator's clock may be taken.
    """
    column = stage.steps.gpu_seconds if on_device and is_timed_on_device(stage) else stage.steps.seconds
    return tuple(one if is_duration(one) else None for one in column)


def is_timed_on_device(stage: Stage) -> bool:
    """Whether the accelerator's clock timed any of a stage's steps."""
    return any(map(is_duration, stage.steps.gpu_seconds))


def known(seconds: Iterable[float | None]) -> list[float]:
    """Those that were measured."""
    return [one for one in seconds if one is not None]


def warm(seconds: tuple[float | None, ...]) -> list[float]:
    """Those that were measured of all but the first, into which compiling falls; of a single step that one."""
    return known(seconds[1:] if len(seconds) > 1 else seconds)
