from math import inf, nan

import pytest
import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.lora import decompose as module
from sigmascope.lora.decompose import decompose, factors_full_rank


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [20, 300])
def test_small_singular_values_survive_beside_large_ones(size: int) -> None:
    # A Gram matrix in float32 would lose 1e-5 beside 1: its square is below the rounding of 1.
    left, right = (torch.linalg.qr(random_matrix(size, size, seed)).Q for seed in (1, 2))
    planted = torch.tensor([1.0, 1e-3, 1e-5], dtype=torch.float64)
    matrix = (left[:, :3] * planted) @ right[:, :3].T
    found = decompose(matrix.float(), 3, torch.float32).spectrum.values
    torch.testing.assert_close(found, planted, rtol=0.02, atol=0.0)


def test_a_small_change_loses_little_in_float16() -> None:
    matrix = random_matrix(64, 48).mul(1e-7).float()
    stored = decompose(matrix, 47, torch.float16)
    best = float(torch.linalg.svdvals(matrix.double())[47])
    assert stored.error_norm == pytest.approx(best, abs=1e-3 * float(matrix.norm()))


@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_no_numbers_are_refused(value: float) -> None:
    matrix = torch.ones(3, 3)
    matrix[1, 2] = value
    with pytest.raises(NonFiniteError, match="1 of 9 values"):
        factors_full_rank(matrix)


def test_where_float32_does_not_converge_float64_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.linalg.svd

    def fails_in_single(matrix: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
        if matrix.dtype == torch.float32:
            raise module._NotConverged("did not converge")
        left, sigma, right = exact(matrix, full_matrices=full_matrices)
        return left, sigma, right

    monkeypatch.setattr(torch.linalg, "svd", fails_in_single)
    matrix = random_matrix(6, 4).float()
    found = decompose(matrix, 3, torch.float32)
    best = float(torch.linalg.svdvals(matrix.double())[3])
    assert found.error_norm == pytest.approx(best, rel=1e-5)


def test_an_svd_that_never_converges_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(matrix: Tensor, full_matrices: bool) -> None:
        raise module._NotConverged("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", never)
    with pytest.raises(SigmascopeError, match=r"5×4 matrix did not converge.*rank 9999"):
        decompose(torch.ones(5, 4), 2, torch.float32)


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
    with pytest.raises(LoraFormatError, match="not a matrix"):
        factors_full_rank(torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_decomposition_on_the_gpu_agrees_with_the_cpu() -> None:
    matrix = random_matrix(64, 48)
    here, there = decompose(matrix, 5, torch.float64), decompose(matrix.cuda(), 5, torch.float64)
    assert there.factors.up.is_cuda
    torch.testing.assert_close(there.factors.delta(torch.float64).cpu(), here.factors.delta(torch.float64))
