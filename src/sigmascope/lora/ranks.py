"""How many singular values to keep for each weight."""

from collections.abc import Sequence
from dataclasses import dataclass

from sigmascope.errors import ConfigError
from sigmascope.lora.shapes import FULL_RANK, is_convolution, max_rank

__all__ = ["FULL_RANK", "FixedRank"]


@dataclass(frozen=True)
class FixedRank:
    """One rank for Linear weights, another for convolutions (SPEC section 7, `--rank` and `--conv_rank`).

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
        for name in ("rank", "conv_rank"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(
                    f"{name} is {value}, which keeps nothing.",
                    hint=f"Give {name} 1 or more, or {FULL_RANK} to keep everything.",
                )

    def rank_for(self, weight_shape: Sequence[int]) -> int:
        """Give the rank for this weight, never above min(out, in·kh·kw).

        Raises:
            LoraFormatError: The shape is not that of a matrix or convolution.
        """
        wanted = self.conv_rank if is_convolution(weight_shape) else self.rank
        return min(wanted, max_rank(weight_shape))
