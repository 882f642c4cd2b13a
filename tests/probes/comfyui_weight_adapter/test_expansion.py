import torch
from tests.comfy_shapes.adapters import lora_adapter, lora_parts, lora_tuple, random
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches

OTHER = random(8, 8, seed=9)


def patches(value: object, strength: float, strength_model: float = 1.0) -> tuple[AppliedPatch, ...]:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: value}, strength, strength_model)
    found = read_patches(patcher).value
    assert found is not None
    return found


def test_a_merged_in_model_is_a_difference_of_its_whole_weight() -> None:
    (patch,) = patches([OTHER], 0.25, 0.75)
    assert (patch.adapter_type, patch.strength, patch.strength_model) == ("diff", 0.25, 0.75)
    assert patch.tensors["diff"] is OTHER


def test_a_weight_with_its_conversion_is_taken_for_itself() -> None:
    (patch,) = patches([(OTHER, lambda weight, inplace: weight)], 0.25, 0.75)
    assert patch.tensors["diff"] is OTHER


def test_changes_of_the_merged_in_model_come_with_both_strengths() -> None:
    nested = (0.5, lora_tuple(), 1.0, None, None)
    base, upon = patches([OTHER, nested], 0.25, 0.75)
    assert (base.index, upon.index) == (0, 0)
    assert (upon.adapter_type, upon.strength, upon.strength_model) == ("lora", 0.125, 1.0)


def test_a_change_that_depends_on_the_weight_makes_the_merge_unknown() -> None:
    dora = ("lora", (*lora_parts()[:4], random(8, 1)))
    (patch,) = patches([OTHER, (1.0, dora, 1.0, None, None)], 0.25, 0.75)
    assert patch.adapter_type == "unknown"
    assert "a change of type dora" in patch.unavailable["adapter_type"]


def test_a_merge_that_starts_with_no_weight_is_unknown() -> None:
    (patch,) = patches([None], 1.0)
    assert patch.unavailable["adapter_type"] == "the merge starts with NoneType, not with a weight"


def test_another_model_taken_as_a_lora_is_its_weight_less_the_original() -> None:
    added, taken = patches(("model_as_lora", (OTHER,)), 0.5)
    assert added.tensors["diff"] is OTHER
    assert (added.strength, taken.strength, added.index, taken.index) == (0.5, -0.5, 0, 0)


def test_the_original_that_is_taken_away_is_the_one_before_merging() -> None:
    patcher = ModelPatcher(BaseModel())
    before: Tensor = patcher.model.get_parameter(Q)
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    patcher.add_patches({Q: ("model_as_lora", (OTHER,))})
    found = read_patches(patcher).value
    assert found is not None
    assert torch.equal(found[2].tensors["diff"], before)


def test_a_quantised_weight_is_said_to_be_converted() -> None:
    (patch,) = patches([OTHER.to(torch.float8_e4m3fn)], 0.5, 0.5)
    assert "float8_e4m3fn" in patch.unavailable["diff"]
