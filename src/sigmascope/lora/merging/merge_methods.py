"""The ways in which the changes that several LoRAs make to one weight become one change."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lora.merging.sparse_merging import dare, require_density, ties

MethodName = Literal["linear", "ties", "dare"]
_SEED_BITS: Final = 63


@dataclass(frozen=True, slots=True)
class MergeMethod:
    """One way to merge.

    Attributes:
        name: `linear`: the weighted sum. `ties` and `dare`: see `sparse_merging`; DARE sums what it keeps.
        density: For `ties` and `dare`: the share of values to keep.
        seed: For `dare`: what the random choice starts from.

    Raises:
        ConfigError: The density is no share.
    """

    name: MethodName = "linear"
    density: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_density(self.density)

    @property
    def is_linear(self) -> bool:
        """Whether the result is a plain sum, and so has no more rank than its parts together."""
        return self.name == "linear"

    def combine(self, module: str, deltas: Mapping[int, Float[Tensor, "*shape"]]) -> Float[Tensor, "*shape"]:
        """Make one change of several.

        Args:
            module: Its name, which is part of DARE's seed.
            deltas: The change that each LoRA makes, times its weight, by the LoRA's position among all.

        Returns:
            In the changes' dtype.
        """
        if self.name == "ties":
            return ties(list(deltas.values()), self.density)
        if self.name == "dare":
            kept = [
                dare(delta, self.density, self._generator(module, position))
                for position, delta in deltas.items()
            ]
            return reduce(torch.add, kept)
        return reduce(torch.add, deltas.values())

    def describe(self) -> str:
        """Canonical text, for reports and headers."""
        if self.is_linear:
            return self.name
        seed = f", seed {self.seed}" if self.name == "dare" else ""
        return f"{self.name}, density {self.density:g}{seed}"

    def _generator(self, module: str, position: int) -> torch.Generator:
        """One stream a module and LoRA: the order of the work does not matter, nor what else is merged."""
        digest = hashlib.sha256(f"{self.seed}\n{position}\n{module}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS))


def require_weights(weights: tuple[float, ...] | None, count: int) -> tuple[float, ...]:
    """Give the weight of each LoRA, 1 where none are asked for.

    Raises:
        ConfigError: Their number is not that of the LoRAs, or one is NaN or infinite.
    """
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise ConfigError(
            f"--weights has {len(weights)} numbers for {count} LoRAs.",
            hint="Give one for each, such as 0.7,0.3.",
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise ConfigError(f"--weights {weight} is no number.", hint="Give numbers such as 0.7,0.3.")
    return weights
