"""Merging methods that look at single values of weight changes: TIES and DARE.

Both take away most of each change, so that the changes of several LoRAs meet less often. Their results are not
of low rank.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError

_SMALL: Final = 1 << 16
_SAMPLE: Final = 1 << 14


def require_density(density: float) -> float:
    """Give the density back.

    Raises:
        ConfigError: It is not above 0 and at most 1.
    """
    if not 0.0 < density <= 1.0:
        raise ConfigError(
            f"--density {density} is no share of values to keep.", hint="Use a number above 0, up to 1."
        )
    return density


def trimmed(change: Float[Tensor, "*shape"], density: float) -> Float[Tensor, "*shape"]:
    """Keep the largest values by magnitude and set the rest to zero: the first step of TIES.

    Args:
        change: One weight's change.
        density: Share of the values to keep; at least one stays. Values equal to the smallest that is kept
            stay too.
    """
    size = change.numel()
    kept = max(1, round(density * size))
    if kept >= size:
        return change
    magnitudes = change.abs()
    return torch.where(magnitudes >= kth_largest(magnitudes.flatten(), kept), change, 0.0)


def kth_largest(values: Float[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """The k-th largest of many values, exactly.

    A sample brackets it, and only what lies between is sorted out; where the sample misleads, all is.

    Args:
        values: Finite.
        k: From 1 to n.
    """
    size = len(values)
    if size <= _SMALL:
        return values.kthvalue(size - k + 1).values
    sample = values[:: size // _SAMPLE].sort(descending=True).values
    share, last = k / size, len(sample) - 1
    margin = 4.0 * (len(sample) * share * (1.0 - share)) ** 0.5 + 4.0
    high = sample[max(int(share * len(sample) - margin), 0)]
    low = sample[min(int(share * len(sample) + margin), last)]
    above = int((values > high).sum())
    between = values[(values >= low) & (values <= high)]
    if above < k <= above + len(between):
        return between.kthvalue(above + len(between) - k + 1).values
    return values.kthvalue(size - k + 1).values


def ties(changes: Sequence[Float[Tensor, "*shape"]], density: float) -> Float[Tensor, "*shape"]:
    """Trim, elect sign, disjoint merge (Yadav et al., arXiv 2306.01708, algorithm 1), for one weight.

    Each change is trimmed to its largest values. Where the signs disagree, that of the sum wins, and the mean
    is taken over those changes that have this sign. The paper trims whole models, this does each weight by
    itself, so that no more than one weight's changes are in memory.

    Args:
        changes: Of one weight, each multiplied by its LoRA's strength already.
        density: The share k of values to keep.

    Returns:
        In the changes' dtype. A value that only one change kept is that change's own.
    """
    kept = [trimmed(change, density) for change in changes]
    elected = reduce(torch.add, kept).sign()
    merged, voters = torch.zeros_like(elected), torch.zeros_like(elected)
    for change in kept:
        agrees = change * elected > 0.0
        merged += torch.where(agrees, change, 0.0)
        voters += agrees
    return merged / voters.clamp_min_(1.0)


def dare(
    change: Float[Tensor, "*shape"], density: float, generator: torch.Generator
) -> Float[Tensor, "*shape"]:
    """Drop values at random and rescale the rest (Yu et al., arXiv 2311.03099): the mean stays the same.

    Args:
        change: One weight's change.
        density: 1 − p for the paper's drop rate p: the chance of each value to stay. It is then divided by it.
        generator: On the CPU; its state alone decides what is dropped.
    """
    if density >= 1.0:
        return change
    drawn = torch.rand(change.shape, generator=generator, dtype=torch.float32).to(change.device)
    return torch.where(drawn < density, change / density, 0.0)
