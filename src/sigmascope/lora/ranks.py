"""How many singular values to keep for each weight."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sigmascope.errors import ConfigError
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.shapes import FULL_RANK, is_convolution, max_rank

__all__ = ["FULL_RANK", "FixedRank", "RankPolicy", "most_common_rank", "require_limits", "require_rank"]


@runtime_checkable
class RankPolicy(Protocol):
    """Chooses the rank of one layer from the singular values of its change.

    The values may be incomplete: only the largest are computed at first. A policy answers as soon as the known
    ones decide, and then exactly as all of them would; until that it asks for more. Policies are frozen and
    hashable.
    """

    def first_guess(self, weight_shape: Sequence[int]) -> int:
        """How many singular values to compute first, at most min(out, in·kh·kw)."""
        ...

    def choose(self, spectrum: Spectrum) -> int | None:
        """The rank to keep; 0 leaves the layer out, None asks for more singular values.

        A rank is never above the number of values known, or of those above zero where none is missing.
        """
        ...

    def describe(self) -> str:
        """Canonical text, equal for equal policies and for no others: for file headers and resume keys."""
        ...


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

    def first_guess(self, weight_shape: Sequence[int]) -> int:
        """The rank itself: no other singular value is needed."""
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
    """Refuse limits of ranks that leave nothing between them.

    Args:
        least: No rank may be below; 0 or more.
        most: By flag, ranks that none may be above; None is no limit.

    Raises:
        ConfigError: With the flag.
    """
    if least < 0:
        raise ConfigError(f"a least rank of {least} is below 0.", hint="Use 0 or more.")
    for flag, rank in most.items():
        if rank is not None:
            require_rank(flag, rank)
            if rank < least:
                raise ConfigError(f"{flag} {rank} is below the least rank {least}.", hint="Swap them.")


def most_common_rank(ranks: Iterable[int]) -> int | None:
    """The rank that most layers have, the first of several; None without any."""
    counts = Counter(ranks).most_common(1)
    return counts[0][0] if counts else None
