from collections.abc import Callable

import pytest
import torch
from scipy.linalg import subspace_angles

from sigmascope.lora.effect import shared_spaces
from sigmascope.lora.factors import LoraFactors

Randn = Callable[..., torch.Tensor]


@pytest.fixture
def randn() -> Randn:
    generator = torch.Generator().manual_seed(11)
    return lambda *shape: torch.randn(*shape, generator=generator)


def factors(up: torch.Tensor, down: torch.Tensor, alpha: float = 1.0) -> LoraFactors:
    return LoraFactors(up, down, alpha, (up.shape[0], down.shape[1]))


def mean_squared_cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    angles = torch.from_numpy(subspace_angles(one.double().numpy(), other.double().numpy()))
    return float(angles.cos().square().mean())


@pytest.mark.parametrize(("r", "s"), [(3, 5), (5, 3), (4, 4)])
def test_overlaps_are_scipys_angles(randn: Randn, r: int, s: int) -> None:
    a, b = factors(randn(30, r), randn(r, 20)), factors(randn(30, s), randn(s, 20))
    found = shared_spaces(a, b)
    assert found.columns == pytest.approx(mean_squared_cosine(a.up, b.up), rel=1e-9)
    assert found.rows == pytest.approx(mean_squared_cosine(a.down.mT, b.down.mT), rel=1e-9)
    assert found.ranks == (r, s)


def test_norms_and_inner_product_are_those_of_the_products(randn: Randn) -> None:
    a, b = factors(randn(12, 3), randn(3, 9), alpha=6.0), factors(randn(12, 2), randn(2, 9))
    found = shared_spaces(a, b)
    one, two = a.delta(torch.float64), b.delta(torch.float64)
    assert found.norms == pytest.approx((float(one.norm()), float(two.norm())))
    assert found.inner == pytest.approx(float((one * two).sum()))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_columns_of_any_length_count_as_directions(randn: Randn, size: float) -> None:
    up, down = randn(30, 3), randn(3, 20)
    scaled = factors(up * torch.tensor([1.0, size, 1.0]), down / torch.tensor([[1.0], [size], [1.0]]))
    found = shared_spaces(scaled, factors(up, down))
    assert (found.columns, found.rows) == pytest.approx((1.0, 1.0), abs=1e-9)


def test_factors_that_are_nearly_dependent_keep_their_directions(randn: Randn) -> None:
    up, down, beside = randn(30, 2).double(), randn(2, 20).double(), randn(30, 1).double()
    near = torch.cat(
        [up[:, :1], up[:, :1] + 1e-5 * beside], dim=1
    )  # spans what its two columns differ in, too
    found = shared_spaces(factors(near, down), factors(torch.cat([up[:, :1], beside], dim=1), down))
    assert found.columns == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("copies", [1, 3])
def test_repeated_columns_are_one_direction(randn: Randn, copies: int) -> None:
    up, down = randn(30, 1), randn(1, 20)
    repeated = factors(up.repeat(1, copies), down.repeat(copies, 1))
    assert shared_spaces(repeated, factors(up, down)).ranks == (1, 1)


def test_zero_factors_share_nothing(randn: Randn) -> None:
    found = shared_spaces(factors(torch.zeros(8, 2), randn(2, 8)), factors(randn(8, 2), randn(2, 8)))
    assert (found.columns, found.rows, found.ranks[0], found.norms[0]) == (0.0, 0.0, 0, 0.0)


def test_a_rank_above_the_weights_side_is_what_the_weight_has(randn: Randn) -> None:
    wide = factors(randn(4, 9), randn(9, 20))
    assert shared_spaces(wide, factors(randn(4, 2), randn(2, 20))).ranks == (4, 2)
