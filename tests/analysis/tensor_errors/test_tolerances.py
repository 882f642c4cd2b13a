import numpy as np
import pytest
import torch

from sigmascope.analysis.tensor_errors import tolerance_for, unit_roundoff
from sigmascope.errors import ConfigError


@pytest.mark.parametrize(
    ("dtype", "significand_bits"),
    [
        (torch.float64, 53),
        (torch.float32, 24),
        (torch.float16, 11),
        (torch.bfloat16, 8),
        (torch.float8_e4m3fn, 4),
        (torch.float8_e5m2, 3),
    ],
)
def test_the_unit_roundoff_is_two_to_minus_the_significand(dtype: torch.dtype, significand_bits: int) -> None:
    assert unit_roundoff(dtype) == 2.0**-significand_bits


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_do_not_round(dtype: torch.dtype) -> None:
    tolerance = tolerance_for(dtype, dtype)
    assert tolerance.element(1.0) == (0.0, 0.0)
    assert tolerance.computed == tolerance.close == 0.0


@pytest.mark.parametrize("order", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_narrower_dtype_decides(order: tuple[torch.dtype, torch.dtype]) -> None:
    tolerance = tolerance_for(*order)
    assert tolerance.narrower == "bfloat16"
    assert tolerance.computed == pytest.approx(8 * 2.0**-8, rel=1e-3)


def test_two_computations_add_as_squares() -> None:
    one = tolerance_for(torch.float64, torch.bfloat16).computed
    assert tolerance_for(torch.bfloat16, torch.bfloat16).computed == pytest.approx(one * np.sqrt(2))


def test_half_the_smallest_number_is_allowed_near_zero() -> None:
    tolerance = tolerance_for(torch.float32, torch.float16)
    assert tolerance.smallest == float(np.finfo(np.float16).smallest_subnormal) / 2


def test_the_user_s_tolerance_takes_the_default_s_place() -> None:
    assert tolerance_for(torch.float32, torch.float32, rtol=0.1).element(5.0) == (0.1, 0.0)
    assert tolerance_for(torch.float32, torch.float32, atol=0.1).element(5.0) == (0.0, 0.1)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_tolerance_that_allows_nothing_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="rtol"):
        tolerance_for(torch.float32, torch.float32, rtol=value)
