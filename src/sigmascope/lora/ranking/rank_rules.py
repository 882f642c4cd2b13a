"""Which rank policy each layer gets: one for all, others for layers whose path matches a pattern."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.layer_patterns import matches, require_matches, require_pattern
from sigmascope.lora.ranking.rank_spec import parse_policy
from sigmascope.lora.ranks import RankPolicy

_RANK_FOR: Final = "--rank_for"
_EXCLUDE: Final = "--exclude"


@dataclass(frozen=True)
class RankRules:
    """The policy of every layer.

    Patterns are regular expressions, searched for anywhere in the layer's path: `up_blocks.*attn1`.

    Attributes:
        default: For layers that no override matches.
        overrides: (pattern, policy); of several that match, the last wins.
        excluded: Patterns of layers that are left out, whatever the overrides say.

    Raises:
        ConfigError: A pattern is no regular expression.
    """

    default: RankPolicy
    overrides: tuple[tuple[str, RankPolicy], ...] = ()
    excluded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern, _ in self.overrides:
            require_pattern(pattern, _RANK_FOR)
        for pattern in self.excluded:
            require_pattern(pattern, _EXCLUDE)

    def policy_for(self, layer: str, weight_shape: Sequence[int]) -> RankPolicy | None:
        """The policy of a layer; None when it is excluded.

        Args:
            layer: Its path, such as `denoiser.mid_block.attentions.0.proj_in`.
            weight_shape: Of its weight; policies themselves tell Linear from convolution.
        """
        if self.is_excluded(layer):
            return None
        return self.override_for(layer) or self.default

    def is_excluded(self, layer: str) -> bool:
        """Whether a layer is left out."""
        return any(matches(pattern, layer) for pattern in self.excluded)

    def override_for(self, layer: str) -> RankPolicy | None:
        """The policy of the last override that matches; None where the default holds.

        A global budget takes the place of the default, so overrides stand beside it.
        """
        found = (policy for pattern, policy in reversed(self.overrides) if matches(pattern, layer))
        return next(found, None)

    def check(self, layers: Sequence[str]) -> None:
        """Refuse patterns that match nothing: silently ignored, they would give another file than was asked.

        Args:
            layers: Paths of all layers of the model.

        Raises:
            ConfigError: With the pattern and the nearest layers.
        """
        for pattern, _ in self.overrides:
            require_matches(pattern, layers, _RANK_FOR)
        for pattern in self.excluded:
            require_matches(pattern, layers, _EXCLUDE)

    def describe(self) -> str:
        """Canonical text: the default's own when nothing else is set, else JSON of all."""
        if not self.overrides and not self.excluded:
            return self.default.describe()
        return json.dumps(
            {"default": self.default.describe(), **self.describe_patterns()}, ensure_ascii=False
        )

    def describe_patterns(self) -> dict[str, object]:
        """Overrides and exclusions as JSON values; empty without any."""
        overrides = [[pattern, policy.describe()] for pattern, policy in self.overrides]
        return {
            **({"rank_for": overrides} if overrides else {}),
            **({"exclude": list(self.excluded)} if self.excluded else {}),
        }


_VALUE_OF_PATTERN: Final = re.compile(r"(?P<pattern>.+?)=(?P<value>[^=,]*(?:,[a-z_]+=[^=,]*)*)")


def parse_overrides(texts: Iterable[str], flag: str = _RANK_FOR) -> tuple[tuple[str, RankPolicy], ...]:
    """Read overrides such as `up_blocks.*attn1=64` and `conv=energy:0.95,max=32`.

    Args:
        texts: `<pattern>=<policy>` each; for policies see `parse_policy`.
        flag: What the user calls them.

    Raises:
        ConfigError: One is not of that form, its pattern is no regular expression, or its policy makes no sense.
    """
    return tuple((pattern, parse_policy(value, flag)) for pattern, value in split_patterns(texts, flag))


def split_patterns(texts: Iterable[str], flag: str) -> list[tuple[str, str]]:
    """Split `<pattern>=<value>`; the pattern may hold equal signs itself.

    Raises:
        ConfigError: One has no pattern or no value.
    """
    pairs = []
    for text in texts:
        found = _VALUE_OF_PATTERN.fullmatch(text)
        if found is None or not found["value"].strip():
            raise ConfigError(
                f"{flag} {text} has no value.", hint=f"Write it as {flag} 'up_blocks.*attn1=64'."
            )
        pairs.append((found["pattern"], found["value"].strip()))
    return pairs
