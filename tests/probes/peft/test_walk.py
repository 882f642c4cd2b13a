"""Weights under the names that they have without adapters, and nothing of the host touched."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.probes.peft.conftest import Inject
from torch import nn

from sigmascope.probes.adapted_modules import base_weights
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.peft import read_adapters

Read = Callable[[], dict[str, AppliedPatch]]


def test_names_are_those_of_the_state_dict_without_adapters(model: nn.Module) -> None:
    assert [name for name, _ in base_weights(model)] == list(model.state_dict())


def test_injecting_adapters_changes_no_name(model: nn.Module, inject: Inject) -> None:
    before = {name: tensor.data_ptr() for name, tensor in base_weights(model)}
    inject("linear", "conv", "words", "attention")
    assert {name: tensor.data_ptr() for name, tensor in base_weights(model)} == before


def test_wrapped_model_has_the_names_of_the_bare_one(model: nn.Module) -> None:
    import peft

    expected = list(model.state_dict())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["conv"], modules_to_save=["words"]))
    assert [name for name, _ in base_weights(wrapped)] == expected
    assert dict(base_weights(wrapped)).get("conv.weight") is model.conv.base_layer.weight  # type: ignore[union-attr]
    assert [patch.key for patch in read_adapters(wrapped).value or ()] == ["words.weight", "conv.weight"]


def test_compiled_model_has_the_names_of_the_bare_one(model: nn.Module, inject: Inject) -> None:
    inject("conv")
    compiled = torch.compile(model, backend="eager")
    assert [patch.key for patch in read_adapters(compiled).value or ()] == ["conv.weight"]
    assert dict(base_weights(compiled)).get("conv.weight") is model.conv.base_layer.weight  # type: ignore[union-attr]


def test_compiled_block_has_the_names_of_the_bare_one(model: Any, inject: Inject) -> None:
    inject("linear")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert [patch.key for patch in read_adapters(model).value or ()] == [
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
    ]


def test_base_weight_is_the_hosts_own_tensor(model: nn.Module, inject: Inject) -> None:
    weight = model.get_submodule("blocks.0.linear").weight
    inject("linear")
    assert dict(base_weights(model)).get("blocks.0.linear.weight") is weight


def test_merged_weight_of_attention_is_found(model: Any, inject: Inject) -> None:
    inject("attention")
    model.attention.merge()
    assert (
        dict(base_weights(model)).get("attention.in_proj_weight") is model.attention.base_layer.in_proj_weight
    )


def test_quantised_weight_has_the_shape_that_it_stands_for(model: Any, inject: Inject) -> None:
    inject("bare")
    packed = nn.Parameter(torch.zeros(30, 1, dtype=torch.uint8), requires_grad=False)
    model.blocks[0].bare.base_layer.weight = packed
    first, _ = read_adapters(model).value or ()
    assert first.weight_shape == (6, 10)
    assert first.state == "lazy"


def test_components_of_a_pipeline_come_before_the_names(model: nn.Module, inject: Inject) -> None:
    inject("conv")
    pipeline = SimpleNamespace(components={"unet": model, "scheduler": object(), "vae": None})
    assert [patch.key for patch in read_adapters(pipeline).value or ()] == ["unet.conv.weight"]
    assert dict(base_weights(pipeline)).get("unet.conv.weight") is model.conv.base_layer.weight  # type: ignore[union-attr]


def test_reading_registers_no_weight_anew(model: Any, inject: Inject) -> None:
    inject("attention")
    before = model.attention.base_layer.in_proj_weight
    read_adapters(model)
    list(base_weights(model))
    assert model.attention.base_layer.in_proj_weight is before


def test_layer_that_is_registered_twice_goes_by_its_first_name(model: Any, inject: Inject) -> None:
    inject("conv")
    model.again = model.conv
    assert [patch.key for patch in read_adapters(model).value or ()] == ["conv.weight"]
    assert "again.base_layer.weight" in model.state_dict()
    assert "again.weight" not in dict(base_weights(model))
