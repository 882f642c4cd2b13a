"""Effects of what PEFT has on a model, against the weights that PEFT itself makes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sigmascope.lora.effect import effect_of, measured_effect
from sigmascope.probes.adapted_modules import base_weights
from sigmascope.probes.peft import read_adapters

peft: Any = pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 8)
        self.conv = nn.Conv2d(6, 8, 3)


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=3, lora_alpha=5, target_modules=["linear", "conv"]),
    "rslora": lambda: peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["linear", "conv"]),
    "dora": lambda: peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["linear", "conv"]),
    "loha": lambda: peft.LoHaConfig(r=3, alpha=5, target_modules=["linear", "conv"]),
    "loha cores": lambda: peft.LoHaConfig(r=2, use_effective_conv2d=True, target_modules=["conv"]),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=5, target_modules=["linear", "conv"]),
    "lokr cores": lambda: peft.LoKrConfig(r=1, use_effective_conv2d=True, target_modules=["conv"]),
}


def adapted(kind: str) -> Any:
    """A model with an adapter whose every number is random."""
    torch.manual_seed(0)
    model = peft.inject_adapter_in_model(CONFIGS[kind](), Model(), "style")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "style" in name:
                parameter.copy_(
                    torch.randn_like(parameter).abs() if "magnitude" in name else torch.randn_like(parameter)
                )
    return model


def weights(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("linear.weight", "conv.weight"):
        weight = dict(base_weights(model)).get(name)
        assert weight is not None
        found[name] = weight.detach().clone()
    return found


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_effect_is_what_merging_does(kind: str, merged: bool) -> None:
    model = adapted(kind)
    before = weights(model)
    found = read_adapters(model).value
    assert found
    for module in model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.merge()
    after = weights(model)
    patches = (read_adapters(model).value or ()) if merged else found
    for key in {patch.key for patch in patches}:
        effect = effect_of([patch for patch in patches if patch.key == key], before[key])
        expected = measured_effect(before[key], after[key])
        assert effect.delta_norm == pytest.approx(expected.delta_norm, rel=1e-5), (kind, key)
        assert effect.relative_change == pytest.approx(expected.relative_change, rel=1e-5)


def test_dora_of_strength_zero_still_has_its_magnitudes() -> None:
    model = adapted("dora")
    before = weights(model)["linear.weight"].double()
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling["style"] = 0.0
    patches = [patch for patch in read_adapters(model).value or () if patch.key == "linear.weight"]
    magnitude = patches[0].tensors["dora_scale"].double().reshape(-1, 1)
    expected = before * (magnitude / before.norm(dim=1, keepdim=True) - 1.0)
    assert effect_of(patches, before).delta_norm == pytest.approx(float(expected.norm()), rel=1e-9)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_doras_beside_one_weight_are_what_the_layer_gives() -> None:
    torch.manual_seed(1)
    model = adapted("dora")
    model = peft.inject_adapter_in_model(CONFIGS["dora"](), model, "other")
    layer = model.linear
    layer.set_adapter(["style", "other"])
    with torch.no_grad():
        for parameter in layer.lora_B["other"].parameters():
            parameter.copy_(torch.randn_like(parameter))
        plain = layer.base_layer(torch.eye(12)).T
        acting = layer(torch.eye(12)).T  # W' + b, column by column
    patches = [patch for patch in read_adapters(model).value or () if patch.key == "linear.weight"]
    effect = effect_of(patches, layer.base_layer.weight)
    assert effect.acting == 2
    assert effect.delta_norm == pytest.approx(float((acting - plain).norm()), rel=1e-4)
