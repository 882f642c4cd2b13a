"""The budget's choice against exact solvers of the same problem."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from sigmascope.lora.budget import Budget, StorageCost
from sigmascope.lora.linalg import Spectrum


@dataclass(frozen=True, eq=False)
class Problem:
    """Layers with whole spectra, and what each rank of each takes and leaves."""

    spectra: dict[str, Spectrum]
    cost: StorageCost = field(default_factory=lambda: StorageCost(2))

    def within(self, size: int) -> "Problem":
        return Problem(self.spectra, self.cost.within(size))

    @cached_property
    def bytes_at(self) -> list[list[int]]:
        return [
            [self.cost.file_bytes({layer: rank}, {layer: one.weight_shape}) - self.cost.empty_bytes
             for rank in range(one.known + 1)]
            for layer, one in self.spectra.items()
        ]  # fmt: skip

    @cached_property
    def lost_at(self) -> list[list[float]]:
        return [
            [float(one.values[rank:].square().sum()) for rank in range(one.known + 1)]
            for one in self.spectra.values()
        ]

    def lost(self, ranks: Sequence[int]) -> float:
        return math.fsum(lost[rank] for lost, rank in zip(self.lost_at, ranks, strict=True))

    def bytes(self, ranks: Sequence[int]) -> int:
        return self.cost.empty_bytes + sum(
            taken[rank] for taken, rank in zip(self.bytes_at, ranks, strict=True)
        )

    def share(self, share: float) -> int:
        """The size that holds a share of all values."""
        whole = self.bytes([one.known for one in self.spectra.values()])
        return self.cost.empty_bytes + int((whole - self.cost.empty_bytes) * share)

    def every_choice(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(spectrum.known + 1) for spectrum in self.spectra.values()))

    def largest_step(self) -> float:
        """The most that one value (or the first few of a layer, if its header entries make them a group) brings."""
        return max(float(spectrum.values[0]) ** 2 for spectrum in self.spectra.values())


def problem(layers: int, most: int, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    spectra = {}
    for index in range(layers):
        count = int(rng.integers(1, most + 1))
        values = torch.tensor(np.sort(rng.exponential(size=count) * rng.uniform(0.2, 2.0))[::-1].copy())
        shape = (count, int(rng.integers(count, 4 * most)), 3, 3) if index % 3 else (count, 30 * most)
        spectra[f"block.{index}.layer"] = Spectrum(values, float(values.square().sum()), shape)
    return Problem(spectra)


def chosen(budget: Budget, one: Problem) -> tuple[int, ...]:
    return tuple(budget.allocate(one.spectra, one.cost).ranks.values())


@pytest.mark.parametrize("seed", range(8))
def test_a_size_is_spent_as_well_as_any_choice_but_for_one_value(seed: int) -> None:
    one = problem(layers=4, most=4, seed=seed)
    size = one.share(0.35 + 0.05 * seed)
    one = one.within(size)
    ranks = chosen(Budget(max_bytes=size), one)
    best = min(one.lost(choice) for choice in one.every_choice() if one.bytes(choice) <= size)
    assert one.bytes(ranks) <= size
    assert best <= one.lost(ranks) <= best + one.largest_step()


@pytest.mark.parametrize("seed", range(8))
def test_an_error_is_reached_with_as_few_bytes_as_any_choice_but_for_one_value(seed: int) -> None:
    one = problem(layers=4, most=4, seed=seed)
    error = 0.15 + 0.06 * seed
    allowed = error**2 * one.lost([0] * 4)
    ranks = chosen(Budget(max_error=error), one)
    fewest = min(one.bytes(choice) for choice in one.every_choice() if one.lost(choice) <= allowed)
    dearest = max(taken[1] for taken in one.bytes_at)
    assert one.lost(ranks) <= allowed
    assert fewest <= one.bytes(ranks) <= fewest + dearest


def exact_knapsack(one: Problem, size: int) -> float:
    """The least that any ranks lose within the size: one variable for each rank of each layer, one of them 1."""
    lost = [value for layer in one.lost_at for value in layer]
    taken = [value for layer in one.bytes_at for value in layer]
    owner = [index for index, layer in enumerate(one.lost_at) for _ in layer]
    one_each = np.array([[float(mine == index) for mine in owner] for index in range(len(one.spectra))])
    solved = milp(
        lost,
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint([taken], 0, size - one.cost.empty_bytes),
        ],
        integrality=np.ones(len(lost)),
        bounds=Bounds(0, 1),
    )
    assert solved.success
    return float(solved.fun)


@pytest.mark.parametrize("seed", range(4))
def test_a_size_is_spent_nearly_as_well_as_the_exact_knapsack_does(seed: int) -> None:
    one = problem(layers=16, most=12, seed=seed)
    size = one.share(0.2 + 0.15 * seed)
    one = one.within(size)
    lost, best = one.lost(chosen(Budget(max_bytes=size), one)), exact_knapsack(one, size)
    assert best * (1 - 1e-6) <= lost <= best * 1.015
    assert lost - best <= one.largest_step()


def relaxed_knapsack(one: Problem, size: int) -> float:
    """A bound that no choice of ranks can beat: parts of values may be taken, and header entries are free."""
    gain, taken = [], []
    for layer, spectrum in one.spectra.items():
        gain += [float(value) ** 2 for value in spectrum.values]
        taken += [one.cost.rank_bytes(layer, one.spectra[layer].weight_shape)] * spectrum.known
    solved = linprog([-value for value in gain], [taken], [size - one.cost.empty_bytes], bounds=(0, 1))
    return one.lost([0] * len(one.spectra)) + float(solved.fun)


@pytest.mark.parametrize(
    "share", [pytest.param(0.1, marks=pytest.mark.slow), 0.3, pytest.param(0.6, marks=pytest.mark.slow)]
)
def test_many_layers_come_close_to_the_bound_of_fractional_values(share: float) -> None:
    one = problem(layers=120, most=48, seed=7)
    size = one.share(share)
    lost = one.lost(chosen(Budget(max_bytes=size), one))
    assert 1.0 <= lost / relaxed_knapsack(one, size) <= 1.05


def test_a_budget_beats_the_fixed_rank_of_the_same_size() -> None:
    one = problem(layers=60, most=24, seed=3)
    fixed = [min(6, spectrum.known) for spectrum in one.spectra.values()]
    assert one.lost(chosen(Budget(max_bytes=one.bytes(fixed)), one)) < 0.4 * one.lost(fixed)
