"""Writes that move no counter, as a few elements of some weights tell of them."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.conftest import Pretend
from torch import Tensor, nn

from sigmascope.probes.glimpses import Glimpses
from sigmascope.probes.model_fingerprints import model_fingerprint, state_of


def weights(count: int = 40, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(6, 5 + place, generator=generator) for place in range(count))
    return [nn.Parameter(one.to(dtype)) for one in drawn]


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "zeros": lambda weight: weight.data.zero_(),
    "added to": lambda weight: weight.data.add_(0.5),
    "exchanged": lambda weight: setattr(weight, "data", weight.data + 0.5),
    "NaN": lambda weight: weight.data.fill_(torch.nan),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_all_is_seen_at_once(write: str) -> None:
    own = weights()
    versions = [weight._version for weight in own]
    glimpses = Glimpses(own)
    assert not glimpses.has_changed()
    for weight in own:
        WRITES[write](weight)
    assert [weight._version for weight in own] == versions
    assert glimpses.has_changed()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_write_to_one_is_seen_once_its_turn_has_come(dtype: torch.dtype) -> None:
    own = weights(dtype=dtype)
    glimpses = Glimpses(own)
    own[7].data.zero_()
    assert [glimpses.has_changed() for _ in range(3)].count(True) == 1
    assert [glimpses.has_changed() for _ in range(3)].count(True) == 1


def test_values_that_do_not_change_are_never_taken_for_others() -> None:
    own = [*weights(3), nn.Parameter(torch.full((9,), torch.nan)), nn.Parameter(torch.empty(0))]
    glimpses = Glimpses([*own, torch.empty(4, 4, device="meta"), torch.ones(2, 2).to_sparse()])
    assert not any(glimpses.has_changed() for _ in range(9))
    assert not Glimpses([]).has_changed()


def test_a_write_is_seen_beside_weights_of_a_dtype_that_cannot_be_copied() -> None:
    own = weights(4)
    packed = torch.empty(16, dtype=vars(torch)["uint4"])
    with pytest.raises(RuntimeError):
        packed[::2].contiguous()
    glimpses = Glimpses([packed, *own])
    assert not glimpses.has_changed()
    for weight in own:
        weight.data.zero_()
    assert glimpses.has_changed()


def test_no_weight_is_kept_alive() -> None:
    own = weights(2)
    first, memory = weakref.ref(own[0]), weakref.ref(own[0].untyped_storage())
    glimpses = Glimpses(own)
    glimpses.has_changed()
    own.clear()
    gc.collect()
    assert (first(), memory()) == (None, None)
    assert not glimpses.has_changed()


def test_on_a_device_a_write_is_seen_a_look_later_and_nobody_waits(pretend: Pretend) -> None:
    with pretend("cuda") as device:
        own: list[Tensor] = [weight.detach().to("cuda") for weight in weights(12)]
        device.waits.clear()
        glimpses = Glimpses(own)
        quiet = [glimpses.has_changed() for _ in range(4)]
        for weight in own:
            weight.data.zero_()
        seen = [glimpses.has_changed() for _ in range(4)]
        waits = [wait for wait in device.waits if wait.is_ours]
    assert not any(quiet)
    assert any(seen)
    assert waits == []


def test_a_models_fingerprint_is_read_again_after_a_write_that_moves_no_counter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before, state = model_fingerprint(model), state_of(model)
    assert model_fingerprint(model) == before
    for weight in model.parameters():
        weight.data += 1.0
    assert state_of(model) == state
    after = model_fingerprint(model)
    assert after.value is not None
    assert after != before
