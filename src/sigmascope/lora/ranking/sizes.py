"""Sizes and shares as people write them: `100MB`, `5%`."""

import math
import re
from typing import Final

from sigmascope.errors import ConfigError

_UNITS: Final = {
    unit: 1024**power
    for power, units in enumerate([("", "B", "BYTE", "BYTES"), ("KB", "KIB"), ("MB", "MIB"), ("GB", "GIB")])
    for unit in units
}
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)")
_SHARE: Final = re.compile(rf"({_NUMBER})(?:[eE]([+-]?\d+))?\s*(%?)")


def parse_size(text: str, flag: str = "a size") -> int:
    """Read a file size.

    MB are MiB (SPEC): `100MB` and `100MiB` are both 100·1024² bytes. Units are B, KB, MB, GB and their binary
    names, in any case; a number alone is bytes. Parts of bytes are dropped.

    Args:
        text: Such as `100MB`, `1.5 GiB` or `104857600`.
        flag: What the user calls it, for the error.

    Raises:
        ConfigError: It is no size, or below one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ConfigError(f"{flag} {text} is no size.", hint="Write it as 100MB, 1.5GB or 104857600 (bytes).")
    size = float(found[1]) * unit
    if not 1 <= size < 2**63:
        raise ConfigError(f"{flag} {text} is no size that a file can have.", hint="Write it as 100MB.")
    return int(size)


def format_size(size: int) -> str:
    """A size in the largest unit that leaves at least 1: `86.3 MB`; MB are MiB."""
    for unit, factor in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size} bytes"


def parse_share(text: str, flag: str = "a share") -> float:
    """Read a share of a whole, as a fraction.

    Args:
        text: `5%` or `0.05`. Above 1 the percent sign is needed, since 5 could mean 5 % or 500 %.
        flag: What the user calls it, for the error.

    Returns:
        From 0 to 1.

    Raises:
        ConfigError: It is no share, or not between 0 and 1.
    """
    found = _SHARE.fullmatch(text.strip())
    value = float(f"{found[1]}e{found[2] or 0}") if found else math.nan
    share = value / 100 if found and found[3] else value
    if not 0 <= share <= 1:
        hint = f"Write {text}% or {value / 100:g}." if 1 < value <= 100 else "Write it as 5% or 0.05."
        raise ConfigError(f"{flag} {text} is no share of a whole.", hint=hint)
    return share
