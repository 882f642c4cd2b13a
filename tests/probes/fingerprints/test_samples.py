"""Samples estimate what a weight's change is."""

import pytest
import torch
from torch import Tensor

from sigmascope.probes.fingerprints import (
    begin_samples,
    fingerprint,
    fingerprints,
    join_small,
    positions,
    samples,
)


def sample(tensor: Tensor) -> Tensor:
    return samples({"w": tensor})["w"]


def test_a_small_tensor_is_taken_whole() -> None:
    weight = torch.randn(5, 7)
    assert torch.equal(sample(weight), weight.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_the_elements_are_those_at_the_positions(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 48, 3, 3).to(dtype)
    where = positions(weight.numel())
    expected = weight.view(-1).to(torch.float64)[where]
    assert torch.equal(sample(weight).to(torch.float64), expected)
    assert sample(weight).dtype == dtype


def test_the_layout_in_memory_does_not_count() -> None:
    weight = torch.randn(8, 16, 9, 9)
    assert torch.equal(sample(weight.to(memory_format=torch.channels_last)), sample(weight))


def test_positions_spread_over_columns() -> None:
    columns = positions(1024 * 1024) % 1024
    assert torch.unique(columns).numel() > 600  # 1024 random ones hit 647 of 1024


def test_a_low_rank_change_is_estimated_to_some_per_cent() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(512, 768, generator=generator)
    change = torch.randn(512, 8, generator=generator) @ torch.randn(8, 768, generator=generator)
    difference = sample(weight + change) - sample(weight)
    estimate = difference.norm() * (weight.numel() / difference.numel()) ** 0.5
    assert float(estimate) == pytest.approx(float(change.norm()), rel=0.1)


def test_what_has_no_floating_point_values_is_left_out() -> None:
    tensors = {"meta": torch.empty(3, device="meta"), "ids": torch.arange(3), "none": torch.empty(0)}
    assert samples(tensors) == {}


def test_what_changed_is_told_for_all_at_once_and_bit_by_bit() -> None:
    tensors = {str(index): torch.randn(index + 1, 40) for index in range(60)}
    tensors |= {"nan": torch.full((3,), float("nan")), "half": torch.randn(9, 200).to(torch.float16)}
    before = samples(tensors)
    assert samples(tensors).others_than(before) == frozenset()
    later = {name: tensor.clone() for name, tensor in reversed(tensors.items())}
    later["7"][0, 0] += 1
    later["40"].neg_()
    later["half"] = later["half"][:4]  # no longer as many elements
    later["new"] = torch.ones(2)
    assert samples(later).others_than(before) == {"7", "40", "half"}
    assert torch.equal(samples(later)["40"], -before["40"])


@pytest.mark.parametrize("size", [64, 1 << 17])  # the larger is longer than one piece of a hash
def test_fingerprints_of_samples_are_those_of_the_elements(size: int) -> None:
    tensors = {
        "half": torch.randn(7, 30).to(torch.bfloat16),
        "codes": torch.arange(5, dtype=torch.int8),
        "large": torch.randn(400, 500),
    }
    taken = samples(tensors, size=size, floating_only=False)
    prints = taken.fingerprints()
    assert list(prints) == list(tensors)
    assert prints == {name: fingerprint(taken[name]).value for name in tensors}


def test_small_tensors_that_are_joined_once_are_read_as_each_by_itself() -> None:
    tensors = {
        "large": torch.randn(40, 50),
        "small": torch.randn(5, 7),
        "turned": torch.randn(5, 7).T,
        "codes": torch.arange(5, dtype=torch.int8),
        "empty": torch.zeros(0),
        "nowhere": torch.zeros(3, device="meta"),
        "half": torch.randn(9).to(torch.bfloat16),
    }
    joined = join_small(tensors)
    assert set(joined.shapes) == {"small", "turned", "codes", "half"}
    assert fingerprints(tensors, joined=joined) == {name: fingerprint(one) for name, one in tensors.items()}
    asked = {name: tensor for name, tensor in tensors.items() if name != "half"}
    taken = begin_samples(asked, floating_only=False, joined=joined).result()
    plain = samples(asked, floating_only=False)
    assert list(taken) == list(plain) == ["large", "small", "turned", "codes"]
    assert taken.others_than(plain) == plain.others_than(taken) == frozenset()
    changed = {**asked, "small": asked["small"] + 1, "large": asked["large"] + 1}
    later = begin_samples(changed, floating_only=False, joined=join_small(changed)).result()
    assert later.others_than(taken) == later.others_than(plain) == {"small", "large"}
