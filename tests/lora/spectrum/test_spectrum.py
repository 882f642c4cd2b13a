import math

import pytest
import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.linalg import Spectrum


def leading(matrix: Tensor, count: int) -> Spectrum:
    values = torch.linalg.svdvals(matrix.double())[:count]
    return Spectrum(values, float(matrix.double().square().sum()), tuple(matrix.shape))


@pytest.fixture
def matrix() -> Tensor:
    return torch.randn(12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_the_error_at_a_rank_is_that_of_the_nearest_matrix(matrix: Tensor, rank: int) -> None:
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
    nearest = (u[:, :rank] * sigma[:rank]) @ vh[:rank]
    energies = leading(matrix, 5).discarded_energies()
    assert len(energies) == 6  # above the known values the error is unknown
    assert math.sqrt(energies[rank]) == pytest.approx(float((matrix - nearest).norm()), rel=1e-12)


def test_every_value_known_is_complete_and_leaves_no_error(matrix: Tensor) -> None:
    spectrum = leading(matrix, 12)
    assert spectrum.complete
    assert float(spectrum.discarded_energies()[12]) == 0.0


def test_some_values_known_is_not_complete(matrix: Tensor) -> None:
    assert not leading(matrix, 11).complete


def test_the_next_value_is_below_its_bound(matrix: Tensor) -> None:
    sigma = torch.linalg.svdvals(matrix)
    for known in range(12):
        assert float(sigma[known]) <= leading(matrix, known).next_value_bound


def test_the_energy_left_bounds_the_next_value_where_the_last_one_does_not() -> None:
    spectrum = Spectrum(torch.tensor([2.0, 1.0]), 5.0 + 1e-4, (8, 8))
    assert spectrum.next_value_bound == pytest.approx(1e-2, rel=1e-2)


def test_a_planted_rank_is_complete_as_soon_as_a_value_is_rounding() -> None:
    planted = torch.randn(40, 3) @ torch.randn(3, 60)  # float32: the values beyond the third are about 1e-7
    sigma = torch.linalg.svdvals(planted)
    energy = float(planted.double().square().sum())
    assert not Spectrum(sigma[:2], energy, (40, 60)).complete
    assert Spectrum(sigma[:8], energy, (40, 60)).complete


def test_rounded_zeros_are_not_significant() -> None:
    planted = torch.randn(40, 3) @ torch.randn(3, 60)
    sigma = torch.linalg.svdvals(planted)
    spectrum = Spectrum(sigma, float(planted.double().square().sum()), (40, 60))
    assert spectrum.significant == 3
    assert spectrum.nonzero > 3


def test_factors_have_no_more_values_than_their_rank() -> None:
    spectrum = Spectrum.of_factors(torch.tensor([3.0, 1.0]), (6, 2, 3, 3))
    assert spectrum.complete
    assert spectrum.nonzero == 2
    assert spectrum.total_energy == 10.0
    assert spectrum.values.tolist() == [3.0, 1.0, 0.0]  # one zero says that the rest is zero


def test_a_change_of_zero_is_complete_without_values() -> None:
    spectrum = Spectrum(torch.zeros(0), 0.0, (4, 4))
    assert spectrum.complete
    assert spectrum.discarded_energies().tolist() == [0.0]
    assert spectrum.next_value_bound == 0.0


def test_small_discarded_values_are_not_lost_beside_large_kept_ones() -> None:
    spectrum = Spectrum(torch.tensor([1e6, 1e-6], dtype=torch.float64), 1e12 + 1e-12, (2, 2))
    assert math.sqrt(spectrum.discarded_energies()[1]) == pytest.approx(1e-6, rel=1e-12)


def test_values_are_kept_in_float64(matrix: Tensor) -> None:
    assert Spectrum(torch.tensor([1.0]), 1.0, (3, 3)).values.dtype == torch.float64


def test_values_that_rise_are_refused() -> None:
    with pytest.raises(ValueError, match="descending order"):
        Spectrum(torch.tensor([1.0, 2.0]), 5.0, (3, 3))


def test_more_values_than_the_shape_has_are_refused() -> None:
    with pytest.raises(ValueError, match="3 singular values"):
        Spectrum(torch.ones(3), 3.0, (2, 5))


@pytest.mark.parametrize(("value", "energy"), [(math.nan, 1.0), (1.0, math.inf)])
def test_values_that_are_no_numbers_are_refused(value: float, energy: float) -> None:
    with pytest.raises(NonFiniteError):
        Spectrum(torch.tensor([value]), energy, (2, 2))
