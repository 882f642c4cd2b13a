"""Regular expressions that pick layers by path, and help for those that pick none."""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Final

from sigmascope.errors import ConfigError

_NEAREST: Final = 3


def require_pattern(pattern: str, flag: str) -> None:
    """Refuse what is no regular expression, or an empty one, which would pick every layer.

    Raises:
        ConfigError: With the flag, the pattern and what is wrong with it.
    """
    if not pattern:
        raise ConfigError(f"{flag} has no pattern.", hint="Write one such as 'up_blocks.*attn1'.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{flag} {pattern!r} is no regular expression: {error}.",
            hint="Put a backslash before a sign that is meant as it stands, such as \\( or \\[.",
        ) from error


def matches(pattern: str, layer: str) -> bool:
    """Whether a pattern is found anywhere in a layer's path."""
    return re.search(pattern, layer) is not None


def require_matches(pattern: str, layers: Sequence[str], flag: str) -> None:
    """Refuse a pattern that is found in no layer: it is a typing error, not a wish.

    Raises:
        ConfigError: With the layers whose names come nearest.
    """
    if any(matches(pattern, layer) for layer in layers):
        return
    nearest = nearest_layers(pattern, layers)
    raise ConfigError(
        f"{flag} {pattern!r} matches none of the {len(layers)} layers.",
        hint=f"The nearest are {', '.join(nearest)}." if nearest else "The model has no layers.",
    )


def nearest_layers(pattern: str, layers: Iterable[str]) -> list[str]:
    """The few layers whose names have the pieces most like the pattern's, nearest first."""
    wanted = _pieces(pattern)
    likeness: dict[tuple[str, str], float] = {}

    def like(piece: str, part: str) -> float:
        if (piece, part) not in likeness:
            likeness[piece, part] = SequenceMatcher(None, piece, part, autojunk=False).ratio()
        return likeness[piece, part]

    def distance(layer: str) -> tuple[float, int]:
        parts = _pieces(layer) or [layer]
        return -sum(max(like(piece, part) for part in parts) for piece in wanted), len(layer)

    return sorted(layers, key=distance)[:_NEAREST]


def _pieces(text: str) -> list[str]:
    return [piece for piece in re.split(r"[\W_]+", text) if piece]
