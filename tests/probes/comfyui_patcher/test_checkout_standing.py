"""Against a real ComfyUI: how far changes have come through loading in part, unloading and parts of weights."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout, load_in_part
from torch import Tensor, nn

from sigmascope.lora.effect import effect_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import original_weight, read_patches

pytestmark = pytest.mark.comfyui

CPU = torch.device("cpu")
MakePatcher = Callable[..., Any]
Load = Callable[[Mapping[str, Tensor]], dict[Any, Any]]


def lora(*layers: str) -> dict[str, Tensor]:
    """A LoRA file for layers of 6 or 8 inputs and 8 outputs."""
    widths = {"matrix": 6, "square": 8, "kernel": 36}
    state: dict[str, Tensor] = {}
    for layer in layers:
        state[f"{layer}.lora_up.weight"] = random(8, 2) * 0.1
        state[f"{layer}.lora_down.weight"] = random(2, widths[layer], seed=1)
    return state


def patches(patcher: object) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher)
    assert found.value is not None, found.reason
    return found.value


def states(patcher: object) -> dict[str, str]:
    return {patch.key.partition(".")[0]: patch.state for patch in patches(patcher)}


@pytest.fixture
def patcher(make_patcher: MakePatcher, load_file: Load) -> Any:
    patcher = make_patcher()
    patcher.add_patches(load_file(lora("matrix", "square", "kernel")))
    return patcher


def test_a_model_loaded_in_part_is_merged_in_part(patcher: Any) -> None:
    load_in_part(patcher, 700)  # the matrix or the square, never the kernel
    found = states(patcher)
    kept = {key.partition(".")[0] for key in patcher.backup}
    assert {layer for layer, state in found.items() if state == "merged"} == kept
    assert found["kernel"] == "lazy"
    assert set(found.values()) <= {"merged", "lazy"}


def test_a_model_unloaded_in_part_is_lazy_there(patcher: Any) -> None:
    if not hasattr(patcher, "partially_unload"):
        pytest.skip("this version does not unload in part")
    patcher.patch_model(device_to=CPU)
    patcher.partially_unload(CPU, 100)  # the norm and the matrix, or more with a version's buffers
    found = states(patcher)
    assert found["matrix"] == "lazy"
    assert {layer for layer, state in found.items() if state == "merged"} == {
        key.partition(".")[0] for key in patcher.backup
    }
    assert set(found.values()) <= {"merged", "lazy"}


def test_forced_patching_merges_what_is_not_loaded(patcher: Any) -> None:
    load_in_part(patcher, 1, force_patch_weights=True)
    assert set(states(patcher).values()) == {"merged"}


def test_a_weight_beside_layers_is_not_changed_by_loading(make_patcher: MakePatcher) -> None:
    patcher = make_patcher()
    patcher.model.token = nn.Parameter(random(8), requires_grad=False)
    before = patcher.model.token.detach().clone()
    if not patcher.add_patches({"token": ("diff", (random(8, seed=1),))}):
        pytest.skip("this version lists the model's weights when the patcher is made")
    patcher.patch_model(device_to=CPU)
    changed = not torch.equal(patcher.model.token, before)
    assert (states(patcher)["token"] == "merged") == changed


def test_the_parts_of_a_weight_add_up(make_patcher: MakePatcher, load_file: Load) -> None:
    patcher = make_patcher()
    before = patcher.model.square.weight.detach().clone()
    halves = load_file({"square.lora_up.weight": random(4, 2), "square.lora_down.weight": random(2, 8)})
    half = halves["square.weight"]
    if not patcher.add_patches({("square.weight", (0, 0, 4)): half, ("square.weight", (0, 4, 4)): half}, 0.7):
        pytest.skip("this version changes no parts of weights")
    patcher.patch_model(device_to=CPU)
    found = patches(patcher)
    effect = effect_of(found, original_weight(patcher, "square.weight"))
    expected = torch.linalg.vector_norm(patcher.model.square.weight.double() - before.double()).item()
    assert [(patch.state, patch.source) for patch in found] == [("merged", "LoRA 1")] * 2
    assert effect.delta_norm == pytest.approx(expected, rel=1e-5)


def test_several_loras_at_several_strengths_add_up(make_patcher: MakePatcher, load_file: Load) -> None:
    patcher = make_patcher()
    before = patcher.model.matrix.weight.detach().clone()
    for strength in (0.8, -0.3):
        patcher.add_patches(load_file(lora("matrix")), strength)
    patcher.add_patches({"matrix.weight": ("diff", (random(8, 6, seed=4),))}, 0.2, 0.9)
    patcher.patch_model(device_to=CPU)
    effect = effect_of(patches(patcher), original_weight(patcher, "matrix.weight"))
    expected = torch.linalg.vector_norm(patcher.model.matrix.weight.double() - before.double()).item()
    assert effect.delta_norm == pytest.approx(expected, rel=1e-5)


def test_a_bfloat16_model_is_merged_within_its_rounding(
    comfy: Checkout, make_patcher: MakePatcher, load_file: Load
) -> None:
    patcher = make_patcher()
    patcher.model.to(torch.bfloat16)
    patcher.add_patches(load_file(lora("matrix")))
    patcher.patch_model(device_to=CPU)
    (patch,) = patches(patcher)
    base = original_weight(patcher, "matrix.weight")
    assert base is not None
    expected = base.float() + patch.tensors["up"] @ patch.tensors["down"]
    torch.testing.assert_close(patcher.model.matrix.weight.float(), expected, atol=2e-2, rtol=1e-2)
    assert base.dtype is torch.bfloat16
