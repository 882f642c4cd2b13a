"""What is noted of a pipeline's structure, and that only what a choice changed is put back."""

from typing import Any

import torch
from torch import nn

from sigmascope.pipeline.apply_undo import Weights
from sigmascope.pipeline.model_state import Structure


class Holder:
    """A pipeline's stand-in: a module, a list and a dict."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.hooks = ["one"]
        self.flags = {"a": 1, "b": 2}


def _undo(structure: Structure) -> None:
    for undo in structure.changes_since():
        undo()


def _noted() -> tuple[Holder, Structure]:
    holder = Holder()
    return holder, Structure([holder, holder.model])


def test_an_attribute_that_was_added_goes() -> None:
    holder, structure = _noted()
    holder.model[0].extra = True
    _undo(structure)
    assert not hasattr(holder.model[0], "extra")


def test_an_attribute_that_was_replaced_is_the_same_object_again() -> None:
    holder, structure = _noted()
    first = holder.hooks
    holder.hooks = []
    _undo(structure)
    assert holder.hooks is first


def test_a_list_that_was_changed_in_place_is_as_it_was() -> None:
    holder, structure = _noted()
    holder.hooks.append("two")
    _undo(structure)
    assert holder.hooks == ["one"]


def test_entries_come_back_in_their_order() -> None:
    holder, structure = _noted()
    del holder.flags["a"]
    holder.flags["c"] = 3
    _undo(structure)
    assert list(holder.flags.items()) == [("a", 1), ("b", 2)]


def test_a_module_that_was_put_in_anothers_place_goes() -> None:
    holder, structure = _noted()
    first = holder.model[1]
    holder.model[1] = nn.Identity()
    _undo(structure)
    assert holder.model[1] is first


def test_what_others_change_afterwards_stays() -> None:
    holder, structure = _noted()
    holder.model[0].ours = True
    undos = structure.changes_since()
    holder.model[0].theirs = True
    holder.flags["theirs"] = 4
    for undo in undos:
        undo()
    assert holder.model[0].theirs is True
    assert holder.flags["theirs"] == 4
    assert not hasattr(holder.model[0], "ours")


def _weights(model: nn.Module, *, keep: bool, **changes: bool) -> Weights:
    return Weights([("model", model)], frozenset(changes), keep=keep)  # type: ignore[arg-type]


def test_narrowed_values_come_back_bit_for_bit() -> None:
    model = nn.Linear(8, 8)
    first = model.weight.detach().clone()
    weights = _weights(model, keep=True, dtype=True)
    model.to(torch.float16)
    weights.settle([("model", model)])
    assert weights.put_back() == []
    assert torch.equal(model.weight, first)


def test_nan_and_inf_come_back_too() -> None:
    model = nn.Linear(2, 1, bias=False).requires_grad_(False)
    model.weight.copy_(torch.tensor([[float("nan"), float("inf")]]))
    weights = _weights(model, keep=True, dtype=True)
    model.to(torch.bfloat16)
    weights.settle([("model", model)])
    assert weights.put_back() == []
    assert model.weight[0].isnan().tolist() == [True, False]


def test_without_originals_narrowing_cannot_come_back() -> None:
    model = nn.Linear(8, 8)
    first = model.weight.detach().clone()
    weights = _weights(model, keep=False, dtype=True)
    model.to(torch.float16)
    weights.settle([("model", model)])
    weights.put_back()
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, first.half().float())


def test_what_was_not_narrowed_is_not_kept_alive_twice() -> None:
    model = nn.Linear(8, 8)
    weights = _weights(model, keep=True, dtype=True)
    weights.settle([("model", model)])
    assert all(weight.original is None for weight in weights._weights)


def test_a_layout_comes_back_with_its_strides() -> None:
    model: Any = nn.Conv2d(4, 4, 3)
    strides = model.weight.stride()
    weights = _weights(model, keep=False, layout=True)
    model.to(memory_format=torch.channels_last)
    assert model.weight.stride() != strides
    weights.settle([("model", model)])
    weights.put_back()
    assert model.weight.stride() == strides


def test_a_buffer_that_was_replaced_is_the_same_object_again() -> None:
    model = nn.BatchNorm1d(2)
    first = model.running_mean
    weights = _weights(model, keep=True, dtype=True)
    model.to(torch.float16)
    weights.settle([("model", model)])
    weights.put_back()
    assert model.running_mean is first
    assert first is not None
    assert first.dtype == torch.float32
