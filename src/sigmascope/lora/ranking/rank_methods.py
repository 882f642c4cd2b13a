"""Ranks that each layer's own singular values decide, under the names that users of other tools know.

The rules are in `rank_bounds`; here each tool's name and parameter lead to one of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.rank_bounds import (
    Rule,
    energy_rank,
    error_rank,
    nuclear_rank,
    ratio_rank,
    threshold_rank,
)
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.ranks import require_limits
from sigmascope.lora.shapes import is_convolution, max_rank

__all__ = ["METHODS", "MethodRank", "NamedMethod"]

_FIRST_GUESS: Final = 64  # singular values that decide most layers of most fine-tunes


@dataclass(frozen=True, slots=True)
class NamedMethod:
    """A method as its tool names it.

    Attributes:
        rule: Gives the ranks that are still possible.
        to_rule: Turns the tool's parameter into the rule's.
        least: The smallest parameter that makes sense.
        most: The largest.
        needs_all: Whether every singular value is needed in general.
    """

    rule: Rule
    to_rule: Callable[[float], float] = float
    least: float = 0.0
    most: float = 1.0
    needs_all: bool = False


def _inverse(parameter: float) -> float:
    return 1.0 / parameter


def _square(parameter: float) -> float:
    return parameter * parameter


METHODS: Final[dict[str, NamedMethod]] = {
    "energy": NamedMethod(energy_rank),
    "error": NamedMethod(error_rank),
    # kohya-ss/sd-scripts, networks/resize_lora.py: --dynamic_method
    "sv_ratio": NamedMethod(ratio_rank, _inverse, least=1.0, most=math.inf),
    "sv_fro": NamedMethod(energy_rank, _square),
    "sv_cumulative": NamedMethod(nuclear_rank, needs_all=True),
    # KohakuBlueleaf/LyCORIS, lycoris/utils/__init__.py: modes of extraction
    "threshold": NamedMethod(threshold_rank, most=math.inf),
    "ratio": NamedMethod(ratio_rank),
    "quantile": NamedMethod(nuclear_rank, needs_all=True),
    # kijai/ComfyUI-KJNodes, nodes/lora_nodes.py: lora_type of LoraExtractKJ
    "adaptive_ratio": NamedMethod(ratio_rank),
    "adaptive_quantile": NamedMethod(nuclear_rank, needs_all=True),
    "adaptive_energy": NamedMethod(energy_rank),
    "adaptive_fro": NamedMethod(energy_rank, _square),
}
"""Every method by its name."""


@dataclass(frozen=True)
class MethodRank:
    """A rank for each layer by its own singular values: a `RankPolicy`.

    Attributes:
        name: One of `METHODS`.
        parameter: For Linear weights (out, in), as the method's own tool takes it.
        conv_parameter: For convolutions, 1×1 included; that of Linear weights when left out.
        max_rank: No layer gets more.
        max_conv_rank: The same for convolutions; `max_rank` when left out.
        min_rank: No layer that changed gets less. 0 lets a method leave layers out.

    Raises:
        ConfigError: The method is not known, or a value makes no sense for it.
    """

    name: str
    parameter: float
    conv_parameter: float | None = None
    max_rank: int | None = None
    max_conv_rank: int | None = None
    min_rank: int = 1

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(
                f"the rank method {self.name} is not known.",
                hint=f"Use a rank, full, or one of: {', '.join(METHODS)}.",
            )
        # Left out and spelt out are the same policy, so they compare, hash and read the same.
        if self.conv_parameter is None:
            object.__setattr__(self, "conv_parameter", self.parameter)
        if self.max_conv_rank is None:
            object.__setattr__(self, "max_conv_rank", self.max_rank)
        for parameter in (self.parameter, self.conv_parameter):
            self._check_parameter(float("nan") if parameter is None else parameter)
        require_limits(self.min_rank, {"max_rank": self.max_rank, "max_conv_rank": self.max_conv_rank})

    def first_guess(self, weight_shape: Sequence[int]) -> int:
        """Every value where the nuclear norm is needed, a few otherwise; never more than the largest rank."""
        few = max_rank(weight_shape) if METHODS[self.name].needs_all else _FIRST_GUESS
        return self._limited(few, weight_shape)

    def choose(self, spectrum: Spectrum) -> int | None:
        """The rank that the method gives, within the limits; 0 for a change that is zero."""
        if spectrum.total_energy <= 0.0:
            return 0
        method, shape = METHODS[self.name], spectrum.weight_shape
        parameter = method.to_rule(self._parameter(shape))
        smallest, largest = (
            self._limited(rank, shape, self.min_rank) for rank in method.rule(spectrum, parameter)
        )
        if spectrum.complete:
            return min(smallest, spectrum.significant)
        return smallest if smallest == largest and smallest <= spectrum.known else None

    def describe(self) -> str:
        """As `parse_policy` reads it, such as `sv_fro:0.9,conv=0.8,max=64`."""
        parts = [f"{self.name}:{self.parameter!r}"]
        if self.conv_parameter != self.parameter:
            parts.append(f"conv={self.conv_parameter!r}")
        if self.max_rank is not None:
            parts.append(f"max={self.max_rank}")
        if self.max_conv_rank != self.max_rank:
            parts.append(f"max_conv={self.max_conv_rank}")
        if self.min_rank != 1:
            parts.append(f"min={self.min_rank}")
        return ",".join(parts)

    def _parameter(self, weight_shape: Sequence[int]) -> float:
        parameter = self.conv_parameter if is_convolution(weight_shape) else self.parameter
        return self.parameter if parameter is None else parameter

    def _limited(self, rank: int, weight_shape: Sequence[int], least: int = 1) -> int:
        cap = self.max_conv_rank if is_convolution(weight_shape) else self.max_rank
        full = max_rank(weight_shape)
        return max(min(rank, full if cap is None else min(cap, full)), min(least, full))

    def _check_parameter(self, parameter: float) -> None:
        method = METHODS[self.name]
        if method.least <= parameter <= method.most and math.isfinite(parameter):
            return
        if method.most == 1.0:
            hint = f"Give a share of 1: {self.name}:0.9 or {self.name}:90%."
        else:
            hint = f"Give a number from {method.least:g}."
        raise ConfigError(f"{self.name} does not take {parameter:g}.", hint=hint)
