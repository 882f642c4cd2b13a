"""Rank policies as text: `64`, `fixed:32,conv=16`, `full`, `sv_fro:0.9,max=64`, `energy:95%`."""

import re
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.rank_methods import METHODS, MethodRank
from sigmascope.lora.ranks import FULL_RANK, FixedRank, RankPolicy

_FIXED_NAMES: Final = ("fixed", "standard")
"""What LyCORIS and KJNodes call a fixed rank."""
_SETTINGS: Final = ("conv", "max", "max_conv", "min")
_EXAMPLES: Final = "Write a rank (64), full, or a method with its parameter (energy:0.95, sv_fro:0.9,max=64)."


def parse_policy(text: str, flag: str = "--rank_method") -> RankPolicy:
    """Read a policy; the inverse of `describe` of `FixedRank` and `MethodRank`.

    `<rank>` or `fixed:<rank>[,conv=<rank>]` or `full` or
    `<method>:<parameter>[,conv=<parameter>][,max=<rank>][,max_conv=<rank>][,min=<rank>]`.
    Parameters may be percentages.

    Args:
        text: The policy.
        flag: What the user calls it, for the error.

    Raises:
        ConfigError: It names no method, or a value makes no sense.
    """
    head, *rest = text.strip().split(",")
    settings = _settings(text, rest, flag)
    name, _, value = head.partition(":")
    if name.isdigit() and not value:
        name, value = "fixed", name
    try:
        if name == "full" and not value and not settings:
            return FixedRank(FULL_RANK, FULL_RANK)
        if name in _FIXED_NAMES:
            return _fixed(value, settings)
        return _method(name, value, settings)
    except ConfigError as error:
        raise ConfigError(f"{flag} {text}: {error.message}", hint=error.hint) from error


def _settings(text: str, parts: list[str], flag: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in parts]
    settings = {name.strip(): value.strip() for name, _, value in pairs}
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown or len(settings) < len(parts):
        what = f"{unknown[0]} is not known" if unknown else "a setting is given twice"
        raise ConfigError(f"{flag} {text}: {what}.", hint=f"After a comma, use: {', '.join(_SETTINGS)}.")
    return settings


def _fixed(value: str, settings: dict[str, str]) -> FixedRank:
    if settings.keys() - {"conv"}:
        raise ConfigError("a fixed rank has no limits.", hint="Leave out max, max_conv and min.")
    rank = _rank("a rank", value)
    return FixedRank(rank, _rank("conv", settings.get("conv", value)))


def _method(name: str, value: str, settings: dict[str, str]) -> MethodRank:
    if name not in METHODS:
        raise ConfigError(f"{name or 'nothing'} is no rank method.", hint=f"Methods: {', '.join(METHODS)}.")
    limits = {key: _rank(key, settings[key]) for key in ("max", "max_conv", "min") if key in settings}
    return MethodRank(
        name,
        _parameter(name, value),
        conv_parameter=_parameter("conv", settings["conv"]) if "conv" in settings else None,
        max_rank=limits.get("max"),
        max_conv_rank=limits.get("max_conv"),
        min_rank=limits.get("min", 1),
    )


def _parameter(name: str, text: str) -> float:
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / 100 if percent else float(number)
    except ValueError as error:
        raise ConfigError(f"{name} needs a number, not {text!r}.", hint=_EXAMPLES) from error


def _rank(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ConfigError(f"{name} must be a whole number, not {text!r}.", hint=_EXAMPLES)
    return int(text)
