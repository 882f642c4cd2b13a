"""The ranks under a budget's limit, and whether they are final."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sigmascope.lora.ranking.budget_refusals import refuse_error, refuse_rounding, refuse_size
from sigmascope.lora.ranking.rank_contest import Contest
from sigmascope.lora.ranking.rank_search import density_for, least_for, most_within, wanted
from sigmascope.lora.ranking.storage_cost import StorageCost


@dataclass(frozen=True)
class Allocation:
    """Ranks under a budget.

    Attributes:
        ranks: By layer; 0 is left out of the file.
        wanted: Layers of which more singular values could change the outcome, with how many to compute next.
            Empty: the ranks are final. Otherwise they are the best of what is known.
        error: √(Σw‖ΔW − A‖² / Σw‖ΔW‖²) over all layers, storage rounding included: what `max_error` limits.
            Without weights this is the overall relative error.
        bytes: The most that the file takes.
    """

    ranks: dict[str, int]
    wanted: dict[str, int]
    error: float
    bytes: int


def allocate(
    contest: Contest, storage: StorageCost, *, max_bytes: int | None, max_error: float | None
) -> Allocation:
    """Choose the rank of every layer under one of two limits.

    Args:
        contest: The layers.
        storage: What the values and modules take.
        max_bytes: The file's size, header included; as small an error as it allows.
        max_error: The overall relative error; as small a file as it allows.

    Raises:
        ConfigError: The limit cannot be met; the message says what can.
    """
    if max_bytes is not None:
        room = max_bytes - storage.empty_bytes
        if (least := contest.bytes_at(contest.floor)) > room:
            refuse_size(max_bytes, storage.empty_bytes + least)
        ranks, threshold = most_within(contest, room)
    else:
        ranks, threshold = _within_error(contest, storage, max_error or 0.0)
    asked = wanted(contest, threshold)
    error = _error(contest, ranks, storage)
    if not asked:
        if max_error is not None and error > max_error * (1.0 + 1e-9):
            refuse_error(max_error, error)
        if max_bytes is not None:
            _require_something(contest, ranks, storage, max_bytes)
    return Allocation(
        ranks=dict(zip(contest.layers, ranks.tolist(), strict=True)),
        wanted=asked,
        error=error,
        bytes=storage.empty_bytes + contest.bytes_at(ranks),
    )


def _within_error(
    contest: Contest, storage: StorageCost, error: float
) -> tuple[Int[Tensor, " layers"], float]:
    """The fewest bytes at which discarded energy and rounding together stay below error².

    Rounding adds ρ²·(T − d) to the d discarded of T in all: d ≤ (e² − ρ²)·T / (1 − ρ²).
    """
    rounding = storage.rounding
    if error <= rounding:
        refuse_rounding(error, rounding)
    total = float(contest.energy.sum())
    allowed = (error**2 - rounding**2) / (1.0 - rounding**2) * total
    needed = total - allowed - float(contest.kept_at(contest.floor).sum())
    ranks, threshold = least_for(contest, needed)
    return ranks, max(threshold, density_for(contest, allowed))


def _require_something(
    contest: Contest, ranks: Int[Tensor, " layers"], storage: StorageCost, max_bytes: int
) -> None:
    """Refuse a size that leaves out every layer although some changed."""
    if not bool(ranks.any()) and float(contest.energy.sum()) > 0.0:
        first = contest.cost_at(torch.zeros_like(ranks)) + torch.where(contest.known > 0, 0, 2**62)
        refuse_size(max_bytes, storage.empty_bytes + int(first.min()))


def _error(contest: Contest, ranks: Int[Tensor, " layers"], storage: StorageCost) -> float:
    total = float(contest.energy.sum())
    kept = contest.kept_at(ranks)
    lost = float((contest.energy - kept).clamp(min=0.0).sum()) + storage.rounding**2 * float(kept.sum())
    return math.sqrt(lost / total) if total > 0.0 else 0.0
