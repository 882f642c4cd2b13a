"""Against a real ComfyUI: the weight that a layer of its own computes with, beside what its patches say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import random
from tests.comfy_shapes.checkout import Checkout, load_in_part
from torch import Tensor, nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.comfyui

CPU = torch.device("cpu")
OUT, IN, RANK = 96, 64, 4
KEY = "matrix.weight"
UP, DOWN = random(OUT, RANK, seed=1) * 0.1, random(RANK, IN, seed=2)
NORM = float((0.5 * UP.double() @ DOWN.double()).norm())


def layer_of(layers: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    model, layer = nn.Module(), layers.Linear(IN, OUT, dtype=dtype)
    layer.weight = nn.Parameter(random(OUT, IN).to(dtype), requires_grad=False)
    layer.bias = nn.Parameter(torch.zeros(OUT, dtype=dtype), requires_grad=False)
    model.matrix = layer
    return model


def used_by(layer: nn.Module) -> Tensor:
    """The layer's own output for the unit vectors, in float64."""
    with torch.no_grad():
        output: Tensor = layer(torch.eye(IN))
    return output.double().T


def changes(comfy: Checkout) -> dict[str, Any]:
    file = {"matrix.lora_up.weight": UP, "matrix.lora_down.weight": DOWN}
    loaded: dict[str, Any] = comfy.lora.load_lora(file, {"matrix": KEY})
    return loaded


@pytest.fixture
def patched(comfy: Checkout) -> Callable[..., tuple[Any, Any]]:
    """A baseline, and a clone of the patcher with a LoRA at 0.5."""

    def make(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        patcher = comfy.model_patcher.ModelPatcher(layer_of(comfy.ops.manual_cast, dtype), CPU, CPU)
        baseline = capture_lora_baseline(patcher, None)
        clone = patcher.clone()
        clone.add_patches(changes(comfy), 0.5)
        return baseline, clone

    return make


def analysis(baseline: Any, patcher: Any) -> dict[str, Any]:
    return dict(analyze_lora_application_results(baseline, patcher, None, (patcher, None)))


def checked(found: dict[str, Any]) -> dict[str, Any]:
    check: dict[str, Any] = found["unet_weight_changes"]["checked"][KEY]
    return check


@pytest.mark.parametrize("in_part", [False, True])
def test_the_weight_that_the_layer_uses_confirms_its_patches(
    patched: Callable[..., tuple[Any, Any]], in_part: bool
) -> None:
    baseline, patcher = patched()
    before = used_by(patcher.model.matrix)
    if in_part:
        load_in_part(patcher, 1)
    else:
        patcher.patch_model(device_to=CPU)
    stored = patcher.model.matrix.weight.detach().clone()
    change = used_by(patcher.model.matrix) - before
    found = analysis(baseline, patcher)
    check = checked(found)
    assert torch.equal(patcher.model.matrix.weight, stored)
    assert check["result"] == "confirmed"
    assert check["used_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
    assert check["predicted_norm"] == pytest.approx(NORM, rel=1e-4)
    assert check["elements"] == OUT * IN
    assert found["effective"] is True


def test_a_patched_weight_that_was_overwritten_by_hand_contradicts(
    patched: Callable[..., tuple[Any, Any]],
) -> None:
    baseline, patcher = patched()
    original = patcher.model.matrix.weight.detach().clone()
    patcher.patch_model(device_to=CPU)
    patcher.model.matrix.weight.data.copy_(original)
    found = analysis(baseline, patcher)
    assert checked(found)["result"] == "contradicted"
    assert checked(found)["used_norm"] == 0.0
    assert checked(found)["difference_norm"] == pytest.approx(NORM, rel=1e-4)
    assert found["effective"] is False


def test_a_function_that_returns_the_weight_as_it_is_contradicts(
    comfy: Checkout, patched: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, patcher = patched()
    before = used_by(patcher.model.matrix)
    load_in_part(patcher, 1)
    monkeypatch.setattr(comfy.model_patcher.LowVramPatch, "__call__", lambda _self, weight: weight)
    assert torch.equal(used_by(patcher.model.matrix), before)
    found = analysis(baseline, patcher)
    assert checked(found)["result"] == "contradicted"
    assert found["effective"] is False
    assert "lora_weights_disagree" in [finding["id"] for finding in found["findings"]]


def test_changes_that_are_not_loaded_are_not_to_be_had(patched: Callable[..., tuple[Any, Any]]) -> None:
    baseline, patcher = patched()
    check = checked(analysis(baseline, patcher))
    assert check["result"] == "unavailable"
    assert "loaded" in check["unavailable"]["used_norm"]


def test_a_bypass_is_asked_for_what_it_adds(comfy: Checkout) -> None:
    if not (comfy.folder / "comfy" / "weight_adapter" / "bypass.py").is_file():
        pytest.skip("this version has no bypass")
    patcher = comfy.model_patcher.ModelPatcher(layer_of(comfy.ops.manual_cast), CPU, CPU)
    baseline, before = capture_lora_baseline(patcher, None), used_by(patcher.model.matrix)
    manager = comfy.module("comfy.weight_adapter").BypassInjectionManager()
    manager.add_adapter(KEY, changes(comfy)[KEY], strength=0.5)
    patcher.set_injections("bypass_lora", manager.create_injections(patcher.model))
    patcher.inject_model()
    check = checked(analysis(baseline, patcher))
    change = used_by(patcher.model.matrix) - before
    patcher.eject_model()
    assert check["result"] == "confirmed"
    assert check["used_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
    assert check["used_norm"] == pytest.approx(NORM, rel=1e-3)


def quantised(comfy: Checkout, kind: str) -> nn.Module:
    """A layer of the version's own quantised kinds."""
    model, ops = nn.Module(), comfy.ops
    if kind == "scaled fp8":
        if not hasattr(ops, "scaled_fp8_ops"):
            pytest.skip("this version has no such layers")
        layers = ops.scaled_fp8_ops(fp8_matrix_mult=False, override_dtype=None)
        layer = layers.Linear(IN, OUT, bias=False, dtype=torch.float8_e4m3fn)
        layer.scale_weight = nn.Parameter(torch.tensor(0.01), requires_grad=False)
        weight = (random(OUT, IN) / 0.01).to(torch.float8_e4m3fn)
    else:
        quant: Any = comfy.module("comfy.quant_ops") if hasattr(ops, "mixed_precision_ops") else None
        if kind not in getattr(quant, "QUANT_ALGOS", {}) or not comfy.has_kernels:
            pytest.skip("this version has no such layers, or comfy-kitchen is not installed")
        layer = ops.mixed_precision_ops({}, torch.float32).Linear(IN, OUT, bias=False, dtype=torch.float32)
        layer.quant_format, layer.layout_type = kind, quant.QUANT_ALGOS[kind]["comfy_tensor_layout"]
        weight = quant.QuantizedTensor.from_float(random(OUT, IN), layer.layout_type)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    model.matrix = layer
    return model


@pytest.mark.parametrize("in_part", [False, True])
@pytest.mark.parametrize("kind", ["scaled fp8", "float8_e4m3fn", "int8_tensorwise"])
def test_a_quantised_weight_is_dequantised_by_the_host(comfy: Checkout, kind: str, in_part: bool) -> None:
    patcher = comfy.model_patcher.ModelPatcher(quantised(comfy, kind), CPU, CPU)
    baseline, before = capture_lora_baseline(patcher, None), used_by(patcher.model.matrix)
    clone = patcher.clone()
    clone.add_patches(changes(comfy), 0.5)
    if in_part:
        load_in_part(clone, 1)
    else:
        clone.patch_model(device_to=CPU)
    change = used_by(clone.model.matrix) - before
    found = analysis(baseline, clone)
    check, told = checked(found), found["unet_weight_changes"]
    scales_the_change = (
        float(change.norm()) < 0.1 * NORM
    )  # low VRAM on scaled fp8 before LowVramPatch knew of scales
    assert check["result"] == ("contradicted" if scales_the_change else "confirmed")
    assert check["used_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
    assert check["weight_norm"] == pytest.approx(float(before.norm()), rel=1e-3)
    doubts = {one["id"] for one in found["findings"]} & {"lora_not_as_predicted", "lora_weights_disagree"}
    assert doubts == ({"lora_weights_disagree"} if scales_the_change else set())
    if kind == "scaled fp8":
        assert told["delta_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
        assert told["relative_change"] == pytest.approx(told["delta_norm"] / float(before.norm()), rel=1e-3)


def test_a_function_that_forgets_the_scale_of_a_layer_contradicts(
    comfy: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a fork of ComfyUI (sd-webui-forge-classic issue 1288)."""
    patcher = comfy.model_patcher.ModelPatcher(quantised(comfy, "scaled fp8"), CPU, CPU)
    baseline, before = capture_lora_baseline(patcher, None), used_by(patcher.model.matrix)
    clone = patcher.clone()
    clone.add_patches(changes(comfy), 4.0)  # far above what rounding explains
    load_in_part(clone, 1)
    calculate = comfy.lora.calculate_weight
    monkeypatch.setattr(
        comfy.model_patcher.LowVramPatch,
        "__call__",
        lambda patch, weight: calculate(patch.patches[KEY], weight, KEY, intermediate_dtype=torch.float32),
    )
    change = used_by(clone.model.matrix) - before
    check = checked(analysis(baseline, clone))
    assert check["result"] == "contradicted"
    assert check["used_norm"] == pytest.approx(float(change.norm()), rel=1e-3)
    assert check["used_norm"] == pytest.approx(0.08 * NORM, rel=1e-2)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_a_bypass_of_a_convolution_is_asked_for_a_window(comfy: Checkout, kind: str) -> None:
    if not (comfy.folder / "comfy" / "weight_adapter" / "bypass.py").is_file():
        pytest.skip("this version has no bypass")
    model: Any = nn.Module()
    model.matrix = comfy.ops.manual_cast.Conv2d(8, 12, 3, padding=1, stride=2, dtype=torch.float32)
    for name, parameter in model.matrix.named_parameters():
        parameter.data = random(*parameter.shape, seed=len(name))
    patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
    factors = {
        "lora": {
            "lora_up.weight": random(12, 4, 1, 1, seed=1),
            "lora_down.weight": random(4, 8, 3, 3, seed=2),
        },
        "lokr": {"lokr_w1": random(3, 2, seed=1), "lokr_w2": random(4, 4, 3, 3, seed=2)},
    }[kind]
    changes = comfy.lora.load_lora(
        {f"matrix.{name}": held for name, held in factors.items()}, {"matrix": KEY}
    )
    baseline = capture_lora_baseline(patcher, None)
    manager = comfy.module("comfy.weight_adapter").BypassInjectionManager()
    manager.add_adapter(KEY, changes[KEY], strength=0.5)
    units = torch.zeros(72, 8, 3, 3).flatten(1).fill_diagonal_(1.0).reshape(72, 8, 3, 3)
    with torch.no_grad():
        before = model.matrix(units)[:, :, 1, 1]  # stride 2: the window that begins in the middle
        patcher.set_injections("bypass_lora", manager.create_injections(patcher.model))
        patcher.inject_model()
        seen = model.matrix(units)[:, :, 1, 1] - before
    check = checked(analysis(baseline, patcher))
    patcher.eject_model()
    whole = {
        "lora": lambda: factors["lora_up.weight"].flatten(1) @ factors["lora_down.weight"].flatten(1),
        "lokr": lambda: torch.kron(factors["lokr_w1"][:, :, None, None], factors["lokr_w2"]),
    }[kind]()
    assert check["result"] == "confirmed"
    assert check["used_norm"] == pytest.approx(float((0.5 * whole.double()).norm()), rel=1e-3)
    assert float(seen.norm()) > 0.0
