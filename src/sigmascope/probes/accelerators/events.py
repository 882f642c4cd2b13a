"""Timing marks on a device's stream, made safe for a guest."""

from collections.abc import Callable
from typing import Any

from sigmascope.probes.reading import PROBE_ERRORS


class TimingEvent:
    """A torch event with timing enabled (`torch.cuda.Event` and its like).

    While a graph is being captured nothing is recorded or queried: the mark would become part of the
    graph, and a query would end the capture with an error.

    Args:
        event: The torch event.
        record: Puts it on the right stream.
        capturing: Whether the current stream is being captured into a graph.
    """

    __slots__ = ("_capturing", "_event", "_record", "_set")

    def __init__(
        self,
        event: Any,
        record: Callable[[Any], None],
        capturing: Callable[[], bool],
    ) -> None:
        self._event = event
        self._record = record
        self._capturing = capturing
        self._set = False

    def record(self) -> bool:
        """Set the mark after the work queued so far; False if it could not be set."""
        try:
            self._set = not self._capturing()
            if self._set:
                self._record(self._event)
        except PROBE_ERRORS:
            self._set = False
        return self._set

    def query(self) -> bool:
        """Whether the device has passed the mark. Does not wait."""
        try:
            return self._set and not self._capturing() and bool(self._event.query())
        except PROBE_ERRORS:
            return False

    def elapsed_seconds(self, end: "TimingEvent") -> float | None:
        """Device time from this mark to `end`; None unless both are set and passed."""
        if not (self.query() and end.query()):
            return None
        try:
            return float(self._event.elapsed_time(end._event)) / 1e3
        except PROBE_ERRORS:
            return None
