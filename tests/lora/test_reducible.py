from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.reducible import FactoredChange, difference_norm

MakeFactors = Callable[..., LoraFactors]


def formed(factors: LoraFactors) -> Tensor:
    return factors.alpha / factors.rank * (factors.up.double() @ factors.down.double())


def random_factors(out: int, inner: int, rank: int, seed: int, alpha: float = 3.0) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)
    up, down = torch.randn(out, rank, generator=generator), torch.randn(rank, inner, generator=generator)
    return LoraFactors(up, down, alpha, (out, inner))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 9), st.integers(0, 999))
def test_a_cut_is_as_near_as_any_matrix_of_that_rank(
    out: int, inner: int, rank: int, kept: int, seed: int
) -> None:
    change = FactoredChange(random_factors(out, inner, rank, seed))
    dense = formed(change.factors)
    best = torch.linalg.svdvals(dense)[kept:].square().sum().sqrt()
    stored = change.cut(kept, torch.float64)
    assert stored.rank <= min(kept, out, inner)
    assert stored.alpha == stored.rank
    assert float((formed(stored) - dense).norm()) == pytest.approx(float(best), abs=1e-10)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 999))
def test_the_spectrum_is_complete_and_that_of_the_formed_change(
    out: int, inner: int, rank: int, seed: int
) -> None:
    change = FactoredChange(random_factors(out, inner, rank, seed))
    spectrum = change.spectrum(1)
    assert spectrum.complete
    torch.testing.assert_close(
        spectrum.all_values(), torch.linalg.svdvals(formed(change.factors)), rtol=1e-10, atol=1e-10
    )
    assert change.norm == pytest.approx(float(formed(change.factors).norm()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_error_is_that_of_the_rounded_factors(dtype: torch.dtype) -> None:
    change = FactoredChange(random_factors(12, 10, 6, seed=1))
    stored = change.cut(3, dtype)
    expected = float((formed(change.factors) - formed(stored)).norm())
    assert change.error(stored) == pytest.approx(expected, rel=1e-6)


def test_a_cut_that_takes_nothing_away_keeps_every_bit(make_factors: MakeFactors) -> None:
    factors = make_factors((8, 6), rank=4, dtype=torch.bfloat16)
    same = FactoredChange(factors).cut(4, torch.bfloat16)
    assert torch.equal(same.up, factors.up)
    assert torch.equal(same.down, factors.down)


def test_a_scale_that_would_round_is_shared_by_both_factors(make_factors: MakeFactors) -> None:
    factors = make_factors((64, 48), rank=4, alpha=1e-4, dtype=torch.float16)
    stored = FactoredChange(factors).cut(4, torch.float16)
    assert stored.scale == 1.0
    plain = LoraFactors((factors.up * factors.scale).half(), factors.down, 4.0, (64, 48))
    exact = formed(factors)
    assert (formed(stored) - exact).norm() < 0.1 * (formed(plain) - exact).norm()


def test_a_rank_above_the_weights_own_is_cut_without_loss() -> None:
    change = FactoredChange(random_factors(4, 9, 7, seed=2))
    stored = change.cut(9999, torch.float64)
    assert stored.rank == 4
    torch.testing.assert_close(formed(stored), formed(change.factors))


def test_factors_too_large_for_the_dtype_are_refused() -> None:
    huge = LoraFactors(torch.full((3, 2), 1e20), torch.full((2, 3), 1e20), 2.0, (3, 3))
    with pytest.raises(NonFiniteError, match="do not fit"):
        FactoredChange(huge).cut(1, torch.float16)


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-6, 1e-9, 1e-12, 0.0])
def test_a_small_difference_is_measured_as_well_as_a_large_one(gap: float) -> None:
    one = random_factors(20, 15, 4, seed=3, alpha=4.0).to(dtype=torch.float64)
    bump = torch.zeros(20, 4, dtype=torch.float64)
    bump[0, 0] = gap
    other = LoraFactors(one.up + bump, one.down, 4.0, (20, 15))
    expected = float(((other.up - one.up) @ one.down).norm())  # the sum rounds at 1e-16 of the values
    assert difference_norm(one, other) == pytest.approx(expected, rel=1e-2, abs=1e-13)
