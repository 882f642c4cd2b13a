import pytest
from tests.comfy_shapes.adapters import LoRAAdapter, lora_adapter, lora_parts, random
from tests.comfy_shapes.beside import BypassForwardHook, BypassInjectionManager, PatcherInjection
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from torch import nn

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches


def only(patcher: ModelPatcher) -> AppliedPatch:
    found = read_patches(patcher).value
    assert found is not None
    (patch,) = found
    return patch


def bypassing(adapter: object, multiplier: float = 0.5) -> tuple[ModelPatcher, PatcherInjection]:
    patcher = ModelPatcher(BaseModel())
    layer: nn.Module = patcher.model.get_submodule(Q.removesuffix(".weight"))
    manager = BypassInjectionManager(BypassForwardHook(layer, adapter, multiplier))
    patcher.injections["bypass_lora"] = manager.create_injections()
    return patcher, patcher.injections["bypass_lora"][0]


def test_an_adapter_beside_a_layer_is_registered_until_it_is_put_there() -> None:
    patcher, _ = bypassing(lora_adapter())
    patch = only(patcher)
    assert (patch.key, patch.adapter_type, patch.state) == (Q, "lora", "registered")
    assert (patch.strength, patch.source) == (0.5, "bypass 1")


def test_an_adapter_beside_a_layer_is_lazy_while_it_is_there() -> None:
    patcher, injection = bypassing(lora_adapter())
    injection.inject(patcher)
    assert only(patcher).state == "lazy"


def test_a_bypass_leaves_magnitudes_out() -> None:
    dora = LoRAAdapter(set(), (*lora_parts()[:4], random(8, 1), None))
    patcher, _ = bypassing(dora)
    patch = only(patcher)
    assert (patch.adapter_type, "dora_scale" in patch.tensors) == ("lora", False)
    assert "dora_scale" in patch.unavailable


@pytest.mark.parametrize("injections", [None, "text", [None], [PatcherInjection(print, print)]])
def test_other_injections_are_no_bypass(injections: object) -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.injections["other"] = injections
    assert read_patches(patcher).value == ()
