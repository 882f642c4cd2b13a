"""One profiler after another, each on one step."""

import threading
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from sigmascope.monitor.profile_blocks import Marks
from sigmascope.probes.accelerators.capturing import is_capturing

OTHER_PROFILER: Final = "another profiler was running"
CAPTURED: Final = (
    "a graph was being captured, which the profiler's waiting for the device would end with an error"
)


class ProfileSession:
    """Starts and stops torch's profiler, one at a time. Not locked.

    Attributes:
        taken: Steps, with the profilers that saw them.
        refused: Why a step was not taken.
        saw_device: Whether kernels were seen in all steps that were taken; None before the first one. A process may
            begin to use its device after them.

    Args:
        marks: Put on for each step.
    """

    def __init__(self, marks: Marks) -> None:
        self.taken: list[tuple[int, Any]] = []
        self.refused: str | None = None
        self.saw_device: bool | None = None
        self._marks = marks
        self._running: tuple[int, int, Any] | None = None  # thread, step, profiler

    def is_running(self, thread: int | None = None) -> bool:
        """Whether a step is being profiled, of that thread if one is named."""
        return self._running is not None and thread in (None, self._running[0])

    def start(self, step: int) -> None:
        """Profile from now on; not where somebody else does: starting a second profiler would end the host's own."""
        if torch._C._autograd._profiler_enabled():
            self.refused = OTHER_PROFILER
            return
        if is_capturing("cuda"):
            self.refused = CAPTURED
            return
        activities, sees_device = [ProfilerActivity.CPU], uses_cuda()
        if sees_device:
            activities.append(ProfilerActivity.CUDA)
        self.saw_device = sees_device and self.saw_device is not False
        profiler = profile(activities=activities, profile_memory=True)
        profiler.start()
        self._running = (threading.get_ident(), step, profiler)
        self._marks.put_on()

    def stop(self) -> None:
        """End the step that is being profiled, if any."""
        if self._running is None:
            return
        (_, step, profiler), self._running = self._running, None
        try:
            self._marks.take_off()
        finally:
            profiler.stop()
        self.taken.append((step, profiler))


def uses_cuda() -> bool:
    """Whether this process works on a CUDA or HIP device."""
    initialized: Any = torch.cuda.is_initialized
    return bool(initialized())
