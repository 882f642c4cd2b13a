"""Numbers as people read and write them: MiB, seconds, moments, counts, shares. What is unknown is a dash.

Terminals and logs obey control characters; `printable` makes text from files safe to show there. `parse_size` and
`parse_share` read what users write.
"""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.plain_text import printable as printable

MIB = 1024**2
UNKNOWN = "-"

# What `parse_size` and `parse_share` understand.
_UNITS: Final = {
    unit: 1024**power
    for power, units in enumerate([("", "B", "BYTE", "BYTES"), ("KB", "KIB"), ("MB", "MIB"), ("GB", "GIB")])
    for unit in units
}
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)")
_SHARE: Final = re.compile(rf"({_NUMBER})(?:[eE]([+-]?\d+))?\s*(%?)")


def mib(nbytes: int | None) -> str:
    """Bytes as MiB, without the unit; see `mebibytes`."""
    return UNKNOWN if nbytes is None else mebibytes(nbytes / MIB)


def mebibytes(amount: int | float) -> str:
    """MiB with one decimal, two below 10, three significant digits below 0.1; without the unit."""
    size = abs(amount)
    if size >= 10 or size == 0:
        return f"{amount:,.1f}"
    return f"{amount:.2f}" if size >= 0.1 else f"{amount:.3g}"


def mib_change(before: int | None, after: int | None) -> str:
    """The signed difference of two numbers of bytes in MiB, without the unit; a dash when either is unknown."""
    return UNKNOWN if before is None or after is None else mebibytes_change((after - before) / MIB)


def mebibytes_change(amount: int | float) -> str:
    """A signed change in MiB with one decimal, without the unit; see `signed`."""
    return signed(amount)


def signed(amount: int | float, decimals: int = 1) -> str:
    """A change with its sign, of which the minus is the hyphen that programs write; what rounds to zero has none."""
    text = f"{amount:+,.{decimals}f}"
    return text if text.strip("+-0.") else text[1:]


def seconds(value: int | float | None) -> str:
    """A duration with three digits and the unit that suits it: µs, ms or s; a dash for what is none: None, NaN, less than 0."""
    if value is None or not math.isfinite(value) or value < 0:
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value > 0 and value * factor < 999.5:
            return f"{_three_digits(value * factor)} {unit}"
    return f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def seconds_change(value: int | float) -> str:
    """A change of a duration with its sign, as `seconds` writes it: `-7.00 ms`; see `signed`."""
    if value == 0:
        return seconds(0.0)
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def time_to_come(value: int | float | None) -> str:
    """A duration that is an estimate, or goes on: whole seconds, minutes or hours, as in "3 h 2 min"."""
    if value is None or not math.isfinite(value) or value < 0:
        return UNKNOWN
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def took(value: int | float | None) -> str:
    """What something took, such as "took 2.45 s"; in words, too, where that is not known."""
    shown = seconds(value)
    return "its time is not recorded" if shown == UNKNOWN else f"took {shown}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def local_time(moment: str) -> str:
    """A moment in ISO 8601 in the user's own time zone, to the minute."""
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def number(value: int | float | None) -> str:
    """A count in full, another number with four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def statistic(value: int | float | None) -> str:
    """A number with three significant digits, for narrow columns."""
    return UNKNOWN if value is None else f"{value:.3g}"


def percent(part: int | float, whole: int | float) -> str:
    """A share of a whole in per cent, without decimals; a dash if the whole is nothing, or one of both cannot be a share."""
    is_share = whole > 0 and part >= 0 and math.isfinite(part) and math.isfinite(whole)
    return f"{100 * part / whole:.0f} %" if is_share else UNKNOWN


_ENDLESS: Final = 1e12


def rough_percent(share: float, digits: int = 2) -> str:
    """A share in per cent with so many significant digits, or more for a whole number: `2.3 %`, `104 %`, `1,636 %`, `2.1e+63 %`."""
    value = 100 * share
    rounded = float(f"{value:.{digits}g}")
    return f"{value:,.0f} %" if 10**digits <= abs(rounded) < _ENDLESS else f"{rounded:.{digits}g} %"


def with_noise(noise: float, size: str) -> str:
    """The noise of what arrived of a change, in words: `with noise of 12 % of its size`.

    Args:
        noise: Its norm as a share of that of what was to arrive.
        size: The same in words, such as `12 % of` or `15 times`.
    """
    return "with no noise to speak of" if noise < _NO_NOISE else f"with noise of {size} its size"


_NO_NOISE: Final = 0.005
"""A share below which whole per cents say 0."""


def percent_change(share: float, decimals: int = 1) -> str:
    """A change as a share, in per cent with its sign: `+41.9 %`; see `signed`."""
    return f"{signed(100 * share, decimals)} %"


def times(ratio: float) -> str:
    """A ratio as people say it: `1.52 ×`, `12.5 ×`, `1,013 ×`."""
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:,.{digits}f} ×"


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 tensor`, `2,000 tensors`.

    Args:
        number: How many.
        one: The words after 1, which may include a verb: `module has`.
        many: The words after any other number; without it, `one` with an s.
    """
    return f"1 {one}" if number == 1 else f"{number:,} {many or f'{one}s'}"


def first_few(texts: Sequence[str], most: int = 5, *, between: str = ", ") -> str:
    """The first of several texts, and how many more there are."""
    more = f"{between.rstrip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def parse_size(text: str, flag: str = "a size") -> int:
    """Read a file size.

    MB are MiB: `100MB` and `100MiB` are both 100·1024² bytes. Units are B, KB, MB, GB and their binary
    names, in any case; a number alone is bytes. Parts of bytes are dropped.

    Args:
        text: Such as `100MB`, `1.5 GiB` or `104857600`.
        flag: What the user calls it, for the error.

    Raises:
        ConfigError: It is not a size, or below one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ConfigError(
            f"{flag} {text} is not a size.", hint="Write it as 100MB, 1.5GB or 104857600 (bytes)."
        )
    size = float(found[1]) * unit
    if not 1 <= size < 2**63:
        raise ConfigError(f"{flag} {text} is not a size that a file can have.", hint="Write it as 100MB.")
    return int(size)


def format_size(size: int) -> str:
    """A size in the largest unit that leaves at least 1: `86.3 MB`; MB are MiB."""
    for unit, factor in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size} byte" if size == 1 else f"{size} bytes"


def parse_share(text: str, flag: str = "a share", most: float = 1.0) -> float:
    """Read a share of a whole, as a fraction.

    Args:
        text: `5%` or `0.05`. Above 1 the percent sign is needed, since 5 could mean 5 % or 500 %.
        flag: What the user calls it, for the error.
        most: The largest that makes sense: more than 1 for a limit of growth, such as 150%.

    Returns:
        From 0 to `most`.

    Raises:
        ConfigError: It is not a share, or not between 0 and `most`.
    """
    found = _SHARE.fullmatch(text.strip())
    value = float(f"{found[1]}e{found[2] or 0}") if found else math.nan
    share = value / 100 if found and found[3] else value
    if not 0 <= share <= (most if found and found[3] else 1):
        hint = f"Write {text}% or {value / 100:g}." if 1 < value <= 100 else "Write it as 5% or 0.05."
        raise ConfigError(f"{flag} {text} is not a share of a whole.", hint=hint)
    return share
