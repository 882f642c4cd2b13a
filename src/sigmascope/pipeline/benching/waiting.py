"""Waiting for a device: a benchmark may do what a monitor must not."""

from collections.abc import Callable

import torch


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits until `device` has done all that was queued; of no effect for the CPU.

    A stage whose work is only queued would end at once, and the one that waits for the result would seem to have
    taken its time. At a stage's edges waiting costs some tens of microseconds; within steps nothing waits.

    Args:
        device: On which the pipeline runs.
    """
    if device.type in ("cpu", "meta"):
        return _nothing
    return lambda: torch.accelerator.synchronize(device)


def _nothing() -> None:
    pass
