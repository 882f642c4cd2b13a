"""Against a real ComfyUI: hooks of conditionings, bypasses, its own loader, and `CLIP`."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from tests.comfy_shapes.files import LORA
from tests.comfy_shapes.real import real_clip
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import is_comfyui, original_weight, read_patches, weights_of

pytestmark = pytest.mark.comfyui

CPU = torch.device("cpu")
MakePatcher = Callable[..., Any]
Load = Callable[[Mapping[str, Tensor]], dict[Any, Any]]


def patches(patcher: object) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher)
    assert found.value is not None, found.reason
    return found.value


@pytest.fixture
def hooks(comfy: Checkout) -> Any:
    if not (comfy.folder / "comfy" / "hooks.py").is_file():
        pytest.skip("this version has no hooks")
    return comfy.module("comfy.hooks")


@pytest.fixture
def hooked(hooks: Any, make_patcher: MakePatcher) -> Callable[[dict[Any, Any]], tuple[Any, Any]]:
    """A loaded patcher with one hook of the given changes at 0.8, and the group that brings it in force."""

    def make(changes: dict[Any, Any]) -> tuple[Any, Any]:
        patcher, hook = make_patcher(), hooks.WeightHook(0.8, 0.8)
        hook.need_weight_init, hook.weights = False, changes
        group = hooks.HookGroup()
        group.add(hook)
        patcher.register_all_hook_patches(*_arguments(hooks, patcher, group))
        patcher.patch_model(device_to=CPU)
        return patcher, group

    return make


def _arguments(hooks: Any, patcher: Any, group: Any) -> tuple[Any, ...]:
    """Since January 2025 a dict says what is targeted; before, the arguments were others."""
    if hasattr(hooks, "create_target_dict"):
        return group, hooks.create_target_dict(hooks.EnumWeightTarget.Model)
    hook = group.hooks[0]
    return {hooks.EnumHookType.Weight: {hook: None}}, hooks.EnumWeightTarget.Model


def test_a_hook_waits_and_is_merged_when_it_is_in_force(
    hooked: Callable[[dict[Any, Any]], tuple[Any, Any]], load_file: Load
) -> None:
    patcher, group = hooked(load_file(LORA))
    assert [(patch.state, patch.strength) for patch in patches(patcher)] == [("registered", 0.8)]
    patcher.patch_hooks(group)
    assert patches(patcher)[0].state == "merged"


def test_a_hook_in_force_makes_base_plus_what_was_read(
    hooked: Callable[[dict[Any, Any]], tuple[Any, Any]], load_file: Load
) -> None:
    patcher, group = hooked(load_file(LORA))
    patcher.patch_hooks(group)
    (patch,) = patches(patcher)
    base = original_weight(patcher, "matrix.weight")
    assert base is not None
    expected = base + 0.8 * 0.5 * patch.tensors["up"] @ patch.tensors["down"]
    torch.testing.assert_close(patcher.model.matrix.weight.detach(), expected, atol=1e-6, rtol=0)


def test_a_model_taken_as_a_lora_is_what_its_two_differences_add_up_to(
    hooked: Callable[[dict[Any, Any]], tuple[Any, Any]],
) -> None:
    target = random(8, 6, seed=7)
    patcher, group = hooked({"matrix.weight": ("model_as_lora", (target,))})
    before = patcher.model.matrix.weight.detach().clone()
    patcher.patch_hooks(group)
    found = patches(patcher)
    expected = before + sum((patch.strength or 0) * patch.tensors["diff"] for patch in found)
    torch.testing.assert_close(patcher.model.matrix.weight.detach(), expected, atol=1e-6, rtol=0)


def test_a_bypass_is_lazy_while_it_is_injected(
    comfy: Checkout, make_patcher: MakePatcher, load_file: Load
) -> None:
    if not (comfy.folder / "comfy" / "weight_adapter" / "bypass.py").is_file():
        pytest.skip("this version has no bypass")
    patcher = make_patcher()
    manager = comfy.module("comfy.weight_adapter").BypassInjectionManager()
    manager.add_adapter("matrix.weight", load_file(LORA)["matrix.weight"], strength=0.5)
    patcher.set_injections("bypass_lora", manager.create_injections(patcher.model))
    before = patches(patcher)
    patcher.inject_model()
    (after,) = patches(patcher)
    assert [patch.state for patch in before] == ["registered"]
    assert (after.state, after.strength, after.key) == ("lazy", 0.5, "matrix.weight")
    patcher.eject_model()


def test_what_the_real_loader_registers_on_a_real_clip_is_read(comfy: Checkout) -> None:
    sd, clip = comfy.module("comfy.sd"), real_clip(comfy)
    name = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    file = {f"{name}.lora_up.weight": random(8, 2), f"{name}.lora_down.weight": random(2, 8)}
    _, changed = sd.load_lora_for_models(None, clip, file, 1.0, 0.7)
    (patch,) = patches(changed)
    assert is_comfyui(changed)
    assert weights_of(changed).value is clip.patcher.model
    assert (patch.strength, patch.rank, patch.source) == (0.7, 2, "LoRA 1")
    assert patch.key == "clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"


def test_two_files_that_the_real_loader_reads_are_two_sources(
    make_patcher: MakePatcher, load_file: Load
) -> None:
    patcher = make_patcher()
    other = {name.replace("matrix", "square"): tensor for name, tensor in LORA.items()}
    patcher.add_patches(load_file(LORA), float("0.8"))
    patcher.add_patches(load_file({**LORA, **other}), float("0.8"))
    assert [(patch.key, patch.source) for patch in patches(patcher)] == [
        ("matrix.weight", "LoRA 1"),
        ("matrix.weight", "LoRA 2"),
        ("square.weight", "LoRA 2"),
    ]


def test_what_comfyui_loaded_itself_is_told_from_what_it_did_not(
    comfy: Checkout, make_patcher: MakePatcher, load_file: Load
) -> None:
    base = make_patcher()
    if not hasattr(base.model, "current_weight_patches_uuid"):
        pytest.skip("this version does not name the set of changes that a model holds")
    first, second = base.clone(), base.clone()
    first.add_patches(load_file(LORA))
    second.add_patches(load_file(LORA))
    third = first.clone()
    third.add_patches(load_file(LORA))
    first.patch_model(device_to=CPU)
    assert [[patch.state for patch in patches(patcher)] for patcher in (first, second, third)] == [
        ["merged"],
        ["registered"],
        ["merged", "registered"],
    ]
