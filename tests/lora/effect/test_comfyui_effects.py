"""Effects of what a real ComfyUI has on a model, against the weights that it makes of them itself."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout
from tests.comfy_shapes.files import FILES
from torch import Tensor, nn

from sigmascope.lora.effect import effect_of, measured_effect
from sigmascope.probes.comfyui_patcher import read_patches

pytestmark = pytest.mark.comfyui

CPU = torch.device("cpu")
KERNELS: dict[str, dict[str, Tensor]] = {
    "lora": {
        "kernel.lora_up.weight": random(8, 2, 1, 1),
        "kernel.lora_down.weight": random(2, 4, 3, 3, seed=1),
    },
    "tucker": {
        "kernel.lora_up.weight": random(8, 2, 1, 1),
        "kernel.lora_down.weight": random(2, 4, 1, 1, seed=1),
        "kernel.lora_mid.weight": random(2, 2, 3, 3, seed=2),
    },
    "loha": {
        f"kernel.hada_{name}": random(*shape, seed=3)
        for name, shape in {
            "w1_a": (2, 8),
            "w1_b": (2, 4),
            "w2_a": (2, 8),
            "w2_b": (2, 4),
            "t1": (2, 2, 3, 3),
            "t2": (2, 2, 3, 3),
        }.items()
    },
    "lokr": {"kernel.lokr_w1": random(2, 2), "kernel.lokr_w2": random(4, 2, 3, 3)},
    "glora": {
        f"kernel.{name}.weight": random(*shape, seed=4)
        for name, shape in {"a1": (4, 2), "a2": (2, 4), "b1": (8, 2), "b2": (2, 36)}.items()
    },
    "oft": {"kernel.oft_blocks": random(2, 4, 4)},
    "dora by inputs": {
        "kernel.lora_up.weight": random(8, 2, 1, 1),
        "kernel.lora_down.weight": random(2, 4, 3, 3, seed=1),
        "kernel.dora_scale": random(1, 4, 1, 1, seed=2).abs(),
    },
}


@pytest.fixture
def effects(comfy: Checkout) -> Callable[..., tuple[float, float]]:
    """Predicted and real ‖ΔW‖ of a weight: effects("matrix", state, 0.5, other_state, 1.0)."""

    def make(name: str, *states_and_strengths: Any) -> tuple[float, float]:
        layers, model = comfy.ops.manual_cast, nn.Module()
        model.matrix, model.kernel = layers.Linear(6, 8), layers.Conv2d(4, 8, 3)
        for seed, parameter in enumerate(model.parameters()):
            parameter.data = random(*parameter.shape, seed=seed)
            parameter.requires_grad_(False)
        patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
        for state, strength in zip(states_and_strengths[::2], states_and_strengths[1::2], strict=True):
            changes = _loaded(comfy, state)
            if not changes:
                pytest.skip("this version knows no such change")
            patcher.add_patches(changes, strength)
        weight = getattr(model, name).weight
        before = weight.detach().clone()
        effect = effect_of(read_patches(patcher).value or (), before)
        patcher.patch_model(device_to=CPU)
        real = measured_effect(before, getattr(model, name).weight.detach())
        assert effect.delta_norm is not None, effect.unavailable
        assert real.delta_norm is not None
        return effect.delta_norm, real.delta_norm

    return make


def _loaded(comfy: Checkout, state: Mapping[str, Tensor]) -> dict[Any, Any]:
    names = {name: f"{name}.weight" for name in ("matrix", "kernel")}
    loaded: dict[Any, Any] = comfy.lora.load_lora(dict(state), names)
    return loaded


@pytest.mark.parametrize("strength", [1.0, 0.6, -0.5])
@pytest.mark.parametrize("kind", FILES)
def test_the_effect_on_a_matrix_is_what_loading_does(
    kind: str, strength: float, effects: Callable[..., tuple[float, float]]
) -> None:
    predicted, real = effects("matrix", FILES[kind], strength)
    assert predicted == pytest.approx(real, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("kind", KERNELS)
def test_the_effect_on_a_kernel_is_what_loading_does(
    kind: str, strength: float, effects: Callable[..., tuple[float, float]]
) -> None:
    predicted, real = effects("kernel", KERNELS[kind], strength)
    assert predicted == pytest.approx(real, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("second", FILES)
def test_several_changes_act_one_after_the_other(
    second: str, effects: Callable[..., tuple[float, float]]
) -> None:
    predicted, real = effects("matrix", FILES["lora"], 0.8, FILES[second], 0.5)
    assert predicted == pytest.approx(real, rel=1e-4, abs=1e-6)
