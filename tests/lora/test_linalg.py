import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sigmascope.lora.linalg import blocked_energy, blocked_norm, frobenius_norm


def exact(values: torch.Tensor) -> float:
    return math.fsum(value * value for value in values.double().tolist())


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 100_000])
def test_quick_energy_is_the_sum_of_squares(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    assert float(blocked_energy(values)) == pytest.approx(exact(values), rel=1e-7)
    assert frobenius_norm(values) == pytest.approx(math.sqrt(exact(values)), rel=1e-14)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-3, 7.7])
def test_a_long_sum_of_equal_values_does_not_drift(value: float) -> None:
    """They keep the rounding of a running sum on one side, which is the worst there is."""
    values = torch.full((1 << 18,), value)
    assert float(blocked_energy(values)) == pytest.approx(exact(values), rel=1e-6)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=600))
def test_any_values_are_summed_well(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    expected = exact(tensor)
    if expected < math.inf:
        assert float(blocked_energy(tensor)) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-19, 1e19, 1e30])
def test_squares_outside_the_range_of_float32_are_summed_all_the_same(size: float) -> None:
    values = torch.full((1000,), size)
    assert float(blocked_energy(values)) == pytest.approx(exact(values), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_reach_the_sum(value: float) -> None:
    values = torch.ones(1000)
    values[500] = value
    assert not math.isfinite(float(blocked_energy(values)))
    assert not math.isfinite(frobenius_norm(values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [0, 1, 257, (1 << 18) + 3])
def test_the_quick_norm_is_the_norm(dtype: torch.dtype, elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert blocked_norm(values) == pytest.approx(math.sqrt(exact(values)), rel=1e-7)


def test_the_quick_norm_of_nan_is_nan() -> None:
    assert math.isnan(blocked_norm(torch.tensor([1.0, math.nan], dtype=torch.bfloat16)))
