"""Figures as the seed's summary of a latent encoding writes them. What is unknown is a dash with its reason."""

from typing import TypeGuard

from sigmascope.stages.figures import mb, reason_for, unknown
from sigmascope.stages.shared_rows import Facts

_MB_IN_GB = 1024


def is_number(amount: object) -> TypeGuard[int | float]:
    """Whether it can be shown as a figure: a dict read from a file may hold anything."""
    return isinstance(amount, int | float) and not isinstance(amount, bool)


def size(facts: Facts, name: str) -> str:
    """MiB with two decimals, more digits for what is smaller than 0.1 MB."""
    amount = facts.get(name)
    if not is_number(amount):
        return unknown(reason_for(facts, name))
    return mb(amount) if 0 < amount < 0.1 else f"{amount:,.2f} MB"


def plain_mb(amount: object, decimals: int = 1) -> str:
    """MiB without thousands' commas, as the seed has memory."""
    return f"{amount:.{decimals}f} MB" if is_number(amount) else unknown()


def gb(amount_mb: object) -> str:
    """MiB as GiB with one decimal."""
    return f"{amount_mb / _MB_IN_GB:.1f} GB" if is_number(amount_mb) else unknown()


def seconds(facts: Facts, name: str) -> str:
    """Seconds with two decimals; three significant digits below 0.1."""
    amount = facts.get(name)
    return f"{_short(amount, 2)} seconds" if is_number(amount) else unknown(reason_for(facts, name))


def rate(facts: Facts, name: str, unit: str) -> str:
    """A figure by second with one decimal."""
    amount = facts.get(name)
    return f"{_short(amount, 1)} {unit}/second" if is_number(amount) else unknown(reason_for(facts, name))


def count(facts: Facts, name: str) -> str:
    """A whole number with commas."""
    amount = facts.get(name)
    return f"{amount:,.0f}" if is_number(amount) else unknown(reason_for(facts, name))


def times(facts: Facts, name: str, nominal: str) -> str:
    """A ratio such as 64.0x, with the VAE's own where that is another."""
    amount, told = facts.get(name), facts.get(nominal)
    if not is_number(amount):
        return unknown(reason_for(facts, name))
    differs = is_number(told) and f"{told:.1f}" != f"{amount:.1f}"
    return f"{amount:.1f}x (nominal {told:g}x)" if differs else f"{amount:.1f}x"


def signed_mb(amount: object, percent: object) -> str:
    """A change in MiB with its percentage."""
    share = f" ({percent:+.1f}%)" if is_number(percent) else ""
    return f"{amount:+.1f} MB{share}" if is_number(amount) else unknown()


def at(amount_mb: object, at_seconds: object) -> str:
    """A peak and when it was."""
    return f"{plain_mb(amount_mb)} at {at_seconds:.2f}s" if is_number(at_seconds) else plain_mb(amount_mb)


def _short(amount: int | float, decimals: int) -> str:
    return f"{amount:.3g}" if 0 < amount < 0.1 else f"{amount:,.{decimals}f}"


def dimensions(video: Facts) -> str:
    """Frames and picture, width first, as in 832x480."""
    length, height, width = (video.get(name) for name in ("length", "height", "width"))
    frames = f"{length:,} frame{'' if length == 1 else 's'}" if is_number(length) else "unknown frames"
    picture = f"{width}x{height}" if is_number(width) and is_number(height) else "unknown size"
    return f"{frames}, {picture}"


def strategy(name: object, number: object) -> str:
    """A strategy's name with its number behind it, once."""
    shown = str(name)
    return f"{shown} (Strategy {number})" if is_number(number) and "(Strategy" not in shown else shown
