"""Intruder dimensions, against full decompositions by torch.linalg.svd."""

import pytest
import torch
from torch import Tensor

from sigmascope.lora.intruders import intruders_of


def by_full_svd(weight: Tensor, delta: Tensor) -> tuple[int, float]:
    """Algorithm 1 of arXiv 2410.21228 with k = 10 and ε = 0.5."""
    own = torch.linalg.svd(weight, full_matrices=False).U
    vectors, values, _ = torch.linalg.svd(weight + delta, full_matrices=False)
    new = [bool((own.mT @ vectors[:, place]).abs().max() < 0.5) for place in range(10)]
    energies = values[:10].square()
    return sum(new), float(energies[torch.tensor(new)].sum() / energies.sum())


def falling(rows: int, columns: int) -> Tensor:
    """A weight whose singular values fall like 1 / √i, as those of trained weights about do."""
    vectors, _, right = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)
    values = 3.0 * torch.arange(1, vectors.shape[1] + 1).pow(-0.5)
    made: Tensor = (vectors * values) @ right
    return made


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "scale"),
    [(40, 30, 4, 1.0), (530, 520, 16, 1.0), (900, 520, 8, 2.0), (520, 900, 8, 2.0), (520, 530, 2, 0.1)],
)
def test_intruders_are_those_that_full_decompositions_find(
    rows: int, columns: int, rank: int, scale: float
) -> None:
    torch.manual_seed(0)
    weight = falling(rows, columns)
    delta = torch.randn(rows, rank) @ torch.randn(rank, columns) * scale / (rows * columns) ** 0.5
    found = intruders_of(weight, delta)
    count, share = by_full_svd(weight, delta)
    assert (found.count, found.examined) == (count, 10)
    assert found.share == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize(("position", "count"), [(400, 0), (None, 1)], ids=["a weak direction", "a new one"])
def test_a_weak_direction_of_the_weight_made_strong_is_no_intruder(position: int | None, count: int) -> None:
    """Only a comparison with all singular vectors tells these two apart."""
    torch.manual_seed(0)
    weight = falling(530, 520)
    vectors, _, right = torch.linalg.svd(weight, full_matrices=False)
    up = torch.randn(530) if position is None else vectors[:, position]
    found = intruders_of(weight, 5.0 * torch.outer(up / up.norm(), right[400]))
    assert found.count == count


def test_no_change_brings_no_intruder() -> None:
    torch.manual_seed(0)
    assert intruders_of(falling(530, 520), torch.zeros(530, 520)).count == 0
