"""How much rank each layer gets: fixed, by a method on its singular values, or by patterns on its path.

With σ₁ ≥ σ₂ ≥ … the n singular values of ΔW, and p the parameter of a rule, the rank is:

    energy     the smallest r with Σ_{i≤r} σᵢ² ≥ p · Σσᵢ²
    error      the smallest r with √(Σ_{i>r} σᵢ²) ≤ p · √(Σσᵢ²)
    nuclear    the smallest r with Σ_{i≤r} σᵢ ≥ p · Σσᵢ
    ratio      the number of σᵢ > p · σ₁
    threshold  the number of σᵢ > p

From the known part of the spectrum, a rule gives the smallest and the largest rank that are still possible. If they
agree, more singular values would change nothing.

`METHODS` maps the names and parameters of other tools to these rules. Written as text, policies look like
`64`, `fixed:32,conv=16`, `full`, `sv_fro:0.9,max=64` or `energy:95%`.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.layer_names import matches, require_matches, require_pattern
from sigmascope.lora.linalg import FULL_RANK, Spectrum, is_convolution, max_rank

__all__ = [
    "FULL_RANK",
    "METHODS",
    "FixedRank",
    "MethodRank",
    "NamedMethod",
    "RankPolicy",
    "require_limits",
    "require_rank",
]

# The flags of `RankRules`, for messages.
_RANK_FOR: Final = "--rank_for"
_EXCLUDE: Final = "--exclude"

# Policies as text.
_VALUE_OF_PATTERN: Final = re.compile(r"(?P<pattern>.+?)=(?P<value>[^=,]*(?:,[a-z_]+=[^=,]*)*)")
_FIXED_NAMES: Final = ("fixed", "standard")
"""What LyCORIS and KJNodes call a fixed rank."""
_SETTINGS: Final = ("conv", "max", "max_conv", "min")
_EXAMPLES: Final = "Write a rank (64), full, or a method with its parameter (energy:0.95, sv_fro:0.9,max=64)."

_FIRST_GUESS: Final = 64  # singular values that decide most layers of most fine-tunes
Rule = Callable[[Spectrum, float], tuple[int, int]]
"""(spectrum, p) → the smallest and the largest rank still possible."""
# Of sums of many float64 squares; without it a share met exactly could be missed.
_SUM_ROUNDING: Final = 1e-13


@runtime_checkable
class RankPolicy(Protocol):
    """Chooses the rank of one layer from the singular values of its change.

    At first only the largest values are computed. A policy answers as soon as the known values decide, with the rank
    that all values would give; until then it asks for more. Policies are frozen and hashable.
    """

    def first_guess(self, weight_shape: Sequence[int]) -> int:
        """How many singular values to compute first, at most min(out, in·kh·kw)."""
        ...

    def choose(self, spectrum: Spectrum) -> int | None:
        """The rank to keep; 0 leaves the layer out, None asks for more singular values.

        A rank is never above the number of known values, or of values above zero if all are known.
        """
        ...

    def describe(self) -> str:
        """Canonical text for file headers and resume keys: equal if, and only if, the policies are equal."""
        ...


@dataclass(frozen=True)
class FixedRank:
    """One rank for Linear weights, another for convolutions (`--rank` and `--conv_rank`).

    A Conv2d weight has four axes and takes `conv_rank` whatever its kernel size, 1×1 included.

    Attributes:
        rank: For weights (out, in). 9999 keeps everything.
        conv_rank: For weights (out, in, kh, kw). 9999 keeps everything.

    Raises:
        ConfigError: A rank is below 1.
    """

    rank: int
    conv_rank: int

    def __post_init__(self) -> None:
        require_rank("rank", self.rank)
        require_rank("conv_rank", self.conv_rank)

    def rank_for(self, weight_shape: Sequence[int]) -> int:
        """Give the rank for this weight, never above min(out, in·kh·kw).

        Raises:
            LoraFormatError: The shape is not that of a matrix or convolution.
        """
        wanted = self.conv_rank if is_convolution(weight_shape) else self.rank
        return min(wanted, max_rank(weight_shape))

    def first_guess(self, weight_shape: Sequence[int]) -> int:
        """The rank itself: no further singular values are needed."""
        return self.rank_for(weight_shape)

    def choose(self, spectrum: Spectrum) -> int | None:
        """The rank, once that many values are known; 0 for a change that is zero."""
        rank = self.rank_for(spectrum.weight_shape)
        if spectrum.complete:
            return min(rank, spectrum.nonzero)
        return rank if spectrum.known >= rank else None

    def describe(self) -> str:
        """As `parse_policy` reads it: `fixed:32,conv=16`."""
        return f"fixed:{self.rank},conv={self.conv_rank}"


@dataclass(frozen=True)
class MethodRank:
    """A rank for each layer by its own singular values: a `RankPolicy`.

    Attributes:
        name: One of `METHODS`.
        parameter: For Linear weights (out, in), as the method's own tool takes it.
        conv_parameter: For convolutions, 1×1 included; by default that of Linear weights.
        max_rank: No layer gets more.
        max_conv_rank: The same for convolutions; by default `max_rank`.
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
        """All values if the nuclear norm is needed, otherwise a few; never more than the largest rank."""
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


def _rank_within(spectrum: Spectrum, discarded_share: float) -> tuple[int, int]:
    """The smallest rank whose discarded energy is at most a share of the total."""
    allowed = (discarded_share + _SUM_ROUNDING) * spectrum.total_energy
    enough = (spectrum.discarded_energies() <= allowed).nonzero()
    if len(enough):
        return int(enough[0]), int(enough[0])
    if spectrum.complete:
        return spectrum.known, spectrum.known
    return spectrum.known + 1, spectrum.largest_rank


def energy_rank(spectrum: Spectrum, share: float) -> tuple[int, int]:
    """The smallest r that keeps `share` of ‖ΔW‖²."""
    return _rank_within(spectrum, 1.0 - share)


def error_rank(spectrum: Spectrum, error: float) -> tuple[int, int]:
    """The smallest r with ‖ΔW − A_r‖ ≤ `error`·‖ΔW‖."""
    return _rank_within(spectrum, error * error)


def threshold_rank(spectrum: Spectrum, threshold: float) -> tuple[int, int]:
    """The number of singular values above `threshold`."""
    above = int((spectrum.values > threshold).sum())
    if above < spectrum.known or spectrum.next_value_bound <= threshold:
        return above, above
    return above, spectrum.largest_rank


def ratio_rank(spectrum: Spectrum, ratio: float) -> tuple[int, int]:
    """The number of singular values above `ratio`·σ₁."""
    if spectrum.known == 0:
        return 0, spectrum.largest_rank
    return threshold_rank(spectrum, ratio * float(spectrum.values[0]))


def _first_at_least(sums: Float[Tensor, " sums"], target: float) -> int:
    """The first index whose sum reaches the target; one past the last when none does."""
    return int(torch.searchsorted(sums, target * (1.0 - _SUM_ROUNDING)))


def nuclear_rank(spectrum: Spectrum, share: float) -> tuple[int, int]:
    """The smallest r whose singular values sum to `share` of the nuclear norm Σσᵢ.

    The unknown ones sum to at least E/σ and at most √((n − k)·E), where E = Σ_{i>k} σᵢ² is their energy and σ an upper
    bound of each.
    """
    values = spectrum.values
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    known = float(sums[-1])
    if spectrum.complete:
        rank = min(_first_at_least(sums, share * known), spectrum.known)
        return rank, rank
    bound, energy, rounding = spectrum.next_value_bound, spectrum.tail_energy, spectrum.energy_rounding
    unknown = spectrum.largest_rank - spectrum.known
    least = max(energy - rounding, 0.0) / bound
    most = min(math.sqrt(unknown * (energy + rounding)), unknown * bound)
    smallest = _first_at_least(sums, share * (known + least))
    largest = _first_at_least(sums, share * (known + most))
    return smallest, largest if largest <= spectrum.known else spectrum.largest_rank


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
class RankRules:
    """The policy of every layer.

    Patterns are regular expressions, searched for anywhere in the layer's path: `up_blocks.*attn1`.

    Attributes:
        default: For layers that no override matches.
        overrides: (pattern, policy); if several match, the last wins.
        excluded: Patterns of layers that are left out, whatever the overrides say.

    Raises:
        ConfigError: A pattern is not a regular expression.
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
        """The policy of the last override that matches; None if the default applies.

        A budget for the whole file replaces only the default, so overrides still apply.
        """
        matching = (policy for pattern, policy in reversed(self.overrides) if matches(pattern, layer))
        return next(matching, None)

    def require_for_statistics(self) -> None:
        """Refuse a policy that needs the singular values of ΔW itself, because a metric changes them.

        Raises:
            ConfigError: One of them is `threshold`.
        """
        policies = [self.default, *(policy for _, policy in self.overrides)]
        if any(isinstance(policy, MethodRank) and policy.name == "threshold" for policy in policies):
            raise ConfigError(
                "--rank_method threshold compares singular values of ΔW, and --statistics change them.",
                hint="Use --max_size, or a method such as energy:0.95.",
            )

    def check(self, layers: Sequence[str]) -> None:
        """Refuse patterns that match nothing: if they were ignored, the file would not be what the user asked for.

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


def parse_policy(text: str, flag: str = "--rank_method") -> RankPolicy:
    """Read a policy; the inverse of `describe` of `FixedRank` and `MethodRank`.

    `<rank>` or `fixed:<rank>[,conv=<rank>]` or `full` or
    `<method>:<parameter>[,conv=<parameter>][,max=<rank>][,max_conv=<rank>][,min=<rank>]`.
    Parameters may be percentages.

    Args:
        text: The policy.
        flag: What the user calls it, for the error.

    Raises:
        ConfigError: It does not name a method, or a value makes no sense.
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


def _rank(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise ConfigError(f"{name} must be a whole number, not {text!r}.", hint=_EXAMPLES)
    return int(text)


def _method(name: str, value: str, settings: dict[str, str]) -> MethodRank:
    if name not in METHODS:
        raise ConfigError(
            f"{name or 'nothing'} is not a rank method.", hint=f"Methods: {', '.join(METHODS)}."
        )
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


def parse_overrides(texts: Iterable[str]) -> tuple[tuple[str, RankPolicy], ...]:
    """Read overrides such as `up_blocks.*attn1=64` and `conv=energy:0.95,max=32`.

    Args:
        texts: `<pattern>=<policy>` each; for policies see `parse_policy`.

    Raises:
        ConfigError: One is not of that form, its pattern is not a regular expression, or its policy makes no sense.
    """
    return tuple(
        (pattern, parse_policy(value, _RANK_FOR)) for pattern, value in split_patterns(texts, _RANK_FOR)
    )


def split_patterns(texts: Iterable[str], flag: str) -> list[tuple[str, str]]:
    """Split `<pattern>=<value>`; the pattern may hold equal signs itself.

    Raises:
        ConfigError: One has no pattern or no value.
    """
    pairs = []
    for text in texts:
        match = _VALUE_OF_PATTERN.fullmatch(text)
        if match is None or not match["value"].strip():
            raise ConfigError(
                f"{flag} {text} has no value.", hint=f"Write it as {flag} 'up_blocks.*attn1=64'."
            )
        pairs.append((match["pattern"], match["value"].strip()))
    return pairs


def require_rank(name: str, rank: int) -> None:
    """Refuse a rank that keeps nothing.

    Args:
        name: What the user calls it, such as `--conv_rank`.
        rank: What the user gave.

    Raises:
        ConfigError: It is below 1.
    """
    if rank < 1:
        raise ConfigError(
            f"{name} {rank} keeps nothing.", hint=f"Use 1 or more; {FULL_RANK} keeps everything."
        )


def require_limits(least: int, most: Mapping[str, int | None]) -> None:
    """Refuse limits of ranks that leave no rank between them.

    Args:
        least: The lowest rank allowed; 0 or more.
        most: The highest rank allowed, by flag; None for no limit.

    Raises:
        ConfigError: With the flag.
    """
    if least < 0:
        raise ConfigError(f"the minimum rank {least} is below 0.", hint="Use 0 or more.")
    for flag, rank in most.items():
        if rank is not None:
            require_rank(flag, rank)
            if rank < least:
                raise ConfigError(f"{flag} {rank} is below the minimum rank {least}.", hint="Swap them.")
