"""Large tensors are read for their range alone."""

import pytest
import torch

from sigmascope.probes import tensor_facts, tensors
from sigmascope.probes.tensors import quick_facts


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MOST_ELEMENTS", 8)


def test_a_small_tensor_is_read_whole() -> None:
    tensor = torch.rand(8)
    assert quick_facts(tensor, None) == tensor_facts(tensor)


def test_of_a_large_one_the_range_is_read() -> None:
    tensor = torch.arange(-4.0, 12.0)
    facts = quick_facts(tensor, None)
    assert (facts.min, facts.max, facts.nan_count, facts.inf_count) == (-4.0, 11.0, 0, 0)
    assert (facts.mean, facts.std) == (None, None)
    assert "too large to read quickly" in facts.unavailable["mean"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_large_one_that_is_not_finite_is_read_whole(value: float) -> None:
    tensor = torch.arange(16.0)
    tensor[3] = value
    assert quick_facts(tensor, None) == tensor_facts(tensor)


def test_all_is_read_if_asked_for() -> None:
    tensor = torch.rand(16)
    assert quick_facts(tensor, True) == tensor_facts(tensor, statistics=True)
    assert quick_facts(tensor, False).min is None


@pytest.mark.parametrize("tensor", [torch.empty(16, device="meta"), torch.zeros(16, dtype=torch.complex64)])
def test_tensors_without_a_range_are_no_error(tensor: torch.Tensor) -> None:
    assert quick_facts(tensor, None) == tensor_facts(tensor)


def test_bytes_and_half_precision() -> None:
    assert quick_facts(torch.arange(16, dtype=torch.uint8), None).max == 15.0
    assert quick_facts(torch.arange(16, dtype=torch.bfloat16), None).max == 15.0
