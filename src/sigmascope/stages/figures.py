"""Figures and texts as a summary prints them. What is unknown is a dash, with the reason if there is one.

A dict read from a file may hold anything where a figure should be. The figures are those of `sigmascope.units`.
"""

import unicodedata
from collections.abc import Mapping
from typing import TypeGuard

from sigmascope import units
from sigmascope.units import UNKNOWN

_LONGEST_TEXT = 400
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")


def unknown(reason: str | None = None) -> str:
    """A dash, with the reason in parentheses."""
    return f"{UNKNOWN} ({printable(reason)})" if reason else UNKNOWN


def reason_for(facts: Mapping[str, object], name: str) -> str | None:
    """Why a figure is not there, from the `unavailable` of its dict."""
    reasons = facts.get("unavailable")
    reason = reasons.get(name) if isinstance(reasons, Mapping) else None
    return reason if isinstance(reason, str) else None


def mb(amount: object, reason: str | None = None) -> str:
    """MiB, as the seeds call MB."""
    return f"{units.mebibytes(amount)} MB" if _is_number(amount) else unknown(reason)


def mb_change(amount: object, percent: object = None) -> str:
    """A signed change in MiB, with its percentage if that is known."""
    if not _is_number(amount):
        return UNKNOWN
    share = f" ({percent:+.1f} %)" if _is_number(percent) else ""
    return f"{units.mebibytes_change(amount)} MB{share}"


def seconds(amount: object, reason: str | None = None) -> str:
    """A duration with the unit that suits it."""
    return units.seconds(amount) if _is_number(amount) else unknown(reason)


def number(amount: object, reason: str | None = None) -> str:
    """A count in full, another number with four significant digits."""
    return units.number(amount) if _is_number(amount) else unknown(reason)


def shape(sizes: object, reason: str | None = None) -> str:
    """A shape as torch writes it."""
    if not isinstance(sizes, list | tuple):
        return unknown(reason)
    return "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"


def printable(text: object, longest: int = _LONGEST_TEXT) -> str:
    r"""Foreign text for a terminal: on one line, cut, and whatever could act on the terminal as `\x1b`."""
    shown = str(text)
    rest = f"… ({len(shown):,} characters)" if len(shown) > longest else ""
    return "".join(map(_printable, shown[:longest])) + rest


def _printable(character: str) -> str:
    if character in _HARMLESS_FORMAT:
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character


def _is_number(amount: object) -> TypeGuard[int | float]:
    return isinstance(amount, int | float) and not isinstance(amount, bool)
