from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from sigmascope.probes.adapted_modules import adapter_layers
from sigmascope.probes.models import module_facts, modules_in, named_modules_in, own_buffers, own_parameters
from sigmascope.stages.model_snapshot import weights_in


class Shy(nn.Linear):
    """Refuses to be walked through."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("was called")

    named_modules = named_parameters = state_dict = modules = parameters = buffers = _refuse


def model() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm, nn.ReLU()), norm)


def test_names_and_order_are_torchs() -> None:
    made = model()
    assert list(named_modules_in(made)) == list(made.named_modules())


def test_own_tensors_are_those_of_torch() -> None:
    made = model()
    parameters = [tensor for part in modules_in(made) for _, tensor in own_parameters(part)]
    buffers = [tensor for part in modules_in(made) for _, tensor in own_buffers(part)]
    assert [id(tensor) for tensor in parameters] == [id(tensor) for tensor in made.parameters()]
    assert [id(tensor) for tensor in buffers] == [id(tensor) for tensor in made.buffers()]


def test_nothing_of_the_model_is_called() -> None:
    made = nn.Sequential(Shy(3, 2), nn.ReLU())
    assert module_facts(made).parameters == 8
    assert list(weights_in(made, "UNet").base) == ["0.weight", "0.bias"]


def test_a_layer_that_is_registered_twice_can_be_beside_adapters() -> None:
    """T5's embedding is."""
    shared = nn.Embedding(8, 4)
    made = nn.ModuleDict({"shared": shared, "embed": nn.Sequential(shared), "out": nn.Linear(4, 4)})
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["out"]), made, "a")
    names = [*made.state_dict()]
    found = weights_in(made, "T5")
    assert [*found.adapters] == [name for name in names if "lora_" in name]
    assert [*found.base] == [name.replace("base_layer.", "") for name in names if "lora_" not in name]
    assert [name for name, _ in adapter_layers(made)] == ["out"]


def test_buffers_that_a_state_dict_leaves_out_can_be_left_out() -> None:
    made = nn.Module()
    made.register_buffer("kept", torch.zeros(1))
    made.register_buffer("passing", torch.zeros(1), persistent=False)
    assert [name for name, _ in own_buffers(made, transient=False)] == ["kept"]
