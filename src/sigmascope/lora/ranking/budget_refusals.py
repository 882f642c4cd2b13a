"""What is said of a budget that cannot be met, with the nearest one that can."""

import math
from typing import NoReturn

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.sizes import format_size


def refuse_size(max_bytes: int, needed: int) -> NoReturn:
    """Refuse a file size that not even the least content fits in.

    Raises:
        ConfigError: With the least size.
    """
    raise ConfigError(
        f"--max_size {format_size(max_bytes)} is too small: what must be in the file takes {needed} bytes.",
        hint=f"Give at least {needed}, or lower the ranks that are set.",
    )


def refuse_rounding(max_error: float, rounding: float) -> NoReturn:
    """Refuse an error that storage precision alone exceeds.

    Raises:
        ConfigError: With the least error.
    """
    raise ConfigError(
        f"--max_error {_percent(max_error)} is below what rounding to storage precision costs, "
        f"{_percent(rounding)}.",
        hint=f"Ask for {_above(rounding)}, or store with --save_precision float.",
    )


def refuse_storage(max_error: float, left: float) -> NoReturn:
    """Refuse an error that factors in storage precision exceed whatever their ranks.

    Raises:
        ConfigError: With the error that they leave.
    """
    raise ConfigError(
        f"--max_error {_percent(max_error)} cannot be met: factors in storage precision leave {_percent(left)}.",
        hint="Store with --save_precision float, or ask for a larger error.",
    )


def refuse_error(max_error: float, least: float) -> NoReturn:
    """Refuse an error that the ranks which are set or limited exceed.

    Raises:
        ConfigError: With the least error.
    """
    raise ConfigError(
        f"--max_error {_percent(max_error)} cannot be met: the ranks that are set or limited leave "
        f"{_percent(least)}.",
        hint=f"Ask for {_above(least)}, or allow higher ranks.",
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _above(share: float) -> str:
    """The percentage of three digits just above a share, which works when it is typed in."""
    digits = max(2 - math.floor(math.log10(share * 100)), 0)
    scaled = math.floor(share * 100 * 10**digits) + 1
    return f"{scaled / 10**digits:.{digits}f}%"
