"""How many steps a generation has done, how long they took, and where they lead."""

from collections import deque
from typing import Final

from sigmascope.analysis.score import projected_seconds

RECENT_STEPS: Final = 5
"""How many of the last steps the projection takes the mean of."""


class StepTally:
    """Sums in whole nanoseconds, so that adding and taking away never drifts. Not locked.

    Attributes:
        count: Steps so far.
        first_ns: When the first began, on the recorder's clock; None: none has ended yet.
        ended_ns: When the last ended.
    """

    __slots__ = ("_recent", "_recent_ns", "_total_ns", "count", "ended_ns", "first_ns")

    def __init__(self) -> None:
        self.count = 0
        self.first_ns: int | None = None
        self.ended_ns: int | None = None
        self._total_ns = 0
        self._recent: deque[int] = deque()
        self._recent_ns = 0

    def add(self, started_ns: int, ended_ns: int) -> None:
        """Count a step: the hot path."""
        step_ns = ended_ns - started_ns
        recent = self._recent
        if self.count >= RECENT_STEPS:
            self._recent_ns -= recent.popleft()
        elif self.first_ns is None:
            self.first_ns = started_ns
        recent.append(step_ns)
        self._recent_ns += step_ns
        self._total_ns += step_ns
        self.ended_ns = ended_ns
        self.count += 1

    def mean_seconds(self) -> float | None:
        """Of all steps; None without any."""
        return self._total_ns / self.count / 1e9 if self.count else None

    def recent_seconds(self) -> float | None:
        """Mean of the last few; None without any."""
        return self._recent_ns / len(self._recent) / 1e9 if self._recent else None

    def projected_seconds(self, elapsed_ns: int, planned: int) -> float:
        """Where the generation will end: what has elapsed, and the last steps' mean for each that is left.

        Args:
            elapsed_ns: Since it began.
            planned: Steps in all; what has elapsed is the answer when none is left, or none was done.
        """
        recent_ns = self._recent_ns / (len(self._recent) or 1)
        return projected_seconds(elapsed_ns / 1e9, recent_ns / 1e9, planned - self.count)
