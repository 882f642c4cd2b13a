"""How long the accelerator worked on each step, told by events and never by waiting for it.

An event is recorded on the current stream at both edges of a step, which costs the host a few
microseconds. Events that have passed are read when the stage closes; those still ahead, when the run is.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sigmascope.probes.accelerators import AcceleratorEvent
from sigmascope.records.memory import MemorySnapshot

NOT_FINISHED = "the accelerator had not been seen to finish when the run was read"
NOT_MARKED = "no event was taken at both edges, as where the accelerator was not in use yet"
NOT_IN_USE = "the accelerator was not in use when the stage began"
_RESOLVE_FROM = 64


class Mark(NamedTuple):
    """An event that has been recorded on a device."""

    device: str
    event: AcceleratorEvent


def other_device_in_use(snapshot: MemorySnapshot) -> str | None:
    """The device that holds the work, where the current one holds none of it; None: marks go to the current one.

    A pipeline put on "cuda:1" leaves "cuda:0" current, and the marks of its idle stream would tell the host's time.
    """
    device = snapshot.device_in_use()
    is_other = device is not None and device != snapshot.current_device
    return device if is_other and snapshot.accelerator(str(device)).allocated_bytes else None


class EventPool:
    """Events to use again. An event belongs to the device that it was first recorded on."""

    __slots__ = ("_free", "_new_event")

    def __init__(self, new_event: Callable[[str], AcceleratorEvent | None]) -> None:
        self._new_event = new_event
        self._free: dict[str, list[AcceleratorEvent]] = {}

    def mark(self, device: str) -> Mark | None:
        """Record an event on the device's current stream; None if that is not possible now."""
        try:
            event: AcceleratorEvent | None = self._free[device].pop()
        except (KeyError, IndexError):  # asking first would race with another thread
            event = self._new_event(device)
        if event is None or not event.record():
            return None
        return Mark(device, event)

    def give_back(self, mark: Mark) -> None:
        """Take back an event that nobody will read again."""
        self._free.setdefault(mark.device, []).append(mark.event)


class StepTimings:
    """Accelerator seconds of one stage's steps, by their numbers; None until the events have passed."""

    __slots__ = ("_pending", "_pool", "seconds")

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self.seconds: list[float | None] = []
        self._pending: deque[tuple[int, Mark, Mark]] = deque()

    def add(self, row: int, start: Mark | None, end: Mark | None) -> None:
        """Take the marks at a step's edges; without both it stays None.

        Args:
            row: The step's number, from 0. A step that was not told of, as timing had failed or Ctrl-C came just then,
                is None and no other's time.
            start: At its beginning.
            end: At its end.
        """
        if start is not None and end is not None:
            self._pending.append((row, start, end))
        self.seconds.extend([None] * (row + 1 - len(self.seconds)))
        if len(self._pending) >= _RESOLVE_FROM:
            self.resolve()

    def of_first(self, steps: int) -> tuple[float | None, ...]:
        """The seconds of so many steps."""
        known = self.seconds[:steps]
        return (*known, *[None] * (steps - len(known)))

    def resolve(self) -> None:
        """Read every step that the accelerator has finished; return at once at the first unfinished one."""
        while self._pending:
            row, start, end = self._pending[0]
            if not end.event.query():
                return
            self._pending.popleft()
            self.seconds[row] = start.event.elapsed_seconds(end.event)
            self._pool.give_back(start)
            self._pool.give_back(end)

    @property
    def unfinished(self) -> int:
        """How many steps the accelerator has not been seen to finish."""
        return len(self._pending)


class StageEdges:
    """The edges of stages that are over, those that ended first before the others. With `peaks.LOCK` held.

    Each stage that ends reads those before it, so that a long run holds no more events than the device has ahead of it.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[StepTimings] = deque()

    def add(self, timings: StepTimings, start: Mark | None, end: Mark | None) -> None:
        """Take the marks at a stage's edges, as the only entry of its timings."""
        timings.add(0, start, end)
        self._waiting.append(timings)
        while self._waiting:
            self._waiting[0].resolve()
            if self._waiting[0].unfinished:
                return
            self._waiting.popleft()


def stage_gpu_seconds(timings: StepTimings | None) -> tuple[float | None, str | None]:
    """What a stage as a whole took on the accelerator, from the timings of its two edges, or why that is not known.

    Args:
        timings: With one entry once the stage is over; None without an accelerator.
    """
    if timings is None or not timings.seconds:
        return None, None
    if timings.unfinished:
        return None, NOT_FINISHED
    return timings.seconds[0], NOT_IN_USE if timings.seconds[0] is None else None
