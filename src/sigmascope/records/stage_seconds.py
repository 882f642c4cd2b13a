"""The clock that stages are judged by."""

from typing import Final

from sigmascope.records.run import Stage

DEVICE_SECONDS: Final = "device_seconds"
"""The fact of a stage that holds what it took on the accelerator."""


def stage_seconds(stage: Stage) -> float:
    """What a stage took: on the accelerator where that was measured, else on the host.

    A host that only queues work is done long before the device is, and waits for it in some later stage.
    """
    on_device = stage.facts.get(DEVICE_SECONDS)
    return on_device if isinstance(on_device, float) else stage.seconds
