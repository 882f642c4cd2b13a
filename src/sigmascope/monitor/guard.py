"""A monitor's own failures stay its own: they become a reason in the record, never the host's problem."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


def describe(failure: BaseException) -> str:
    """Return `Type: message`, even for an exception whose own `__str__` fails."""
    try:
        message = str(failure)
    except Exception:  # noqa: BLE001 - any class may have written that __str__
        message = "(its message cannot be read)"
    return f"{type(failure).__name__}: {message}" if message else type(failure).__name__


class Guard:
    """Which instruments still work, and why the others do not.

    An instrument that fails once is switched off for the rest of the run, so that a broken probe costs one
    failure and one log line and not one a step.
    """

    __slots__ = ("_logged", "reasons")

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self.reasons: dict[str, str] = {}

    def works(self, instrument: str) -> bool:
        """Tell whether the instrument has not failed yet."""
        return instrument not in self.reasons

    def switch_off(self, instrument: str, failure: Exception) -> None:
        """Use the instrument no more and keep the reason."""
        if instrument in self.reasons:
            return
        self.reasons[instrument] = reason = describe(failure)
        self._log_once(instrument, "is switched off for this run", reason)

    def _log_once(self, instrument: str, what: str, reason: str) -> None:
        if instrument in self._logged:
            return
        self._logged.add(instrument)
        with suppress(Exception):  # a logging handler belongs to the host and may fail
            _log.warning("%s %s: %s", instrument, what, reason)

    def read(self, instrument: str, probe: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """Return what the probe gives, or None and why it failed.

        For probes of the host's own objects: one odd object says nothing about the next one, so nothing
        is switched off. Only the first failure is logged.
        """
        try:
            return probe(), None
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            reason = describe(failure)
            self._log_once(instrument, "could not read something", reason)
            return None, reason

    def call(self, instrument: str, probe: Callable[[], Result]) -> Result | None:
        """Return what the probe gives, or None when it is switched off or fails now."""
        if instrument in self.reasons:
            return None
        try:
            return probe()
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            self.switch_off(instrument, failure)
            return None
