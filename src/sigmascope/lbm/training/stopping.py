"""Stopping in peace: SIGTERM and Ctrl-C end training after the step at hand, with a checkpoint."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Literal

from sigmascope.lbm.training.distributed import Team

StopReason = Literal["SIGTERM", "SIGINT"]
_SIGNALS: dict[int, StopReason] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
EXIT_CODES: dict[StopReason, int] = {reason: 128 + number for number, reason in _SIGNALS.items()}
"""As shells report a process that a signal ended."""


class StopSignals:
    """Within its `with` block the first SIGTERM or Ctrl-C only sets `reason`; a second Ctrl-C interrupts at once.

    Signals reach the main thread alone: in another one the block changes nothing, and `request` remains.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self._before: dict[int, Any] = {}

    def request(self, reason: StopReason) -> None:
        """Ask for the end, as a signal does."""
        self.reason = self.reason or reason

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.request(_SIGNALS[number])


def agreed_reason(stop: StopSignals, team: Team) -> StopReason | None:
    """What any process was told to stop for: all call this together and stop together."""
    told = -1 if stop.reason is None else list(EXIT_CODES).index(stop.reason)
    most = max(row[0] for row in team.gather([told]))
    return None if most < 0 else list(EXIT_CODES)[most]
