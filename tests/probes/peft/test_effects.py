"""What the tensors say a merge will change is what PEFT's merge changes."""

from typing import Any

import pytest
import torch
from tests.probes.peft.conftest import Inject
from torch import nn

from sigmascope.lora.effect import effect_of
from sigmascope.probes.adapted_modules import base_weights
from sigmascope.probes.peft import read_adapters

DORA = {"use_dora": True, "lora_alpha": 6}


@pytest.mark.parametrize(
    ("kind", "layer", "options"),
    [
        ("LoraConfig", "wide", {"lora_alpha": 6}),
        ("LoraConfig", "words", {}),
        ("LoraConfig", "conv", {"use_rslora": True}),
        ("LoraConfig", "video", {}),
        ("LoraConfig", "transposed", {"fan_in_fan_out": True}),
        ("LoraConfig", "wide", DORA),
        ("LoraConfig", "conv", DORA),
        ("LoraConfig", "words", DORA),
        ("LoHaConfig", "wide", {}),
        ("LoHaConfig", "conv", {"use_effective_conv2d": True}),
        ("LoKrConfig", "wide", {"decompose_both": True, "r": 1}),
        ("LoKrConfig", "conv", {"use_effective_conv2d": True, "r": 1}),
    ],
)
def test_predicted_change_is_what_merging_changes(
    kind: str, layer: str, options: dict[str, Any], model: nn.Module, inject: Inject
) -> None:
    inject(layer, kind=kind, **options)
    adapted: Any = model.get_submodule(layer)
    adapted.scale_layer(0.5)
    key = f"{layer}.weight"
    weight = dict(base_weights(model)).get(key)
    assert weight is not None
    before = weight.double().clone()
    predicted = effect_of(read_adapters(model).value or (), weight)
    adapted.merge()
    after = dict(base_weights(model)).get(key)
    assert after is not None
    assert predicted.delta_norm == pytest.approx(float(torch.linalg.vector_norm(after - before)), rel=1e-5)


def test_two_active_adapters_change_as_their_merge_does(model: nn.Module, inject: Inject) -> None:
    inject("conv", name="style")
    adapted: Any = inject("conv", name="other").conv
    adapted.set_adapter(["style", "other"])
    adapted.set_scale("other", -0.3)
    before = adapted.weight.double().clone()
    predicted = effect_of(read_adapters(model).value or (), adapted.weight)
    adapted.merge()
    assert predicted.acting == 2
    assert predicted.delta_norm == pytest.approx(
        float(torch.linalg.vector_norm(adapted.weight - before)), rel=1e-5
    )
