import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter, lora_parts
from tests.comfy_shapes.beside import Hook, HookGroup
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import read_patches


def patches(patcher: ModelPatcher) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher).value
    assert found is not None
    return found


@pytest.fixture
def hook() -> Hook:
    return Hook(0.5)


@pytest.fixture
def patcher(hook: Hook) -> ModelPatcher:
    patcher = ModelPatcher(BaseModel())
    patcher.hook_patches[hook.hook_ref] = {Q: [(0.8, lora_adapter(), 1.0, None, None)]}
    return patcher


def test_a_hooks_changes_are_registered_while_it_waits(patcher: ModelPatcher) -> None:
    (patch,) = patches(patcher)
    assert (patch.state, patch.strength, patch.source) == ("registered", 0.8, "hook 1")
    assert "conditioning" in patch.state_reason


def test_a_hooks_changes_are_merged_while_it_is_in_force(patcher: ModelPatcher, hook: Hook) -> None:
    patcher.current_hooks = HookGroup(hook)
    patcher.hook_backup[Q] = (patcher.model.get_parameter(Q), torch.device("cpu"))
    assert patches(patcher)[0].state == "merged"


def test_a_hook_in_force_multiplies_strengths_with_its_own(patcher: ModelPatcher, hook: Hook) -> None:
    patcher.current_hooks = HookGroup(hook)
    assert patches(patcher)[0].strength == 0.4


def test_another_hook_in_force_changes_nothing(patcher: ModelPatcher) -> None:
    patcher.current_hooks = HookGroup(Hook())
    patcher.hook_backup[Q] = (patcher.model.get_parameter(Q), torch.device("cpu"))
    assert patches(patcher)[0].state == "registered"


def test_a_hooks_changes_come_after_those_of_the_patcher(patcher: ModelPatcher) -> None:
    patcher.add_patches({Q: lora_adapter()})
    assert [(patch.index, patch.source) for patch in patches(patcher)] == [(0, "LoRA 1"), (1, "hook 1")]


def test_a_hooks_change_that_does_not_fit_has_failed(patcher: ModelPatcher, hook: Hook) -> None:
    patcher.hook_patches[hook.hook_ref] = {Q: [(1.0, ("lora", lora_parts(5)), 1.0, None, None)]}
    assert patches(patcher)[0].state == "failed"
