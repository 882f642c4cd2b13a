import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_tuple
from tests.comfy_shapes.modules import BaseModel, Q, SDClipModel
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP, PATCHERS, OldModelPatcher
from torch import nn

from sigmascope.probes.comfyui_patcher import is_comfyui, kept_weights, original_weight, weights_of


@pytest.mark.parametrize("version", PATCHERS)
def test_a_patcher_of_every_version_is_recognised(version: type[ModelPatcher]) -> None:
    assert is_comfyui(version(BaseModel()))


def test_what_holds_a_patcher_is_recognised() -> None:
    assert is_comfyui(CLIP(ModelPatcher(SDClipModel())))


@pytest.mark.parametrize(
    "thing", [None, nn.Linear(2, 2), SimpleNamespace(patches={}), ModelPatcher, "patches"]
)
def test_other_things_are_not(thing: object) -> None:
    assert not is_comfyui(thing)


def test_a_thing_whose_attributes_raise_is_not() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    assert not is_comfyui(Hostile())


def test_the_weights_are_those_of_the_module_under_the_patcher() -> None:
    model = BaseModel()
    assert weights_of(ModelPatcher(model)).value is model


def test_the_weights_of_a_clip_are_those_of_its_patcher() -> None:
    model = SDClipModel()
    assert weights_of(CLIP(ModelPatcher(model))).value is model


def test_what_holds_no_patcher_says_so() -> None:
    assert weights_of(nn.Linear(2, 2)).reason == "Linear is not a patcher and has no patches"


def test_a_patcher_without_a_module_says_what_it_has() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.model = SimpleNamespace()
    assert weights_of(patcher).reason == "the patcher's model is SimpleNamespace, not a module"


@pytest.mark.parametrize("version", PATCHERS)
def test_the_original_of_a_merged_weight_is_what_was_kept(version: type[ModelPatcher]) -> None:
    patcher = version(BaseModel())
    before = patcher.model.get_parameter(Q)
    patcher.add_patches({Q: lora_tuple()})
    patcher.load()
    assert original_weight(patcher, Q) is before


def test_the_original_of_a_weight_that_nothing_changed_is_the_weight() -> None:
    patcher = ModelPatcher(BaseModel())
    assert original_weight(patcher, Q) is patcher.model.get_parameter(Q)


def test_a_clone_finds_what_another_patcher_kept() -> None:
    patcher = ModelPatcher(BaseModel())
    before = patcher.model.get_parameter(Q)
    patcher.add_patches({Q: lora_tuple()})
    patcher.load()
    assert original_weight(CLIP(patcher.clone()), Q) is before


def test_under_a_hook_the_original_is_what_the_hook_kept() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.hook_backup[Q] = (torch.zeros(8, 8), torch.device("cpu"))
    assert original_weight(patcher, Q) is patcher.hook_backup[Q][0]


@pytest.mark.parametrize("key", ["", "diffusion_model", "diffusion_model.nowhere.weight"])
def test_a_name_that_is_no_weight_has_no_original(key: str) -> None:
    assert original_weight(ModelPatcher(BaseModel()), key) is None


def test_what_holds_no_patcher_has_no_originals() -> None:
    assert original_weight(nn.Linear(2, 2), "weight") is None


def test_what_a_clone_kept_is_found_where_it_alone_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OldModelPatcher(BaseModel())
    before = original.model.get_parameter(Q)
    loaded = original.clone()
    loaded.backup = {}  # the first versions do not share it
    loaded.add_patches({Q: lora_tuple()})
    loaded.load()
    management = SimpleNamespace(current_loaded_models=[SimpleNamespace(model=loaded)])
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    assert kept_weights(original) == {Q: (before, False)}
    assert kept_weights(loaded) == {Q: (before, True)}


def test_a_weight_is_ones_own_where_all_that_is_in_it_is() -> None:
    original = ModelPatcher(BaseModel())
    loaded = original.clone()
    loaded.add_patches({Q: lora_tuple()})
    loaded.load()
    more = loaded.clone()
    more.add_patches({Q: lora_tuple(seed=5)})
    same = loaded.clone()
    own = [kept_weights(one)[Q].is_own for one in (original, loaded, more, same)]
    assert own == [False, True, False, True]
    loaded.hook_backup[Q] = (loaded.model.get_parameter(Q), torch.device("cpu"))
    assert not kept_weights(loaded)[Q].is_own
    assert kept_weights(loaded)[Q].weight is loaded.backup[Q].weight


def test_a_weight_that_a_clone_replaced_as_an_object_is_not_ones_own() -> None:
    original = ModelPatcher(BaseModel())
    before = original.model.get_parameter(Q)
    loaded = original.clone()
    loaded.object_patches_backup = original.object_patches_backup
    loaded.object_patches[Q] = nn.Parameter(torch.zeros(8, 8))
    loaded.object_patches_backup[Q] = before
    original.model.get_submodule(Q.removesuffix(".weight")).weight = loaded.object_patches[Q]
    assert kept_weights(original) == {Q: (before, False)}
    assert kept_weights(loaded) == {Q: (before, True)}


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2), ModelPatcher(BaseModel())])
def test_nothing_is_kept_where_nothing_was_merged(thing: object) -> None:
    assert kept_weights(thing) == {}
