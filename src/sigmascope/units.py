"""Numbers as people read them, for every room: MiB, seconds, counts, shares. What is unknown is a dash."""

import math

MIB = 1024**2
UNKNOWN = "-"


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
    """A signed change in MiB with one decimal, without the unit."""
    return f"{amount:+,.1f}"


def seconds(value: int | float | None) -> str:
    """A duration with three digits and the unit that suits it: µs, ms or s; a dash for what is no finite number."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value > 0 and value * factor < 999.5:
            return f"{_three_digits(value * factor)} {unit}"
    return f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def number(value: int | float | None) -> str:
    """A count in full, another number with four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def statistic(value: int | float | None) -> str:
    """A number with three significant digits, for narrow columns."""
    return UNKNOWN if value is None else f"{value:.3g}"


def percent(part: int | float, whole: int | float) -> str:
    """A share of a whole in per cent, without decimals; a dash if the whole is nothing."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else UNKNOWN
