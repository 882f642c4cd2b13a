"""Against a real ComfyUI with dynamic loading: weights are staged on the meta device, by an empty stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from torch import nn

from sigmascope.probes.comfyui_patcher import original_weight, read_patches
from sigmascope.probes.used_weight import UsedWeights
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.comfyui

META = torch.device("meta")
OUT, IN = 96, 64  # more than the 16 KiB below which ComfyUI 0.33 merges at once
Change = dict[str, Any]


class Stage:
    """Takes the place of the memory that weights are staged in, on the device or pinned, which needs a GPU."""

    def __init__(self, *_sizes: object) -> None:
        pass

    def prioritize(self) -> None:
        pass

    def alloc(self, size: int) -> int:
        return size

    def free_memory(self, _size: float) -> int:
        return 0


@pytest.fixture
def load_dynamically(comfy: Checkout, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Any]:
    """Load a patcher of a casting layer `matrix` and a plain layer `plain`, with changes."""
    patchers = comfy.model_patcher
    if not hasattr(patchers, "ModelPatcherDynamic"):
        pytest.skip("this version does not load dynamically")
    monkeypatch.setattr(patchers.comfy_aimdo.model_vbar, "ModelVBAR", Stage)
    if hasattr(patchers.comfy_aimdo, "host_buffer"):  # since ComfyUI 0.33
        monkeypatch.setattr(patchers.comfy_aimdo.host_buffer, "HostBuffer", Stage)

    def load(changes: Change) -> Any:
        model = nn.Module()
        model.matrix, model.plain = comfy.ops.manual_cast.Linear(IN, OUT), nn.Linear(IN, OUT)
        for parameter in model.parameters():
            parameter.data = random(*parameter.shape)
            parameter.requires_grad_(False)
        patcher = patchers.ModelPatcherDynamic(model, META, torch.device("cpu"))
        patcher.add_patches(changes)
        patcher.load(META)
        return patcher

    return load


def lora(layer: str) -> dict[str, torch.Tensor]:
    return {f"{layer}.lora_up.weight": random(OUT, 2), f"{layer}.lora_down.weight": random(2, IN)}


def loaded(comfy: Checkout, layer: str) -> Change:
    changes: Change = comfy.lora.load_lora(lora(layer), {layer: f"{layer}.weight"})
    return changes


def state(patcher: Any) -> str:
    found = read_patches(patcher).value
    assert found is not None
    return found[0].state


def test_a_layer_that_casts_is_changed_lazily(
    comfy: Checkout, load_dynamically: Callable[[Change], Any]
) -> None:
    assert state(load_dynamically(loaded(comfy, "matrix"))) == "lazy"


def test_a_layer_that_does_not_cast_is_left_unchanged_without_a_word(
    comfy: Checkout, load_dynamically: Callable[[Change], Any]
) -> None:
    patcher = load_dynamically(loaded(comfy, "plain"))
    assert patcher.model.plain.weight.device == META  # moved and kept, as where a change is merged
    assert "plain.weight" in patcher.backup
    assert state(patcher) == "failed"


def test_the_original_of_a_moved_weight_is_where_it_was(
    comfy: Checkout, load_dynamically: Callable[[Change], Any]
) -> None:
    original = original_weight(load_dynamically(loaded(comfy, "plain")), "plain.weight")
    assert original is not None
    assert torch.equal(original, random(OUT, IN))


def test_the_weight_in_use_has_what_is_applied_lazily(
    comfy: Checkout, load_dynamically: Callable[[Change], Any]
) -> None:
    patcher = load_dynamically(loaded(comfy, "matrix"))
    stored = patcher.model.matrix.weight.clone()
    used = UsedWeights(patcher).of("matrix.weight").value
    file = lora("matrix")
    expected = random(OUT, IN) + file["matrix.lora_up.weight"] @ file["matrix.lora_down.weight"]
    assert used is not None
    torch.testing.assert_close(used.used, expected, atol=1e-5, rtol=0)
    assert torch.equal(used.stored, stored)
    assert torch.equal(patcher.model.matrix.weight, stored)


@pytest.mark.parametrize(("layer", "effective"), [("matrix", True), ("plain", False)])
def test_the_verdict_on_a_lora_is_by_what_the_patcher_does(
    comfy: Checkout, load_dynamically: Callable[[Change], Any], layer: str, effective: bool
) -> None:
    before = load_dynamically({})
    baseline = capture_lora_baseline(before, None)
    after = before.clone()
    after.add_patches(loaded(comfy, layer))
    after.load(META)
    assert analyze_lora_application_results(baseline, after, None, (after,))["effective"] is effective
