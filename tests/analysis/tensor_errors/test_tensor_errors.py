import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from sigmascope.analysis import tensor_errors as tensor_errors_module
from sigmascope.analysis.tensor_errors import TensorErrors, tensor_errors, tolerance_for

NAN, INF = math.nan, math.inf


def measured(a: Tensor, b: Tensor, axis: int | None = None, **user: Any) -> TensorErrors:
    return tensor_errors(a, b, tolerance_for(a.dtype, b.dtype, **user), axis)


def random_pair(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape, generator=generator)
    return a, a + 0.1 * torch.randn(shape, generator=generator)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 2**31),
    piece=st.sampled_from([1, 3, 7, 1 << 16]),
    data=st.data(),
)
def test_all_figures_are_numpy_s_whatever_the_pieces(
    shape: tuple[int, ...], seed: int, piece: int, data: st.DataObject
) -> None:
    a, b = random_pair(shape, seed)
    axis = data.draw(st.integers(0, len(shape) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_errors_module, "_CPU_PIECE", piece)
        found = measured(a, b, axis, atol=0.1)
    left, right = a.numpy().astype(float), b.numpy().astype(float)
    difference = np.abs(left - right)
    assert found.max_abs == difference.max()
    assert found.max_abs_at is not None
    assert difference[found.max_abs_at.index] == difference.max()
    assert found.relative_l2 == pytest.approx(np.linalg.norm(left - right) / np.linalg.norm(left))
    cosine = (left * right).sum() / np.linalg.norm(left) / np.linalg.norm(right)
    assert found.cosine == pytest.approx(cosine)
    assert found.scale == pytest.approx((left * right).sum() / (left * left).sum())
    assert found.share_outside == pytest.approx((difference > 0.1).mean())
    others = tuple(other for other in range(len(shape)) if other != axis)
    assert found.tokens is not None
    by_token = np.sqrt((difference**2).sum(others) / (left**2).sum(others))
    np.testing.assert_allclose(found.tokens.relative_l2, by_token)
    np.testing.assert_array_equal(found.tokens.max_abs, difference.max(others))
    np.testing.assert_array_equal(found.tokens.outside, (difference > 0.1).sum(others))


def test_the_first_place_is_the_first_in_row_major_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_errors_module, "_CPU_PIECE", 5)
    a = torch.zeros(3, 4, 5)
    b = a.clone()
    b[1, 2, 3] = 1.0
    b[2, 0, 0] = 9.0
    found = measured(a, b, atol=2.0)
    assert found.first_difference is not None
    assert found.first_difference.index == (1, 2, 3)
    assert (found.first_difference.a, found.first_difference.b) == (0.0, 1.0)
    assert found.first_outside is not None
    assert found.first_outside.index == (2, 0, 0)


def test_strides_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_errors_module, "_CPU_PIECE", 4)
    a, b = random_pair((6, 7))
    assert measured(a.T, b.T).relative_l2 == pytest.approx(measured(a, b).relative_l2)
    assert measured(a.T, a.T.contiguous()).unequal == 0
    assert measured(torch.ones(1, 1).expand(4, 4), torch.ones(4, 4)).unequal == 0


def test_nan_and_inf_are_counted_and_kept_out_of_the_sums() -> None:
    a = torch.tensor([1.0, NAN, INF, 2.0, -INF, 3.0])
    b = torch.tensor([1.0, NAN, INF, NAN, INF, 4.0])
    found = measured(a, b)
    assert (found.nan_a, found.inf_a, found.nan_b, found.inf_b) == (1, 2, 2, 2)
    assert found.non_finite_mismatch == 2
    assert found.max_abs == 1.0
    assert found.relative_l2 == pytest.approx(1 / math.sqrt(10))
    assert found.unequal == 3


def test_nothing_finite_leaves_figures_unknown() -> None:
    found = measured(torch.tensor([NAN]), torch.tensor([NAN]))
    assert (found.max_abs, found.relative_l2, found.cosine) == (None, None, None)


def test_a_zero_reference_has_no_relative_error() -> None:
    assert measured(torch.zeros(2), torch.ones(2)).relative_l2 is None
    assert measured(torch.zeros(2), torch.zeros(2)).relative_l2 == 0.0


def test_no_elements_give_no_figures() -> None:
    found = measured(torch.zeros(0, 3), torch.zeros(0, 3), 0)
    assert (found.elements, found.max_abs, found.tokens, found.share_outside) == (0, None, None, 0.0)


def test_integers_beyond_float64_are_told_apart() -> None:
    a, b = torch.tensor([2**62]), torch.tensor([2**62 + 1])
    found = measured(a, b)
    assert (found.unequal, found.outside) == (1, 1)


def test_sums_are_in_float64() -> None:
    # In float32 a sum of 2**24 ones and more stands still.
    a = torch.ones(1).expand(2**24 + 2**20)
    assert measured(a, torch.zeros(1).expand_as(a)).relative_l2 == 1.0


def test_big_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    whole = torch.Tensor.to

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(self.numel())
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    a = torch.zeros(1).expand(1000, 1000)
    measured(a, a)
    assert 0 < max(sizes) <= 1 << 16


def test_shapes_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        measured(torch.zeros(2), torch.zeros(3))
