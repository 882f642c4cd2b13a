"""The error of rounded factors at every rank, against the dense difference in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sigmascope.lora import decompose
from sigmascope.lora.decompose import project, stored_errors

PRECISION = 1e-4  # of each squared error, however little is left


class StoredFactors(NamedTuple):
    """L (m, r) and X (r, n)."""

    left: Tensor
    right: Tensor


def dense_errors(matrix: Tensor, factors: StoredFactors) -> Tensor:
    wide, left, right = (tensor.double() for tensor in (matrix, factors.left, factors.right))
    errors = [(wide - left[:, :rank] @ right[:rank]).square().sum() for rank in range(left.shape[1] + 1)]
    return torch.stack(errors)


def planted(
    rows: int, columns: int, rank: int, left_over: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, StoredFactors]:
    """L·X of falling parts and noise of a share of its norm."""
    generator = torch.Generator().manual_seed(rows + rank)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    left, right = (random(rows, rank) / torch.arange(1, rank + 1)).to(dtype), random(rank, columns).to(dtype)
    product, noise = left.double() @ right.double(), random(rows, columns)
    matrix = product + left_over * noise * product.norm() / noise.norm()
    return matrix.to(dtype), StoredFactors(left, right)


def found(matrix: Tensor, factors: StoredFactors) -> Tensor:
    energy = float(matrix.double().square().sum())
    return stored_errors(matrix, *factors, project(matrix, factors.left), energy)


@pytest.mark.parametrize("left_over", [1.0, 0.09, 1e-2, 1e-3, 3e-5, 1e-6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(90, 40, 7), (40, 90, 7), (3, 50, 1), (20, 20, 20)])
def test_every_rank_has_the_error_of_the_dense_difference(
    rows: int, columns: int, rank: int, dtype: torch.dtype, left_over: float
) -> None:
    matrix, factors = planted(rows, columns, rank, left_over, dtype)
    # Nothing of a float64 matrix that float64 sums could tell is left where the noise is none at all.
    atol = 1e-30 * float(matrix.double().square().sum()) if dtype == torch.float64 else 0.0
    torch.testing.assert_close(
        found(matrix, factors), dense_errors(matrix, factors), rtol=PRECISION, atol=atol
    )


@pytest.mark.parametrize("left_over", [1e-2, 0.0])
def test_a_matrix_of_many_parts_has_the_errors_of_one(
    monkeypatch: pytest.MonkeyPatch, left_over: float
) -> None:
    matrix, factors = planted(61, 17, 5, left_over)
    monkeypatch.setattr(decompose, "_WIDENED_ELEMENTS", 50)  # 2 rows a part, and one alone at the end
    torch.testing.assert_close(
        found(matrix, factors), dense_errors(matrix, factors), rtol=PRECISION, atol=0.0
    )


def test_columns_that_depend_on_each_other_are_no_obstacle() -> None:
    matrix, factors = planted(50, 60, 4, 1e-3)
    twice = StoredFactors(torch.cat([factors.left] * 2, dim=1) / 2, torch.cat([factors.right, factors.right]))
    torch.testing.assert_close(found(matrix, twice), dense_errors(matrix, twice), rtol=PRECISION, atol=0.0)


def test_factors_that_make_it_worse_have_an_error_above_the_change() -> None:
    matrix, factors = planted(50, 60, 4, 0.1)
    away = StoredFactors(-factors.left, factors.right)
    errors = found(matrix, away)
    assert errors[-1] > errors[0]
    torch.testing.assert_close(errors, dense_errors(matrix, away), rtol=1e-6, atol=0.0)


def test_a_zero_matrix_has_the_error_of_its_factors() -> None:
    _, factors = planted(9, 8, 2, 0.0)
    zero = torch.zeros(9, 8)
    torch.testing.assert_close(found(zero, factors), dense_errors(zero, factors), rtol=1e-6, atol=0.0)
    nothing = StoredFactors(torch.zeros(9, 2), torch.zeros(2, 8))
    assert torch.equal(found(zero, nothing), torch.zeros(3, dtype=torch.float64))


def test_the_matrix_is_left_as_it_was() -> None:
    matrix, factors = planted(30, 20, 3, 0.0, torch.float64)
    before = matrix.clone()
    found(matrix, factors)
    assert torch.equal(matrix, before)
