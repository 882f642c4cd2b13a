"""Ranks for all layers by falling benefit per byte: as many as a file holds, or as few as an error needs.

The order solves the fractional relaxation of the knapsack problem (Dantzig, 1957), so it is the best choice but for
the last value, which may not fit. What room or error is left is then used by single values out of order.
"""

from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from sigmascope.lora.ranking.rank_contest import Contest

_BISECTIONS: Final = 60
_FEW: Final = 8
_SUM_ROUNDING: Final = 1e-13  # of sums of many float64 squares; without it a sum met exactly could be missed


def most_within(contest: Contest, limit: int) -> tuple[Int[Tensor, " layers"], float]:
    """Take values above the floors while they fit.

    Args:
        contest: The layers.
        limit: Bytes for all modules, the floors' included.

    Returns:
        Ranks by layer, and the density below which values were not taken in order; 0 when all were.
    """
    room = limit - contest.bytes_at(contest.floor)
    row, column = contest.best_first()
    cost = contest.cost_at(column, row).cumsum(0)
    fit = int(torch.searchsorted(cost, room, right=True))
    ranks = contest.floor + torch.bincount(row[:fit], minlength=len(contest.layers))
    if fit == len(row):
        return ranks, 0.0
    threshold = float(contest.densities[row[fit], column[fit]])
    _fill(contest, ranks, room - (int(cost[fit - 1]) if fit else 0))
    return ranks, threshold


def _fill(contest: Contest, ranks: Int[Tensor, " layers"], room: int) -> None:
    """Take what still fits, best first; changes `ranks`."""
    if not contest.layers:
        return
    while True:
        cost = contest.cost_at(ranks)
        possible = (cost <= room) & (contest.benefit_at(ranks) > 0)
        density = torch.where(possible, contest.density_at(ranks), 0.0)
        best = int(density.argmax())
        if float(density[best]) <= 0.0:
            return
        ranks[best] += 1
        room -= int(cost[best])


def least_for(contest: Contest, needed: float) -> tuple[Int[Tensor, " layers"], float]:
    """Take values above the floors until they bring what is needed.

    Args:
        contest: The layers.
        needed: Weighted energy to keep above that of the floors.

    Returns:
        Ranks by layer, and the density of the last value that was taken in order; 0 when all known values do not
        suffice.
    """
    if needed <= 0.0:
        return contest.floor.clone(), torch.inf
    row, column = contest.best_first()
    gain = contest.benefits[row, column].cumsum(0)
    last = int(torch.searchsorted(gain, needed * (1.0 - _SUM_ROUNDING)))
    ranks = contest.floor + torch.bincount(row[:last], minlength=len(contest.layers))
    if last == len(row):
        return ranks, 0.0
    missing = needed - (float(gain[last - 1]) if last else 0.0)
    cheapest = _cheapest(contest, ranks, missing)
    ranks[cheapest] += 1
    _prune(contest, ranks, float(contest.benefit_at(ranks - 1)[cheapest]) - missing)
    return ranks, float(contest.densities[row[last], column[last]])


def _cheapest(contest: Contest, ranks: Int[Tensor, " layers"], missing: float) -> int:
    """The layer whose next value suffices at the least bytes; there is one, the next in order."""
    enough = contest.benefit_at(ranks) >= missing * (1.0 - _SUM_ROUNDING)
    cost = torch.where(enough, contest.cost_at(ranks), torch.iinfo(torch.int64).max)
    return int(cost.argmin())


def _prune(contest: Contest, ranks: Int[Tensor, " layers"], spare: float) -> None:
    """Give back values that are not needed after all, those of most bytes first; changes `ranks`."""
    while True:
        last = ranks - 1
        benefit = contest.benefit_at(last)
        needless = (benefit <= spare) & (ranks > contest.floor)
        cost = torch.where(needless, contest.cost_at(last), 0)
        most = int(cost.argmax())
        if int(cost[most]) <= 0:
            return
        ranks[most] -= 1
        spare -= float(benefit[most])


def wanted(contest: Contest, threshold: float) -> dict[str, int]:
    """Layers with unknown values that may beat a density: how many values to compute next.

    So many as would reach the density if the values went on to fall as the last half of those known does, between
    1¼ and 3 times those known, and no more than the unknown energy suffices for.
    """
    price = threshold * contest.rank_bytes
    known = contest.known.double()
    end, half = contest.benefit_at(contest.known - 1), contest.benefit_at(contest.known // 2 - 1)
    power = (half / end).log2().clamp(min=1e-3).nan_to_num(1.0, posinf=1e3)
    crossing = (known * (end / price) ** (1.0 / power)).nan_to_num(torch.inf, posinf=torch.inf)
    target = crossing.clamp(min=_FEW).maximum(1.25 * known).minimum((3.0 * known).clamp(min=_FEW))
    suffices = torch.where(price > 0, contest.unknown_energy / price, torch.inf).ceil().clamp(min=1.0)
    target = (
        target.ceil().minimum(known + suffices).minimum(contest.cap.double()).maximum(contest.floor.double())
    )
    asked = (contest.next_benefit > price) | (contest.floor > contest.known)
    return {contest.layers[i]: int(target[i]) for i in asked.nonzero()[:, 0].tolist()}


def density_for(contest: Contest, allowed: float) -> float:
    """A density that the last value taken has at least, whatever the unknown values are.

    Args:
        contest: The layers.
        allowed: Weighted energy that may be discarded.
    """
    low, high = 0.0, float(contest.densities.max()) if contest.densities.numel() else 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _discarded_at_most(contest, middle) <= allowed else (low, middle)
    return low


def _discarded_at_most(contest: Contest, density: float) -> float:
    """The most that is discarded when every value of at least this density is kept, known or not."""
    column = torch.arange(contest.benefits.shape[1])
    kept = (contest.densities >= density) | (column < contest.floor[:, None])
    known_energy = torch.where(contest.unknown_values > 0, contest.benefits.sum(dim=1), contest.energy)
    below = (known_energy - torch.where(kept, contest.benefits, 0.0).sum(dim=1)).clamp(min=0.0)
    # Where the last known value is kept, no unknown one that is discarded has more than the density.
    small = contest.unknown_values * (density * contest.rank_bytes)
    runs_on = contest.density_at(contest.known - 1) >= density
    limited = contest.cap < contest.known + contest.unknown_values
    unknown = torch.where(runs_on & ~limited, contest.unknown_energy.minimum(small), contest.unknown_energy)
    return float((below + unknown).sum())
