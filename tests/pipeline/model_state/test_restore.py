import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from sigmascope.pipeline.model_state import _Placed, as_before, for_inference, modules_in


class Encoder(nn.Module):
    """Counts its calls in a buffer, and keeps what it made last, as causal video VAEs do."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.use_tiling = True

    def forward(self, pixels: Tensor) -> Tensor:
        self.count += 1
        kept: Tensor = self.conv(pixels)
        self.kept = kept
        return kept


class Holder:
    """Holds a module beside other things, as ComfyUI's VAE does."""

    def __init__(self) -> None:
        self.first_stage_model = Encoder()
        self.name = "vae"


def _fail_after(encoder: Encoder, change: Callable[[], object]) -> None:
    with suppress(MemoryError), as_before(encoder):
        change()
        raise MemoryError


def test_a_failed_call_leaves_nothing_it_kept() -> None:
    encoder = Encoder()
    kept: list[weakref.ref[Tensor]] = []

    def change() -> None:
        encoder(torch.zeros(1, 3, 2, 2))
        kept.append(weakref.ref(encoder.kept))

    _fail_after(encoder, change)
    gc.collect()
    assert kept[0]() is None
    assert not hasattr(encoder, "kept")


def test_a_counter_is_as_before_after_a_failure() -> None:
    encoder = Encoder()
    _fail_after(encoder, lambda: encoder(torch.zeros(1, 3, 2, 2)))
    assert encoder.count.item() == 0


def test_a_dtype_is_as_before_after_a_failure() -> None:
    encoder = Encoder()
    weight = encoder.conv.weight
    _fail_after(encoder, encoder.double)
    assert encoder.conv.weight is weight
    assert weight.dtype == torch.float32


def test_a_replaced_parameter_is_put_back_in_its_place() -> None:
    encoder = Encoder()
    weight, order = encoder.conv.weight, list(encoder.state_dict())

    def change() -> None:
        del encoder.conv.weight
        encoder.conv.weight = nn.Parameter(torch.zeros(1))

    _fail_after(encoder, change)
    assert encoder.conv.weight is weight
    assert list(encoder.state_dict()) == order


def test_success_keeps_what_the_vae_made_of_itself() -> None:
    encoder = Encoder()
    with as_before(encoder):
        encoder(torch.zeros(1, 3, 2, 2))
    assert encoder.count.item() == 1


def test_success_is_put_back_too_where_asked_for() -> None:
    encoder = Encoder()
    with as_before(encoder, also_on_success=True):
        encoder.use_tiling = False
    assert encoder.use_tiling is True


def test_of_a_holder_only_its_own_attributes_are_put_back() -> None:
    holder = Holder()
    with as_before(holder, also_on_success=True):
        holder.name = "other"
        holder.first_stage_model.use_tiling = False
    assert holder.name == "vae"
    assert holder.first_stage_model.use_tiling is False


@pytest.mark.parametrize("error", [MemoryError, ValueError, KeyboardInterrupt])
def test_modes_and_switches_are_as_before_whatever_ends_it(error: type[BaseException]) -> None:
    encoder = Encoder()
    encoder.conv.eval()
    with suppress(error), for_inference(encoder, use_tiling=False, brand_new=1):
        assert not encoder.training
        assert encoder.use_tiling is False
        raise error
    assert [encoder.training, encoder.conv.training, encoder.dropout.training] == [True, False, True]
    assert encoder.use_tiling is True
    assert not hasattr(encoder, "brand_new")


def test_no_gradients_are_recorded_meanwhile() -> None:
    encoder = Encoder()
    with for_inference(encoder):
        assert not encoder(torch.zeros(1, 3, 2, 2)).requires_grad
    assert torch.is_grad_enabled()


def test_the_modules_of_a_holder_are_found() -> None:
    holder = Holder()
    assert modules_in(holder) == [holder.first_stage_model]


def test_what_has_no_room_to_go_back_keeps_nothing_else_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = _Placed.put_back, count()

    def full_at_first(placed: _Placed) -> None:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        own(placed)

    monkeypatch.setattr(_Placed, "put_back", full_at_first)
    layer = nn.Linear(2, 2)

    def half_way() -> None:
        with as_before(layer):
            layer.double()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        half_way()
    assert caught.value.__notes__ == ["The VAE could not be put back as it was: CUDA out of memory."]
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float64, torch.float32)
