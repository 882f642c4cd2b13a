"""When a run begins and when it is over."""

from datetime import UTC, datetime, timedelta

from sigmascope.monitor import peaks
from sigmascope.monitor.instruments import Clock
from sigmascope.monitor.steps import StepColumns


class RunExtent:
    """From the first thing that is opened to the end of the last.

    Args:
        clock: Monotonic nanoseconds.

    Attributes:
        open_frames: How much is open now.
        broke_off: Whether an exception ended what was closed last.
    """

    def __init__(self, clock: Clock) -> None:
        self.open_frames = 0
        self.broke_off = False
        self._clock = clock
        self._made_at = (datetime.now(UTC), clock())
        self._started_ns: int | None = None
        self._ended_ns = 0

    def begin(self) -> None:
        """Count one more that is open."""
        with peaks.LOCK:
            if self._started_ns is None:
                self._started_ns = self._clock()
            self.open_frames += 1

    def end(self, error: BaseException | None) -> None:
        """Count one less.

        Args:
            error: What ended it early.
        """
        with peaks.LOCK:
            self.open_frames -= 1
            self._ended_ns = self._clock()
            self.broke_off = error is not None

    def edges(self, outside: StepColumns) -> tuple[int, int]:
        """Beginning and end of all that was recorded, in nanoseconds of the clock.

        Args:
            outside: Steps that ran outside all stages.
        """
        now_ns = self._clock()
        first_ns = now_ns if self._started_ns is None else self._started_ns
        steps_began_ns, steps_ended_ns = outside.edges() or (now_ns, self._ended_ns)
        started_ns = min(steps_began_ns, first_ns)
        ended_ns = now_ns if self.open_frames > 0 else steps_ended_ns
        return started_ns, max(ended_ns, self._ended_ns, started_ns)

    def wall_clock(self, at_ns: int) -> str:
        """A moment of the clock as a date, in ISO 8601."""
        made_at, made_ns = self._made_at
        return (made_at + timedelta(microseconds=(at_ns - made_ns) / 1e3)).isoformat()
