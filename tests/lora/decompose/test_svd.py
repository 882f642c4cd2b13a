from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import ConfigError, LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.lora import decompose
from sigmascope.lora.decompose import factors_full_rank, truncated_svd
from sigmascope.lora.factors import LoraFactors

MakeFactors = Callable[..., LoraFactors]


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 14), st.integers(0, 1000))
def test_error_is_the_discarded_energy(rows: int, columns: int, rank: int, seed: int) -> None:
    matrix = random_matrix(rows, columns, seed)
    found = truncated_svd(matrix, rank)
    error = float((matrix - found.up @ found.down).norm())
    energies = torch.linalg.svdvals(matrix).square()
    assert found.rank == min(rank, rows, columns)
    assert error**2 == pytest.approx(float(energies[rank:].sum()), rel=1e-9, abs=1e-12)
    assert found.discarded_energy == pytest.approx(error**2, rel=1e-9, abs=1e-12)
    assert found.total_energy == pytest.approx(float(matrix.square().sum()), rel=1e-12)


def test_a_planted_low_rank_matrix_is_found_exactly(make_factors: MakeFactors) -> None:
    planted = make_factors((40, 30), rank=4, dtype=torch.float64).delta(torch.float64)
    found = truncated_svd(planted, 4)
    torch.testing.assert_close(found.up @ found.down, planted, rtol=1e-12, atol=1e-12)
    assert found.relative_error < 1e-7


def test_singular_values_are_split_evenly_between_the_factors() -> None:
    found = truncated_svd(random_matrix(9, 6), 3)
    diagonal = torch.diag(found.singular_values)
    torch.testing.assert_close(found.up.T @ found.up, diagonal)
    torch.testing.assert_close(found.down @ found.down.T, diagonal)


def test_half_precision_input_is_decomposed_in_float32() -> None:
    matrix = random_matrix(8, 8).to(torch.bfloat16)
    found = truncated_svd(matrix, 8)
    assert found.up.dtype == torch.float32
    torch.testing.assert_close(found.up @ found.down, matrix.float(), rtol=1e-5, atol=1e-5)


def test_small_singular_values_survive_beside_large_ones() -> None:
    # A Gram matrix in float32 would lose 1e-5 beside 1: its square is below the rounding of 1.
    left, right = (torch.linalg.qr(random_matrix(20, 20, seed)).Q for seed in (1, 2))
    planted = torch.tensor([1.0, 1e-3, 1e-5], dtype=torch.float64)
    matrix = (left[:, :3] * planted) @ right[:, :3].T
    found = truncated_svd(matrix.float(), 3).singular_values.double()
    torch.testing.assert_close(found, planted, rtol=0.02, atol=0.0)


def test_a_zero_matrix_has_no_error() -> None:
    found = truncated_svd(torch.zeros(4, 3), 2)
    assert (found.total_energy, found.relative_error) == (0.0, 0.0)
    assert torch.equal(found.up @ found.down, torch.zeros(4, 3))


def test_factors_carry_alpha_equal_to_rank_and_the_weights_shape() -> None:
    weight = random_matrix(6, 18).float()
    factors = truncated_svd(weight, 4).factors((6, 2, 3, 3), torch.bfloat16)
    assert (factors.rank, factors.alpha, factors.scale) == (4, 4.0, 1.0)
    assert factors.up.dtype == factors.down.dtype == torch.bfloat16
    assert factors.delta().shape == (6, 2, 3, 3)


def test_even_split_loses_less_in_float16_than_all_in_one_factor() -> None:
    matrix = random_matrix(64, 48).mul(1e-7).float()
    found = truncated_svd(matrix, 48)
    sigma_root = found.singular_values.sqrt()

    def error(up: Tensor, down: Tensor) -> float:
        return float((up.half().double() @ down.half().double() - matrix.double()).norm() / matrix.norm())

    assert error(found.up, found.down) < error(found.up * sigma_root, found.down / sigma_root[:, None]) / 10


@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    matrix = torch.ones(3, 3)
    matrix[1, 2] = value
    with pytest.raises(NonFiniteError, match="1 of 9 values"):
        truncated_svd(matrix, 1)
    with pytest.raises(NonFiniteError):
        factors_full_rank(matrix)


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank of 0"):
        truncated_svd(torch.ones(3, 3), 0)


def test_where_float32_does_not_converge_float64_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.linalg.svd

    def fails_in_single(matrix: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
        if matrix.dtype == torch.float32:
            raise decompose._NotConverged("did not converge")
        left, sigma, right = exact(matrix, full_matrices=full_matrices)
        return left, sigma, right

    monkeypatch.setattr(torch.linalg, "svd", fails_in_single)
    matrix = random_matrix(5, 4).float()
    found = truncated_svd(matrix, 4)
    assert found.up.dtype == torch.float32
    torch.testing.assert_close(found.up @ found.down, matrix, rtol=1e-5, atol=1e-5)


def test_an_svd_that_never_converges_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(matrix: Tensor, full_matrices: bool) -> None:
        raise decompose._NotConverged("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", never)
    with pytest.raises(SigmascopeError, match=r"5×4 matrix did not converge.*rank 9999"):
        truncated_svd(torch.ones(5, 4), 2)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (3, 2, 3, 3), (20, 2, 3, 3)])
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_rank_factors_lose_not_one_bit(
    shape: tuple[int, ...], magnitude: float, dtype: torch.dtype
) -> None:
    delta = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * magnitude).to(dtype)
    factors = factors_full_rank(delta)
    assert factors.rank == factors.alpha == min(shape[0], delta[0].numel())
    assert torch.equal(factors.delta(dtype), delta)


def test_full_rank_factors_of_a_small_change_survive_float16() -> None:
    delta = random_matrix(32, 32).mul(1e-6).float()
    stored = factors_full_rank(delta).to(dtype=torch.float16)
    plain_error = float((delta.half().float() - delta).norm() / delta.norm())
    assert plain_error > 0.01
    assert float((stored.delta() - delta).norm() / delta.norm()) < 5e-4


def test_full_rank_factors_of_zero_and_of_a_bias() -> None:
    assert torch.equal(factors_full_rank(torch.zeros(3, 2)).delta(), torch.zeros(3, 2))
    with pytest.raises(LoraFormatError, match="no matrix"):
        factors_full_rank(torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_decomposition_on_the_gpu_agrees_with_the_cpu() -> None:
    matrix = random_matrix(64, 48)
    here, there = truncated_svd(matrix, 5), truncated_svd(matrix.cuda(), 5)
    assert there.up.is_cuda
    torch.testing.assert_close((there.up @ there.down).cpu(), here.up @ here.down)
