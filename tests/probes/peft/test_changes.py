"""The tensors of each kind of adapter make what PEFT makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.probes.peft.conftest import Inject, product
from torch import nn

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.peft import read_adapters

Read = Callable[[], dict[str, AppliedPatch]]


@pytest.mark.parametrize(
    "layer", ["blocks.0.linear", "blocks.1.bare", "words", "conv", "pointwise", "video", "transposed"]
)
def test_up_times_down_is_the_change_that_peft_computes(
    layer: str, model: nn.Module, inject: Inject, read: Read
) -> None:
    inject(layer, lora_alpha=6, fan_in_fan_out=layer == "transposed")
    patch = read()[f"{layer}.weight"]
    adapted: Any = model.get_submodule(layer)
    torch.testing.assert_close(product(patch), adapted.get_delta_weight("style"))
    assert patch.adapter_type == "lora"


def test_factors_share_the_hosts_memory(model: nn.Module, inject: Inject, read: Read) -> None:
    inject("conv")
    assert read()["conv.weight"].tensors["up"].data_ptr() == model.conv.lora_B["style"].weight.data_ptr()  # type: ignore[union-attr, index]


def test_bias_of_an_adapter_is_a_change_of_the_bias(model: nn.Module, inject: Inject, read: Read) -> None:
    inject("conv", lora_alpha=2, lora_bias=True)
    patch = read()["conv.bias"]
    assert (patch.adapter_type, patch.strength, patch.weight_shape) == ("diff", 0.5, (6,))
    assert torch.equal(patch.tensors["diff"], model.conv.lora_B["style"].bias)  # type: ignore[union-attr, index]


def test_dora_has_its_magnitudes(model: nn.Module, inject: Inject, read: Read) -> None:
    inject("blocks.0.linear", use_dora=True)
    patch = read()["blocks.0.linear.weight"]
    assert patch.adapter_type == "dora"
    magnitude = model.get_submodule("blocks.0.linear").lora_magnitude_vector["style"].weight  # type: ignore[union-attr, index]
    assert torch.equal(patch.tensors["dora_scale"], magnitude)


@pytest.mark.parametrize(
    ("kind", "layer", "options", "parts"),
    [
        ("LoHaConfig", "blocks.0.linear", {}, {"w1_a", "w1_b", "w2_a", "w2_b"}),
        ("LoHaConfig", "conv", {"use_effective_conv2d": True}, {"w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"}),
        ("LoKrConfig", "wide", {"decompose_both": True, "r": 1}, {"w1_a", "w1_b", "w2_a", "w2_b"}),
        ("LoKrConfig", "conv", {"use_effective_conv2d": True, "r": 1}, {"w1", "w2_a", "w2_b", "t2"}),
    ],
)
def test_parts_of_lycoris_kinds(
    kind: str, layer: str, options: dict[str, Any], parts: set[str], inject: Inject, read: Read
) -> None:
    inject(layer, kind=kind, **options)
    patch = read()[f"{layer}.weight"]
    assert patch.adapter_type == kind[:4].lower()
    assert patch.tensors.keys() == parts


@pytest.mark.filterwarnings("ignore::UserWarning")  # BOFT has three about its speed
@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("OFTConfig", "oft", {"r": 0, "oft_block_size": 2}),
        ("BOFTConfig", "boft", {"boft_block_size": 2}),
        ("IA3Config", "unknown", {"feedforward_modules": []}),
        ("VeraConfig", "unknown", {"r": 2}),
    ],
)
def test_kinds_that_are_not_read_say_so(
    kind: str, name: str, options: dict[str, Any], model: nn.Module
) -> None:
    import peft

    config = getattr(peft, kind)(target_modules=["blocks.0.linear"], **options)
    (patch,) = read_adapters(peft.get_peft_model(model, config)).value or ()
    assert patch.key == "blocks.0.linear.weight"
    assert patch.adapter_type == name
    assert not patch.tensors
    assert patch.unavailable["tensors"]


def test_grouped_convolution_is_no_product(inject: Inject, read: Read) -> None:
    with pytest.warns(UserWarning, match="groups"):
        inject("grouped")
    patch = read()["grouped.weight"]
    assert patch.adapter_type == "unknown"
    assert "grouped convolution" in patch.unavailable["tensors"]


def test_both_weights_of_attention_are_named(inject: Inject, read: Read) -> None:
    inject("attention")
    found = read()
    assert found["attention.in_proj_weight"].weight_shape == (24, 8)
    assert found["attention.out_proj.weight"].weight_shape == (8, 8)


def test_parameter_that_is_targeted_by_name_is_named(model: nn.Module) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["blocks.0.linear.weight"])
    (patch,) = read_adapters(peft.get_peft_model(model, config)).value or ()
    assert patch.key == "blocks.0.linear.weight"
    assert patch.tensors["up"].shape == (10, 2)


def test_module_that_replaces_another_sets_its_parameters(model: nn.Module) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["conv"], modules_to_save=["pointwise"])
    found = {patch.key: patch for patch in read_adapters(peft.get_peft_model(model, config)).value or ()}
    assert found.keys() == {"conv.weight", "pointwise.weight", "pointwise.bias"}
    assert found["pointwise.weight"].adapter_type == "set"
    assert found["pointwise.weight"].state == "lazy"
    assert found["pointwise.weight"].tensors["set"].shape == (4, 6, 1, 1)


def test_factors_of_another_shape_have_failed(model: nn.Module, inject: Inject, read: Read) -> None:
    inject("conv", "pointwise")
    model.conv.lora_B["style"].weight = nn.Parameter(torch.zeros(5, 4, 1, 1))  # type: ignore[union-attr, index]
    found = read()
    assert found["conv.weight"].state == "failed"
    assert "(5, 4, 1, 1)" in found["conv.weight"].state_reason
    assert found["pointwise.weight"].state == "lazy"


def test_factors_that_were_never_filled_have_failed(model: nn.Module) -> None:
    import peft

    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["conv"]), model, "style", low_cpu_mem_usage=True
    )
    (patch,) = read_adapters(model).value or ()
    assert patch.state == "failed"
    assert "meta device" in patch.state_reason
