"""The clock that stages are judged by."""

from typing import Final

from sigmascope.records.run import Stage

DEVICE_SECONDS: Final = "device_seconds"
"""The fact of a stage that holds what it took on the accelerator."""
LONGEST_SECONDS: Final = 1e11
"""Some three thousand years."""


def stage_seconds(stage: Stage) -> float:
    """What a stage took: on the accelerator where that was measured, else on the host.

    A host that only queues work is done long before the device is, and waits for it in some later stage.
    """
    on_device = device_seconds(stage)
    return stage.seconds if on_device is None else on_device


def device_seconds(stage: Stage) -> float | None:
    """What a stage took on the accelerator; None where that was not measured, or is no time."""
    on_device = stage.facts.get(DEVICE_SECONDS)
    return on_device if isinstance(on_device, float) and is_duration(on_device) else None


def is_duration(value: object) -> bool:
    """Whether something is a number of seconds that can have passed: not NaN, not infinite, not less than 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LONGEST_SECONDS
