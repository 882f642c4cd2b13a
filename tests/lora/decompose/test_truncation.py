from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.decompose import FactoredChange, FormedChange
from sigmascope.lora.factors import LoraFactors, difference_norm

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
    change = FactoredChange(random_factors(out, inner, rank, seed), torch.float64)
    dense = formed(change.factors)
    best = float(torch.linalg.svdvals(dense)[kept:].square().sum().sqrt())
    found = change.cut(kept)
    assert found.factors.rank <= min(kept, rank) or found.factors.rank <= min(out, inner)
    assert found.factors.alpha == found.factors.rank
    assert float((formed(found.factors) - dense).norm()) == pytest.approx(best, abs=1e-9)
    assert found.error_norm == pytest.approx(best, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 999))
def test_the_spectrum_is_complete_and_that_of_the_formed_change(
    out: int, inner: int, rank: int, seed: int
) -> None:
    change = FactoredChange(random_factors(out, inner, rank, seed), torch.float32)
    spectrum = change.spectrum(1)
    assert spectrum.complete
    expected = torch.zeros(max(min(out, inner), spectrum.known), dtype=torch.float64)
    expected[: min(out, inner)] = torch.linalg.svdvals(formed(change.factors))
    known = torch.nn.functional.pad(spectrum.values, (0, len(expected) - spectrum.known))
    torch.testing.assert_close(known, expected, rtol=1e-10, atol=1e-10)
    assert change.norm == pytest.approx(float(formed(change.factors).norm()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [3, 6])
def test_the_error_is_that_of_the_rounded_factors(dtype: torch.dtype, rank: int) -> None:
    change = FactoredChange(random_factors(12, 10, 6, seed=1), dtype)
    found = change.cut(rank)
    expected = float((formed(change.factors) - formed(found.factors)).norm())
    assert found.factors.up.dtype == found.factors.down.dtype == dtype
    assert found.error_norm == pytest.approx(expected, rel=1e-6, abs=1e-13)


def test_rounding_costs_no_more_than_that_of_the_singular_vectors() -> None:
    change = FactoredChange(random_factors(64, 48, 6, seed=1), torch.bfloat16)
    u, sigma, vh = torch.linalg.svd(formed(change.factors), full_matrices=False)
    root = sigma[:6].sqrt()
    plain = (u[:, :6] * root).bfloat16().double() @ (root[:, None] * vh[:6]).bfloat16().double()
    assert change.cut(6).error_norm < float((plain - formed(change.factors)).norm())


def test_a_cut_that_takes_nothing_away_keeps_every_bit(make_factors: MakeFactors) -> None:
    factors = make_factors((8, 6), rank=4, dtype=torch.bfloat16)
    found = FactoredChange(factors, torch.bfloat16).cut(4)
    assert found.error_norm == 0.0
    assert torch.equal(found.factors.up, factors.up)
    assert torch.equal(found.factors.down, factors.down)


def test_a_scale_that_would_round_is_shared_by_both_factors(make_factors: MakeFactors) -> None:
    factors = make_factors((64, 48), rank=4, alpha=1e-4, dtype=torch.float16)
    found = FactoredChange(factors, torch.float16).cut(4)
    assert found.factors.scale == 1.0
    plain = LoraFactors((factors.up * factors.scale).half(), factors.down, 4.0, (64, 48))
    assert found.error_norm < 0.1 * (formed(plain) - formed(factors)).norm()


def test_a_rank_above_the_weights_own_is_cut_without_loss() -> None:
    change = FactoredChange(random_factors(4, 9, 7, seed=2), torch.float64)
    found = change.cut(9999).factors
    assert found.rank == 4
    torch.testing.assert_close(formed(found), formed(change.factors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_more_columns_than_the_change_has_directions(dtype: torch.dtype) -> None:
    planted = random_factors(20, 30, 2, seed=4)
    twice = LoraFactors.concatenate([planted, planted, planted])
    assert FactoredChange(twice, dtype).cut(5).factors.rank == 2


def test_a_zero_change_stays_one() -> None:
    zero = LoraFactors(torch.zeros(3, 2), torch.zeros(2, 4), 1.0, (3, 4))
    found = FactoredChange(zero, torch.float16).cut(1)
    assert found.error_norm == 0.0
    assert float(found.factors.delta().abs().max()) == 0.0


def test_factors_too_large_for_the_dtype_are_refused() -> None:
    huge = LoraFactors(torch.full((3, 2), 1e20), torch.full((2, 3), 1e20), 2.0, (3, 3))
    with pytest.raises(NonFiniteError, match="do not fit float16"):
        FactoredChange(huge, torch.float16).cut(1)


@pytest.mark.parametrize("rank", [1, 4, 8, 20])
def test_a_formed_change_is_cut_as_its_svd_is(rank: int) -> None:
    dense = torch.randn(10, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    change = FormedChange(dense, torch.float32)
    values = torch.linalg.svdvals(dense.double().reshape(10, 8))
    found = change.cut(rank)
    assert found.factors.weight_shape == (10, 2, 2, 2)
    assert found.error_norm == pytest.approx(float(values[rank:].square().sum().sqrt()), abs=1e-5)
    assert float((found.factors.delta() - dense).norm()) == pytest.approx(found.error_norm, abs=1e-5)


@pytest.mark.parametrize("wanted", [3, 8, 99])
def test_a_formed_change_gives_the_values_that_are_wanted(wanted: int) -> None:
    dense = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    spectrum = FormedChange(dense, torch.float32).spectrum(wanted)
    assert spectrum.known >= min(wanted, 8)
    expected = torch.linalg.svdvals(dense.double())[: spectrum.known]
    torch.testing.assert_close(spectrum.values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gap", [1.0, 1e-3, 1e-6, 1e-9, 1e-12, 0.0])
def test_a_small_difference_is_measured_as_well_as_a_large_one(gap: float) -> None:
    one = random_factors(20, 15, 4, seed=3, alpha=4.0).to(dtype=torch.float64)
    bump = torch.zeros(20, 4, dtype=torch.float64)
    bump[0, 0] = gap
    other = LoraFactors(one.up + bump, one.down, 4.0, (20, 15))
    expected = float(((other.up - one.up) @ one.down).norm())  # the sum rounds at 1e-16 of the values
    assert difference_norm(one, other) == pytest.approx(expected, rel=1e-2, abs=1e-13)
