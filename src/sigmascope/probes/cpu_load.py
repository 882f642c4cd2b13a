"""How much of the processor other programs use, between two moments."""

import os
import time
from dataclasses import dataclass

import psutil

from sigmascope.probes.reading import Reading, attempt

_IDLE = ("idle", "iowait")
_COUNTED_ELSEWHERE = ("guest", "guest_nice")  # Linux has them in user and nice already


@dataclass(frozen=True, slots=True)
class CpuMoment:
    """What was used up to a moment. Seconds of one processor thread.

    Attributes:
        at: On the clock that never goes back.
        machine: By everybody, and by what runs beside this machine on the same host (steal).
        own: By this process, all of its threads.
    """

    at: float
    machine: float
    own: float


def cpu_moment() -> Reading[CpuMoment]:
    """What was used up to now (some 50 µs). Never raises."""
    return attempt(_now)


def others_share(before: CpuMoment, after: CpuMoment) -> float | None:
    """The share of all processor threads that others used in between, 0 to 1; None if no time passed.

    The system counts in hundredths of a second: over less than a second the share is rough.

    Args:
        before: Earlier.
        after: Later.
    """
    room = (after.at - before.at) * (os.cpu_count() or 1)
    if room <= 0:
        return None
    used = (after.machine - before.machine) - (after.own - before.own)
    return min(max(used / room, 0.0), 1.0)


def _now() -> CpuMoment:
    times = psutil.cpu_times()._asdict()
    machine = sum(value for name, value in times.items() if name not in (*_IDLE, *_COUNTED_ELSEWHERE))
    return CpuMoment(time.monotonic(), machine, time.process_time())
