"""How much the error of each layer counts under a budget."""

import math
from collections.abc import Iterable
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.layer_patterns import matches, require_pattern
from sigmascope.lora.ranking.rank_rules import split_patterns

WEIGHT_FOR: Final = "--weight_for"
Weights = tuple[tuple[str, float], ...]
"""(pattern, weight); of several patterns that match a layer, the last wins."""


def parse_weights(texts: Iterable[str]) -> Weights:
    """Read weights such as `mid_block=2`.

    Raises:
        ConfigError: One is not of that form.
    """
    weights = []
    for pattern, value in split_patterns(texts, WEIGHT_FOR):
        try:
            weights.append((pattern, float(value)))
        except ValueError as error:
            raise ConfigError(
                f"{WEIGHT_FOR} {pattern}={value} is no weight.", hint="Use 0 or more, such as 2."
            ) from error
    require_weights(tuple(weights))
    return tuple(weights)


def require_weights(weights: Weights) -> None:
    """Refuse patterns that are no regular expressions, and weights below 0 or without end.

    Raises:
        ConfigError: With the pattern.
    """
    for pattern, weight in weights:
        require_pattern(pattern, WEIGHT_FOR)
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ConfigError(
                f"{WEIGHT_FOR} {pattern}={weight:g} is no weight.", hint="Use 0 or more, such as 2."
            )


def weight_of(layer: str, weights: Weights) -> float:
    """How often the squared error of a layer counts: once where no pattern matches."""
    return next((weight for pattern, weight in reversed(weights) if matches(pattern, layer)), 1.0)
