import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter, random
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches


@pytest.fixture
def patcher() -> ModelPatcher:
    return ModelPatcher(BaseModel())


def patches(patcher: ModelPatcher) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher).value
    assert found is not None
    return found


def test_a_weight_replaced_as_an_object_is_set(patcher: ModelPatcher) -> None:
    patcher.object_patches[Q] = random(8, 8)
    (patch,) = patches(patcher)
    assert (patch.adapter_type, patch.state, patch.source) == ("set", "registered", "object patch")


def test_a_replaced_weight_is_merged_while_the_old_one_is_kept(patcher: ModelPatcher) -> None:
    patcher.object_patches[Q] = random(8, 8)
    patcher.object_patches_backup[Q] = patcher.model.get_parameter(Q)
    assert patches(patcher)[0].state == "merged"


def test_other_objects_are_no_changes_of_weights(patcher: ModelPatcher) -> None:
    patcher.object_patches["manual_cast_dtype"] = torch.float32
    assert patches(patcher) == ()


def test_a_replaced_weight_comes_before_what_is_added_to_it(patcher: ModelPatcher) -> None:
    patcher.object_patches[Q] = random(8, 8)
    patcher.add_patches({Q: lora_adapter()})
    assert [(patch.index, patch.adapter_type) for patch in patches(patcher)] == [(0, "set"), (1, "lora")]


def double(weight: Tensor) -> Tensor:
    return weight * 2


def test_a_function_around_a_weight_is_unknown(patcher: ModelPatcher) -> None:
    patcher.weight_wrapper_patches[Q] = [double]
    (patch,) = patches(patcher)
    assert (patch.adapter_type, patch.state, patch.source) == ("unknown", "registered", "weight wrapper")


def test_a_function_around_a_weight_is_lazy_while_it_is_there(patcher: ModelPatcher) -> None:
    patcher.weight_wrapper_patches[Q] = [double]
    patcher.model.get_submodule(Q.removesuffix(".weight")).weight_function.append(double)
    assert patches(patcher)[0].state == "lazy"
