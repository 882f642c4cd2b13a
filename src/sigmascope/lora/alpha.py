"""Alpha: what a module's product is multiplied with, from its tensor, PEFT's configuration or the header.

A module's own alpha goes before PEFT's configuration, and without either the scale is 1 (`EntryScales`).

Some tools store alpha = the rank asked for next to r = min(rank, out, in·kh·kw) factors: rank 16 for an output
convolution of 4 channels gives r = 4 and alpha 16. Those factors are the whole ΔW, so alpha / r = 4 would be
four times too much. `true_alpha` tells such an alpha by the rank that the header says was asked for.

diffusers writes the configuration of each component as JSON into the header (`lora_adapter_metadata`:
`unet.r`, `unet.lora_alpha`, …); PEFT writes `adapter_config.json` beside `adapter_model.safetensors`
(`read_configs`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.files import parse_json
from sigmascope.lora.adapters import scale_of
from sigmascope.lora.keys import Entry
from sigmascope.lora.linalg import is_convolution, is_real, max_rank
from sigmascope.lora.metadata import PEFT_CONFIGS

_CONFIG_NAME: Final = "adapter_config.json"
_MOST_BYTES: Final = 4 * 2**20  # of a configuration beside a file
_MOST_PATTERNS: Final = 10_000  # each is tried on each module
_FIELDS: Final = ("r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "use_rslora")
# What makes a pattern of a file too involved to be tried.
_REPEATING: Final = re.compile(r"[*+{]")
_COSTLY: Final = re.compile(r"\)\s*[*+?{]")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and alphas of one component's adapter, or none.

    Attributes:
        source: Where it is written, for messages.
        values: The configuration's own fields.
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def alpha_of(self, module: str) -> float | None:
        """The alpha of a module, by its path inside the component; None when nothing is said.

        Raises:
            LoraFormatError: It is no number.
        """
        given = self._pattern("alpha_pattern", module)
        if given is None:
            given = self.values.get("lora_alpha", self.values.get("alpha"))
        return None if given is None else self._number("alpha", given)

    def rank_of(self, module: str) -> int | None:
        """The rank of a module, likewise."""
        given = self._pattern("rank_pattern", module)
        if given is None:
            given = self.values.get("r")
        return None if given is None else int(self._number("r", given))

    def scale_of(self, module: str, rank: int | None) -> float | None:
        """The scale of a module's product; None when nothing is said.

        Args:
            module: Its path inside the component.
            rank: Of the stored factors; None takes the configuration's.

        Raises:
            LoraFormatError: alpha or r is no number above 0.
        """
        alpha, divisor = self.alpha_of(module), rank or self.rank_of(module)
        if alpha is None or divisor is None:
            return None
        if divisor < 1:
            raise LoraFormatError(f"{self.source}: r is {divisor}.", hint="Expected a rank of 1 or more.")
        return scale_of(alpha, divisor, rank_stabilised=self.values.get("use_rslora") is True)

    def _pattern(self, name: str, module: str) -> Any:
        """The value of the first pattern that the module's path ends with, as PEFT matches them."""
        patterns = self.values.get(name) or {}
        if not isinstance(patterns, dict):
            raise LoraFormatError(f"{self.source}: {name} is not a table of patterns.")
        if len(patterns) > _MOST_PATTERNS:
            raise LoraFormatError(
                f"{self.source}: {name} has {len(patterns)} patterns, more than any model has layers."
            )
        for pattern, value in patterns.items():
            try:
                expression = _compiled(pattern)
            except ValueError as error:
                raise LoraFormatError(
                    f"{self.source}: the pattern {pattern[:80]!r} is not read ({error}).",
                    hint="Write the modules' names out.",
                ) from error
            if expression.match(module):
                return value
        return None

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoraFormatError(f"{self.source}: {name} is {str(value)[:80]!r}, not a number.")
        return float(value)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    # A file's own patterns could take for ever, so repeated groups and many stars are refused.
    if len(pattern) > 500 or _COSTLY.search(pattern) or len(_REPEATING.findall(pattern)) > 2:
        raise ValueError("too involved")
    try:
        return re.compile(rf"(?:.*\.)?(?:{pattern})$")
    except re.error as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class PeftConfigs:
    """The configurations of all components by their prefix; "" is that of a file with one unnamed component."""

    components: Mapping[str, PeftConfig] = field(default_factory=dict)

    def scale_of(self, name: str, rank: int | None) -> float | None:
        """The scale of a module by its name in the file; None when nothing is said."""
        component, _, path = name.partition(".")
        config = self.components.get(component)
        if config is not None:
            return config.scale_of(path, rank)
        whole = self.components.get("")
        return None if whole is None else whole.scale_of(name, rank)


@dataclass(frozen=True, slots=True)
class EntryScales:
    """The scales of one file: a module's own alpha goes before PEFT's configuration, and without either it is 1.

    Attributes:
        checkpoint: The open file.
        configs: PEFT's configurations that belong to it.
    """

    checkpoint: Checkpoint
    configs: PeftConfigs

    def alpha(self, entry: Entry, rank: int, weight_shape: tuple[int, ...]) -> float:
        """Alpha such that alpha / rank is the scale of plain factors.

        Raises:
            LoraFormatError: An alpha that is no number.
        """
        if entry.alpha is not None:
            return true_alpha(self._stored(entry.alpha), rank, weight_shape, self.checkpoint.metadata)
        scale = self.configs.scale_of(entry.module, rank)
        return float(rank) if scale is None else scale * rank

    def scale(self, entry: Entry, rank: int | None) -> float:
        """The scale of any other change; raises what `alpha` does.

        Args:
            entry: The change.
            rank: Of its factors; None where it has none.
        """
        if entry.kind in {"diff", "set"}:
            return 1.0
        if entry.alpha is not None:  # LyCORIS stores an alpha beside whole LoKr factors too, and ignores it
            return 1.0 if rank is None else scale_of(self._stored(entry.alpha), rank)
        scale = self.configs.scale_of(entry.module, rank)
        return 1.0 if scale is None else scale

    def _stored(self, key: str) -> float:
        path, alpha = self.checkpoint.path, self.checkpoint.tensor(key)
        if alpha.numel() != 1:
            raise LoraFormatError(
                f"{path}: {key} has the shape {tuple(alpha.shape)}.", hint="Expected a single number."
            )
        if alpha.is_complex() or (alpha.is_floating_point() and not is_real(alpha.dtype)):
            raise LoraFormatError(
                f"{path}: {key} is {str(alpha.dtype).removeprefix('torch.')}.",
                hint="Expected a single number.",
            )
        return float(alpha)


def true_alpha(alpha: float, rank: int, weight_shape: Sequence[int], metadata: Mapping[str, str]) -> float:
    """Give `rank` (scale 1) for an alpha that only repeats the rank asked for, else `alpha` itself.

    It does so when the factors have all the rank that the weight can have, and alpha is above it and equal to
    the header's rank for that kind of layer. An alpha that was chosen is left alone: there the header's rank is
    that of the factors.

    Args:
        alpha: As stored.
        rank: Of the stored factors.
        weight_shape: (out, in) or (out, in, kh, kw).
        metadata: The header's `ss_network_dim` and `conv_dim` in `ss_network_args`.
    """
    if rank == max_rank(weight_shape) and alpha > rank and alpha in _asked_ranks(weight_shape, metadata):
        return float(rank)
    return alpha


def _asked_ranks(weight_shape: Sequence[int], metadata: Mapping[str, str]) -> list[float]:
    """What may have been asked for: tools differ on whether a 1×1 convolution counts as Linear."""
    linear, convolution = metadata.get("ss_network_dim"), _conv_dim(metadata)
    pointwise = all(size == 1 for size in weight_shape[2:])
    asked: list[object] = [linear] if pointwise or convolution is None else []
    if is_convolution(weight_shape):
        asked.append(convolution)
    return [number for number in map(_number, asked) if number is not None]


def _conv_dim(metadata: Mapping[str, str]) -> object:
    try:
        arguments = parse_json(metadata.get("ss_network_args", "{}"))
    except ValueError:
        return None
    return arguments.get("conv_dim") if isinstance(arguments, dict) else None


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None


def read_configs(path: Path, metadata: Mapping[str, str]) -> PeftConfigs:
    """The configurations that belong to a file.

    Args:
        path: The file. A configuration beside it counts only where the file is named `adapter_model.*`, as
            PEFT names the two.
        metadata: Its header.

    Raises:
        LoraFormatError: A configuration that is no JSON object.
    """
    if PEFT_CONFIGS in metadata:
        values = _parsed(f"{path}: {PEFT_CONFIGS}", metadata[PEFT_CONFIGS])
        return PeftConfigs(_by_component(f"{path}: {PEFT_CONFIGS}", values))
    beside = path.with_name(_CONFIG_NAME)
    if path.stem != "adapter_model" or not beside.is_file():
        return PeftConfigs()
    try:
        if beside.stat().st_size > _MOST_BYTES:
            raise LoraFormatError(f"{beside} is too large for a configuration.")
        values = _parsed(str(beside), beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoraFormatError(f"{beside} cannot be read ({error}).") from error
    return PeftConfigs({"": PeftConfig(str(beside), values)})


def _parsed(source: str, text: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise LoraFormatError(f"{source} is not valid JSON ({error}).") from error
    if not isinstance(values, dict):
        raise LoraFormatError(f"{source} is not a JSON object.")
    return values


def _by_component(source: str, values: Mapping[str, Any]) -> dict[str, PeftConfig]:
    """Fields come as `unet.r` where the file has several components, else as `r`."""
    components: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        component, _, name = key.rpartition(".")
        if name in _FIELDS:
            components.setdefault(component, {})[name] = value
    return {component: PeftConfig(source, fields) for component, fields in components.items()}
