from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sigmascope.lora.compare import ModuleDifference, ModuleSide, compare_deltas, compare_factors
from sigmascope.lora.factors import LoraFactors

MakeFactors = Callable[..., LoraFactors]


def side(factors: LoraFactors, norm: float | None = None) -> ModuleSide:
    known = float(factors.delta(torch.float64).norm()) if norm is None else norm
    return ModuleSide("layer", "lora", factors.rank, factors.alpha, "float32", factors.weight_shape, known)


def difference(one: LoraFactors, other: LoraFactors) -> ModuleDifference:
    return compare_factors("layer", side(one), side(other), one, other)


def test_measures_are_those_of_the_formed_changes(make_factors: MakeFactors) -> None:
    one, other = make_factors((9, 7), 3, alpha=2.0, seed=1), make_factors((9, 7), 4, seed=2)
    first, second = one.delta(torch.float64), other.delta(torch.float64)
    found = difference(one, other)
    assert found.inner == pytest.approx(float((first * second).sum()))
    assert found.difference_norm == pytest.approx(float((first - second).norm()))
    assert found.relative_difference == pytest.approx(float((first - second).norm() / first.norm()))
    assert found.cosine == pytest.approx(
        float(torch.cosine_similarity(first.flatten(), second.flatten(), dim=0))
    )


def test_overlaps_are_those_of_the_singular_vectors(make_factors: MakeFactors) -> None:
    one, other = make_factors((9, 7), 3, seed=1), make_factors((9, 7), 4, seed=2)
    u1, _, v1 = torch.linalg.svd(one.delta(torch.float64))
    u2, _, v2 = torch.linalg.svd(other.delta(torch.float64))
    found = difference(one, other)
    columns = (u1[:, :3].T @ u2[:, :4]).square().sum() / 3
    rows = (v1[:3] @ v2[:4].T).square().sum() / 3
    assert found.column_overlap == pytest.approx(float(columns), rel=1e-5)
    assert found.row_overlap == pytest.approx(float(rows), rel=1e-5)


def test_the_same_change_in_other_factors_is_within_a_small_tolerance(make_factors: MakeFactors) -> None:
    one = make_factors((9, 7), 3, alpha=5.0, dtype=torch.float64)
    mixing = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, -1.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
    other = replace(one, up=one.up @ mixing, down=torch.linalg.inv(mixing) @ one.down)
    assert difference(one, other).within(1e-12)


def test_a_scaled_change_is_within_only_by_its_factor(make_factors: MakeFactors) -> None:
    one = make_factors((9, 7), 3)
    found = difference(one, replace(one, alpha=-2.0 * one.alpha))
    assert not found.within(0.5)
    assert found.within_scaled(-2.0, 1e-6)
    assert not found.within_scaled(2.0, 0.5)


def test_a_pointwise_convolution_is_compared_with_a_linear_layer(make_factors: MakeFactors) -> None:
    one = make_factors((6, 5), 2)
    assert difference(one, replace(one, weight_shape=(6, 5, 1, 1))).within(1e-12)


def test_weights_of_other_shape_share_nothing(make_factors: MakeFactors) -> None:
    one, other = make_factors((4, 18), 2), make_factors((4, 3, 3, 3), 2)
    found = difference(one, other)
    assert found.presence == "other_shape"
    assert found.difference_norm == pytest.approx((found.norm_a**2 + found.norm_b**2) ** 0.5)
    assert not found.within(0.9)


def test_formed_changes_are_compared_value_by_value() -> None:
    one, other = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    sides = [ModuleSide("layer", "loha", None, None, None, (1, 2), norm) for norm in (3.0, 4.0)]
    found = compare_deltas("layer", sides[0], sides[1], one, other)
    assert found.difference_norm == 5.0
    assert found.cosine == 0.0
    assert found.column_overlap is None


def test_a_module_of_zeros_equals_a_missing_one(make_factors: MakeFactors) -> None:
    zero = side(make_factors((4, 4), 1), norm=0.0)
    assert ModuleDifference("layer", "only_a", zero, None, 0.0, 0.0).within(0.0)
    assert not ModuleDifference("layer", "only_a", side(make_factors((4, 4), 1)), None, 0.0, 1.0).within(0.5)


def test_what_is_not_measured_is_within_no_tolerance(make_factors: MakeFactors) -> None:
    unknown = ModuleSide("layer", "dora", None, None, None, (4, 4), None)
    found = ModuleDifference("layer", "not_measured", unknown, unknown)
    assert not found.within(1.0)
    assert not found.within_scaled(1.0, 1.0)
    assert found.cosine is None
