"""A monitor's own failures stay its own: they become a reason in the record, never the host's problem.

What the host hands over becomes plain JSON values (`as_json`), so that nothing of it stays alive,
and a number that makes no sense a clear refusal (`whole_number`).
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, SupportsInt, TypeVar, cast

import numpy as np
import torch

from sigmascope.errors import ConfigError
from sigmascope.probes.reading import Reading, error_text, exception_details, keeping_words
from sigmascope.records.run import ExceptionDetails
from sigmascope.units import printable

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

# How much `as_json` keeps: levels of nesting, and characters of a text.
_DEEPEST = 12
_LONGEST_TEXT = 500


class Guard:
    """Which instruments still work, and why the others do not.

    An instrument that fails once is switched off for the rest of the run, so that a broken probe costs one
    failure and one log line and not one a step.

    Args:
        keeps_words: Whether reasons repeat what exceptions say, which may quote a prompt.
    """

    __slots__ = ("_logged", "keeps_words", "reasons")

    def __init__(self, *, keeps_words: bool = True) -> None:
        self._logged: set[str] = set()
        self.keeps_words = keeps_words
        self.reasons: dict[str, str] = {}

    def works(self, instrument: str) -> bool:
        """Whether the instrument has not failed yet."""
        return instrument not in self.reasons

    def switch_off(self, instrument: str, failure: Exception) -> None:
        """Stop using the instrument, and keep the reason."""
        if instrument in self.reasons:
            return
        self.reasons[instrument] = reason = self.describe(failure)
        self._log_once(instrument, "is switched off for this run", reason)

    def _log_once(self, instrument: str, what: str, reason: str) -> None:
        if instrument in self._logged:
            return
        self._logged.add(instrument)
        log_quietly(_log, "%s %s: %s", instrument, what, reason)

    def describe(self, failure: BaseException) -> str:
        """Return what is kept of an exception; its type alone where there is no memory for more."""
        try:
            with keeping_words(self.keeps_words):
                return error_text(failure)
        except Exception:  # noqa: BLE001 - nothing stands between this and the host
            return type(failure).__name__

    def details(self, error: BaseException) -> ExceptionDetails:
        """Return what is kept of an exception with its stack; nothing of it stays alive."""
        with keeping_words(self.keeps_words):
            return exception_details(error)

    def read(self, instrument: str, probe: Callable[[], Result]) -> Result | None:
        """Return what the probe gives, or None where it fails; `reading` says why.

        For probes of the host's own objects: one odd object says nothing about the next one, so nothing
        is switched off. Only the first failure is logged.
        """
        try:
            if (
                self.keeps_words
            ):  # no block of `keeping_words` is needed, which is half of what a cheap probe costs
                return probe()
            with keeping_words(False):
                return probe()
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            self._log_once(instrument, "could not read something", self.describe(failure))
            return None

    def reading(self, instrument: str, probe: Callable[[], Result]) -> Reading[Result]:
        """Return what the probe gives, or None and why it failed, as `read` does."""
        try:
            with keeping_words(self.keeps_words):
                return Reading(probe())
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            reason = self.describe(failure)
            self._log_once(instrument, "could not read something", reason)
            return Reading(None, reason)

    def call(self, instrument: str, probe: Callable[[], Result]) -> Result | None:
        """Return what the probe gives, or None when it is switched off or fails now."""
        if instrument in self.reasons:
            return None
        try:
            return probe()
        except Exception as failure:  # noqa: BLE001 - whatever an instrument raises must not reach the host
            self.switch_off(instrument, failure)
            return None


def to_the_end(act: Callable[[BaseException | None], object], error: BaseException | None) -> None:
    """Close or take off something, and again if Ctrl-C breaks into that; then the Ctrl-C goes on.

    Args:
        act: It leaves alone what it has done before, and is told what ended the host's block.
        error: What ended it; None: nothing.
    """
    try:
        act(error)
    except Exception:
        raise
    except BaseException as interruption:
        with suppress(Exception):  # nothing may take the place of Ctrl-C
            act(error or interruption)
        raise


def log_quietly(log: logging.Logger, message: str, *values: object, level: int = logging.WARNING) -> None:
    """Log in the host's path: its handlers and filters are its own, and may fail."""
    with suppress(Exception):
        log.log(level, message, *(printable(value) if isinstance(value, str) else value for value in values))


def as_json(value: object, depth: int = 0) -> Any:
    """Return the value as str, int, float, bool, None, list or dict with str keys.

    NaN and the infinities stay: a saved run keeps them. A tensor becomes its shape, dtype and device, since
    reading its values could wait for the accelerator. What has no JSON form becomes its text, cut at 500
    characters; what is nested deeper than 12 levels (or in itself) becomes the name of its type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth < _DEEPEST and kind is dict:
        return _dict_as_json(cast(dict[object, object], value), depth + 1)
    plain = _scalar(value)
    if plain is not _NO_SCALAR:
        return plain
    if depth < _DEEPEST:
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            return _dict_as_json(value, depth + 1)
        if isinstance(value, AbstractSet):
            return sorted((as_json(item, depth + 1) for item in value), key=repr)
        if isinstance(value, list | tuple):
            return [as_json(item, depth + 1) for item in value]
        if isinstance(value, np.ndarray):
            if value.size > _LONGEST_TEXT:
                return f"<array {value.shape} {value.dtype}>"
            return as_json(value.tolist(), depth + 1)
    return _short(str(value)) if depth < _DEEPEST else f"<{type(value).__name__}>"


_PLAIN: Final = frozenset({str, int, bool, float, type(None)})


def _dict_as_json(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    """Most items are plain, and are taken as they are without a call."""
    return {
        key if type(key) is str else _key(key): (item if type(item) in _PLAIN else as_json(item, depth))
        for key, item in value.items()
    }


def _scalar(value: object) -> Any:
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, np.generic):
        return as_json(value.item())
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "device": str(value.device)}
    if isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    return _NO_SCALAR


_NO_SCALAR = object()


def _key(key: object) -> str:
    return key if type(key) is str else _short(str(key))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def whole_number(name: str, value: object, *, least: int = 0, none_is: int = 0) -> int:
    """A count as an int; None is `none_is`, unless that is less than `least`.

    Raises:
        ConfigError: It is not a whole number, or is too small.
    """
    if value is None and none_is >= least:
        return none_is
    try:
        number = None if isinstance(value, str) else int(cast(SupportsInt, value))
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or number != value or number < least:
        raise ConfigError(f"{name} is {value!r:.60}.", hint=f"Give a whole number, {least} or more.")
    return number
