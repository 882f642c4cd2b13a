import pytest
from tests.comfy_shapes.adapters import lora_adapter, lora_tuple, random
from tests.comfy_shapes.modules import LOOSE, NORM, BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import PATCHERS, DynamicModelPatcher

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches


def patches(patcher: ModelPatcher) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher).value
    assert found is not None
    return found


def states(patcher: ModelPatcher) -> list[str]:
    return [patch.state for patch in patches(patcher)]


@pytest.fixture(params=PATCHERS)
def patcher(request: pytest.FixtureRequest) -> ModelPatcher:
    patcher: ModelPatcher = request.param(BaseModel())
    patcher.add_patches({Q: lora_tuple()})
    return patcher


def test_a_change_is_registered_until_the_model_is_loaded(patcher: ModelPatcher) -> None:
    assert states(patcher) == ["registered"]


def test_a_change_is_merged_when_the_model_is_loaded(patcher: ModelPatcher) -> None:
    patcher.load()
    assert states(patcher) == ["merged"]


def test_a_change_is_lazy_where_the_layer_is_not_loaded(patcher: ModelPatcher) -> None:
    patcher.load(lowvram=True)
    assert patcher.backup == {}
    assert states(patcher) == ["lazy"]


def test_a_change_is_registered_again_when_the_model_is_unloaded(patcher: ModelPatcher) -> None:
    patcher.load()
    patcher.unpatch_model()
    assert states(patcher) == ["registered"]


def test_a_second_change_of_the_key_is_not_lost(patcher: ModelPatcher) -> None:
    patcher.add_patches({Q: lora_tuple(seed=5)}, 0.5)
    patcher.load()
    assert [(patch.index, patch.strength, patch.state) for patch in patches(patcher)] == [
        (0, 1.0, "merged"),
        (1, 0.5, "merged"),
    ]


def test_strength_zero_is_inactive(patcher: ModelPatcher) -> None:
    patcher.add_patches({Q: lora_tuple()}, 0.0)
    assert states(patcher) == ["registered", "inactive"]


def test_strength_zero_with_a_scaled_model_is_not(patcher: ModelPatcher) -> None:
    patcher.add_patches({Q: lora_tuple()}, 0.0, 0.5)
    assert states(patcher) == ["registered", "registered"]


def test_what_does_not_fit_has_failed_whatever_was_loaded(patcher: ModelPatcher) -> None:
    patcher.add_patches({Q: lora_tuple(5, 2, 5)})
    patcher.load()
    assert states(patcher) == ["merged", "failed"]


def test_a_clones_change_is_registered_while_its_original_is_loaded() -> None:
    loaded = ModelPatcher(BaseModel())
    loaded.add_patches({Q: lora_adapter()})
    loaded.load()
    clone = loaded.clone()
    clone.add_patches({Q: lora_adapter(seed=5)})
    assert states(clone) == ["merged", "registered"]


def test_another_clones_change_of_the_same_weight_is_registered() -> None:
    base = ModelPatcher(BaseModel())
    loaded, other = base.clone(), base.clone()
    loaded.add_patches({Q: lora_adapter()})
    other.add_patches({Q: lora_adapter(seed=5)})
    loaded.load()
    assert states(other) == ["registered"]
    assert "another set" in patches(other)[0].state_reason


def test_a_change_added_after_loading_is_registered() -> None:
    loaded = ModelPatcher(BaseModel())
    loaded.load()
    loaded.add_patches({Q: lora_adapter()})
    assert states(loaded) == ["registered"]


def test_a_change_added_to_a_lazy_weight_acts_at_once() -> None:
    loaded = ModelPatcher(BaseModel())
    loaded.add_patches({Q: lora_adapter()})
    loaded.load(lowvram=True)
    loaded.add_patches({Q: lora_adapter(seed=5)})
    assert states(loaded) == ["lazy", "lazy"]


def test_a_clone_is_not_lazy_where_its_original_is() -> None:
    loaded = ModelPatcher(BaseModel())
    clone = loaded.clone()
    loaded.add_patches({Q: lora_adapter()})
    clone.add_patches({Q: lora_adapter()})
    loaded.load(lowvram=True)
    assert states(clone) == ["registered"]


def test_a_weight_beside_layers_is_never_merged_and_has_failed() -> None:
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({LOOSE: ("diff", (random(6),))})
    patcher.load()
    assert states(patcher) == ["failed"]
    assert "neither backed up nor wrapped" in patches(patcher)[0].state_reason


def test_dynamic_loading_applies_to_casting_layers_lazily() -> None:
    patcher = DynamicModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    assert states(patcher) == ["lazy"]


def test_what_dynamic_loading_merged_and_let_go_of_is_registered() -> None:
    patcher = DynamicModelPatcher(BaseModel())
    patcher.add_patches({Q: lora_adapter()})
    patcher.load()
    patcher.model.get_submodule(Q.removesuffix(".weight")).weight_lowvram_function = None
    assert states(patcher) == ["registered"]
    assert "free memory" in patches(patcher)[0].state_reason


def test_dynamic_loading_keeps_other_layers_and_does_not_change_them() -> None:
    patcher = DynamicModelPatcher(BaseModel())
    patcher.add_patches({NORM: ("diff", (random(6),))})
    patcher.load()
    assert NORM in patcher.backup
    assert states(patcher) == ["failed"]
