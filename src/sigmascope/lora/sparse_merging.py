"""Merging methods that look at single values of weight changes: TIES and DARE.

Both take away most of each change, so that the changes of several LoRAs meet less often. Their results are not
of low rank.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError


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
    threshold = magnitudes.flatten().kthvalue(size - kept + 1).values
    return torch.where(magnitudes >= threshold, change, 0.0)


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
        agrees = (change.sign() == elected) & (elected != 0.0)
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
