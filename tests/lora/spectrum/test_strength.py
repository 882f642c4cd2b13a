import math

import pytest
import torch

from sigmascope.lora.effect import bases_of, shared_spaces
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.linalg import effective_rank, stable_rank


def test_equal_values_use_all_their_directions() -> None:
    values = torch.full((5,), 3.0, dtype=torch.float64)
    assert stable_rank(values) == pytest.approx(5.0)
    assert effective_rank(values) == pytest.approx(5.0)


def test_hand_numbers() -> None:
    values = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
    assert stable_rank(values) == pytest.approx(1.5)  # (4 + 1 + 1) / 4
    entropy = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert effective_rank(values) == pytest.approx(math.exp(entropy))


@pytest.mark.parametrize("values", [torch.zeros(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)])
def test_a_zero_change_has_no_directions(values: torch.Tensor) -> None:
    assert stable_rank(values) == 0.0
    assert effective_rank(values) == 0.0


def test_zeros_among_the_values_count_for_nothing() -> None:
    values = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert effective_rank(values) == pytest.approx(2.0)


def planted(columns: list[int], rows: list[int]) -> LoraFactors:
    """A change that writes to some axes and reads from others."""
    up, down = torch.zeros(6, len(columns)), torch.zeros(len(rows), 8)
    for index, (column, row) in enumerate(zip(columns, rows, strict=True)):
        up[column, index] = index + 1.0
        down[index, row] = 1.0
    return LoraFactors(up, down, float(len(columns)), (6, 8))


def test_bases_hold_the_directions_that_are_used() -> None:
    bases = bases_of(planted([0, 3], [1, 7]))
    torch.testing.assert_close(bases.values, torch.tensor([2.0, 1.0], dtype=torch.float64))
    assert bases.columns.abs().sum(1).nonzero().flatten().tolist() == [0, 3]
    assert bases.rows.abs().sum(1).nonzero().flatten().tolist() == [1, 7]


def test_directions_that_are_only_rounding_are_left_out() -> None:
    noisy = LoraFactors(torch.diag(torch.tensor([1.0, 1e-9])), torch.eye(2), 2.0, (2, 2))
    assert bases_of(noisy).columns.shape == (2, 1)


def test_overlap_of_shared_and_orthogonal_spaces() -> None:
    one, other = planted([0, 3], [1, 7]), planted([3, 5], [0, 2])
    assert shared_spaces(one, one).columns == pytest.approx(1.0)
    assert shared_spaces(one, other).columns == pytest.approx(0.5)
    assert shared_spaces(one, other).rows == pytest.approx(0.0)


def test_overlap_is_the_mean_squared_cosine_of_the_principal_angles() -> None:
    angle = 0.3
    one = torch.eye(3, dtype=torch.float64)[:, :1]
    other = torch.tensor([[math.cos(angle)], [math.sin(angle)], [0.0]], dtype=torch.float64)
    spaces = shared_spaces(*(LoraFactors(up, torch.ones(1, 2).double(), 1.0, (3, 2)) for up in (one, other)))
    assert spaces.columns == pytest.approx(math.cos(angle) ** 2)


def test_a_space_inside_a_larger_one_overlaps_fully() -> None:
    small, large = planted([0, 3], [1, 7]), planted([0, 1, 3, 5], [0, 1, 2, 7])
    assert shared_spaces(small, large).columns == pytest.approx(1.0)
    assert shared_spaces(small, large).rows == pytest.approx(1.0)


def test_a_zero_change_overlaps_nothing() -> None:
    zero = LoraFactors(torch.zeros(6, 2), torch.zeros(2, 8), 2.0, (6, 8))
    assert shared_spaces(zero, planted([0], [1])).columns == 0.0
