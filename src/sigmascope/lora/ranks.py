"""How many singular values to keep for each weight."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sigmascope.errors import ConfigError
from sigmascope.lora.shapes import FULL_RANK, is_convolution, max_rank

__all__ = ["FULL_RANK", "FixedRank", "most_common_rank", "require_rank"]


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
        require_rank("rank", self.rank)
        require_rank("conv_rank", self.conv_rank)

    def rank_for(self, weight_shape: Sequence[int]) -> int:
        """Give the rank for this weight, never above min(out, in·kh·kw).

        Raises:
            LoraFormatError: The shape is not that of a matrix or convolution.
        """
        wanted = self.conv_rank if is_convolution(weight_shape) else self.rank
        return min(wanted, max_rank(weight_shape))


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


def most_common_rank(ranks: Iterable[int]) -> int | None:
    """The rank that most layers have, the first of several; None without any."""
    counts = Counter(ranks).most_common(1)
    return counts[0][0] if counts else None
