"""Numbers as people read them: MiB, seconds, percentages. What is unknown is a dash."""

MIB = 1024**2
UNKNOWN = "-"


def mib(nbytes: int | None) -> str:
    """Return bytes as MiB with one decimal (two below 1 MiB), or a dash."""
    if nbytes is None:
        return UNKNOWN
    amount = nbytes / MIB
    return f"{amount:,.2f}" if 0 < abs(amount) < 1 else f"{amount:,.1f}"


def mib_change(before: int | None, after: int | None) -> str:
    """Return the signed difference in MiB, or a dash when either side is unknown."""
    if before is None or after is None:
        return UNKNOWN
    return f"{(after - before) / MIB:+,.1f}"


def seconds(value: float | None) -> str:
    """Return a duration with three digits and the unit that suits it: µs, ms or s."""
    if value is None:
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value > 0 and value * factor < 999.5:
            return f"{_three_digits(value * factor)} {unit}"
    return f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def number(value: float | None) -> str:
    """Return a statistic with three significant digits, or a dash."""
    return UNKNOWN if value is None else f"{value:.3g}"
