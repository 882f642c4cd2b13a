"""Against a real ComfyUI: what the reader says of its patchers is what its own code then does."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout, load_in_part
from tests.comfy_shapes.files import FILES, LORA
from torch import Tensor

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.comfyui_patcher import is_comfyui, original_weight, read_patches, weights_of

pytestmark = pytest.mark.comfyui

CPU = torch.device("cpu")
Load = Callable[[Mapping[str, Tensor]], dict[Any, Any]]


def patches(patcher: object) -> tuple[AppliedPatch, ...]:
    found = read_patches(patcher)
    assert found.value is not None, found.reason
    return found.value


def loaded(patcher: Any) -> Tensor:
    """Load the model whole and give the matrix."""
    patcher.patch_model(device_to=CPU)
    return patcher.model.matrix.weight.detach()  # type: ignore[no-any-return]


def test_a_real_patcher_is_recognised(make_patcher: Callable[..., Any]) -> None:
    patcher = make_patcher()
    assert is_comfyui(patcher)
    assert weights_of(patcher).value is patcher.model


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_is_read_for_what_it_is(
    comfy: Checkout, kind: str, make_patcher: Callable[..., Any], load_file: Load
) -> None:
    patcher = make_patcher()
    if not comfy.knows(kind):
        pytest.skip(f"this version knows no {kind}")
    changes = load_file(FILES[kind])
    patcher.add_patches(changes, 0.5)
    (patch,) = patches(patcher)
    assert (patch.adapter_type, patch.state, patch.strength) == (kind, "registered", 0.5)
    assert patch.unavailable == {}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_is_merged_when_the_model_is_loaded(
    comfy: Checkout, kind: str, make_patcher: Callable[..., Any], load_file: Load
) -> None:
    if not comfy.knows("newer glora" if kind == "glora" else kind):
        pytest.skip(f"this version knows no {kind}")
    patcher = make_patcher()
    before = patcher.model.matrix.weight.detach().clone()
    patcher.add_patches(load_file(FILES[kind]))
    changed = not torch.equal(loaded(patcher), before)
    assert {patch.state for patch in patches(patcher)} == {"merged" if changed else "failed"}


def test_the_merged_weight_is_base_plus_what_was_read(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    patcher = make_patcher()
    patcher.add_patches(load_file(LORA), 0.8)
    after = loaded(patcher)
    (patch,) = patches(patcher)
    base = original_weight(patcher, "matrix.weight")
    assert base is not None
    assert patch.strength is not None
    assert patch.scale is not None
    expected = base + patch.strength * patch.scale * patch.tensors["up"] @ patch.tensors["down"]
    torch.testing.assert_close(after, expected, atol=1e-6, rtol=0)


def test_the_original_is_bit_identical_to_the_weight_before(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    patcher = make_patcher()
    before = patcher.model.matrix.weight.detach().clone()
    patcher.add_patches(load_file(LORA))
    loaded(patcher)
    original = original_weight(patcher, "matrix.weight")
    assert original is not None
    assert torch.equal(original, before)


def test_two_loras_on_a_key_are_both_there(make_patcher: Callable[..., Any], load_file: Load) -> None:
    patcher = make_patcher()
    patcher.add_patches(load_file(LORA), 0.8)
    patcher.add_patches(load_file(LORA), 0.2)
    loaded(patcher)
    assert [(patch.index, patch.strength, patch.state) for patch in patches(patcher)] == [
        (0, 0.8, "merged"),
        (1, 0.2, "merged"),
    ]


def test_strength_zero_is_inactive_and_changes_nothing(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    patcher = make_patcher()
    before = patcher.model.matrix.weight.detach().clone()
    patcher.add_patches(load_file(LORA), 0.0)
    assert torch.equal(loaded(patcher), before)
    assert patches(patcher)[0].state == "inactive"


def test_low_vram_is_lazy_and_keeps_no_original(make_patcher: Callable[..., Any], load_file: Load) -> None:
    patcher = make_patcher()
    patcher.add_patches(load_file(LORA))
    load_in_part(patcher, 1)
    assert not patcher.backup
    assert patches(patcher)[0].state == "lazy"


def test_low_vram_computes_what_merging_computes(make_patcher: Callable[..., Any], load_file: Load) -> None:
    x = random(3, 6)
    outputs = []
    for memory in (1, 10**6):
        patcher = make_patcher()
        patcher.add_patches(load_file(LORA))
        load_in_part(patcher, memory)
        read_patches(patcher)
        outputs.append(patcher.model.matrix(x))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


def test_after_unloading_a_change_is_registered(make_patcher: Callable[..., Any], load_file: Load) -> None:
    patcher = make_patcher()
    patcher.add_patches(load_file(LORA))
    patcher.patch_model(device_to=CPU)
    patcher.unpatch_model(CPU)
    assert patches(patcher)[0].state == "registered"


def test_a_wrong_shape_only_logs_and_has_failed(make_patcher: Callable[..., Any], load_file: Load) -> None:
    patcher = make_patcher()
    before = patcher.model.matrix.weight.detach().clone()
    patcher.add_patches(load_file({**LORA, "matrix.lora_down.weight": random(2, 5)}))
    assert torch.equal(loaded(patcher), before)
    assert patches(patcher)[0].state == "failed"


def test_a_merge_of_two_models_is_what_the_parts_add_up_to(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    patcher, other = make_patcher(), make_patcher(1)
    other.add_patches(load_file(LORA), 0.5)
    before = patcher.model.matrix.weight.detach().clone()
    patcher.add_patches({"matrix.weight": other.get_key_patches("matrix.")["matrix.weight"]}, 0.25, 0.75)
    base, upon = patches(patcher)
    lora = upon.tensors["up"] @ upon.tensors["down"] * (upon.scale or 0) * (upon.strength or 0)
    expected = (base.strength_model or 0) * before + (base.strength or 0) * base.tensors["diff"] + lora
    torch.testing.assert_close(loaded(patcher), expected, atol=1e-6, rtol=0)


def test_a_clone_that_is_not_loaded_is_told_from_one_that_is(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    first, second = make_patcher().clone(), make_patcher().clone()
    second.model = first.model
    first.add_patches(load_file(LORA))
    second.add_patches(load_file(LORA))
    second.backup = first.backup
    loaded(first)
    if not hasattr(first.model, "current_weight_patches_uuid"):
        pytest.skip("this version does not name the set of changes that a model holds")
    assert (patches(first)[0].state, patches(second)[0].state) == ("merged", "registered")


def test_generation_is_bit_identical_with_and_without_reading(
    make_patcher: Callable[..., Any], load_file: Load
) -> None:
    x, outputs = random(3, 6), []
    for reading in (False, True):
        patcher = make_patcher()
        patcher.add_patches(load_file(LORA))
        if reading:
            read_patches(patcher)
        patcher.patch_model(device_to=CPU)
        if reading:
            read_patches(patcher)
            original_weight(patcher, "matrix.weight")
        outputs.append(patcher.model.matrix(x))
    assert torch.equal(*outputs)
