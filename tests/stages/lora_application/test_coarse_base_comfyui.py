"""Against a real ComfyUI: a LoRA merged into its coarse weights, in the record and as `lora inspect --arrives` says it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor, nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora.arrival import arrivals
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
)
from sigmascope.stages.lora_summary import weight_rows

pytestmark = pytest.mark.comfyui

CPU, SIZE, RANK = torch.device("cpu"), 512, 16
KEY = "transformer_blocks.0.attn.to_q"
FP8 = torch.float8_e4m3fn
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "scaled fp8": ("TensorCoreFP8E4M3Layout", "float8_e4m3fn", {}),
    "int8": ("TensorWiseINT8Layout", "int8_tensorwise", {}),
    "int8 ConvRot": (
        "TensorWiseINT8Layout",
        "int8_tensorwise",
        {"convrot": True, "convrot_groupsize": 256},
    ),
    "NVFP4": ("TensorCoreNVFP4Layout", "nvfp4", {}),
    "MXFP8": ("TensorCoreMXFP8Layout", "mxfp8", {}),
}


def weight_with_outliers() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SIZE, SIZE, generator=generator) * 0.02
    weight[:, torch.randperm(SIZE, generator=generator)[:6]] *= 5.0
    return weight


def factors(relative: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    up, down = torch.randn(SIZE, RANK, generator=generator), torch.randn(RANK, SIZE, generator=generator)
    return up * (relative * weight_with_outliers().norm() / (up @ down).norm()), down


class Merged(NamedTuple):
    """What the record says, and share and noise from the contents before and after, in float64."""

    analysis: Mapping[str, Any]
    share: float
    noise: float


def numbers(weight: Any) -> Tensor:
    wide = weight.detach().to(dtype=torch.float32)
    found: Tensor = wide.dequantize() if hasattr(wide, "__tensor_flatten__") else wide
    return found.double()


@pytest.fixture
def merge(comfy: Checkout) -> Callable[[nn.Module, float], Merged]:
    """Merge a LoRA into a layer by ComfyUI's own loader and patcher."""

    def merged(layer: nn.Module, relative: float) -> Merged:
        model, (up, down) = nn.Module(), factors(relative)
        model.matrix = layer
        patcher = comfy.model_patcher.ModelPatcher(model, CPU, CPU)
        baseline = capture_lora_baseline(patcher, None)
        file = {"matrix.lora_up.weight": up, "matrix.lora_down.weight": down}
        clone = patcher.clone()
        clone.add_patches(comfy.lora.load_lora(file, {"matrix": "matrix.weight"}), 1.0)
        clone.patch_model(device_to=CPU)
        analysis = analyze_lora_application_results(baseline, clone, None, (clone, None))
        before = numbers(clone.backup["matrix.weight"].weight)
        real, wanted = numbers(clone.model.matrix.weight) - before, (up @ down).double()
        share = float((real * wanted).sum() / (wanted * wanted).sum())
        return Merged(analysis, share, float((real - share * wanted).norm() / wanted.norm()))

    return merged


def check(found: Merged, base: Mapping[str, Tensor], relative: float, folder: Path) -> None:
    """The record has the figures of the contents; the file's figures are near them, within a draw's chance."""
    arriving = found.analysis["unet_weight_changes"]["arriving"]
    assert (arriving["share"], arriving["noise"]) == pytest.approx((found.share, found.noise), rel=1e-3)
    ids = {finding["id"] for finding in found.analysis["findings"]}
    assert ("lora_arrives_noisy" in ids) == (found.noise > 0.5)
    up, down = factors(relative)
    names = {f"transformer.{KEY}.lora_A.weight": down, f"transformer.{KEY}.lora_B.weight": up}
    save_file(names, folder / "lora.safetensors")
    save_file({f"{KEY}.{end}": part for end, part in base.items()}, folder / "base.safetensors")
    with open_checkpoint(folder / "base.safetensors") as checkpoint:
        told = arrivals(folder / "lora.safetensors", checkpoint).overall
    assert told.way == "comfyui"
    chance = 4 * found.noise / SIZE  # four standard deviations of a share over all elements
    assert told.share == pytest.approx(found.share, abs=chance + 0.003)
    assert told.noise == pytest.approx(found.noise, rel=0.02)


@pytest.mark.parametrize("relative", [0.01, 0.1])
def test_plain_fp8(
    comfy: Checkout, merge: Callable[[nn.Module, float], Merged], tmp_path: Path, relative: float
) -> None:
    layer = comfy.ops.manual_cast.Linear(SIZE, SIZE, bias=False)
    weight = weight_with_outliers().to(FP8)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    check(merge(layer, relative), {"weight": weight}, relative, tmp_path)


@pytest.fixture
def quantised(comfy: Checkout) -> Callable[[str], tuple[nn.Module, dict[str, Tensor]]]:
    """A layer that ComfyUI loaded from a state dict of a format, and that state dict."""
    if not (comfy.folder / "comfy" / "quant_ops.py").is_file():
        pytest.skip("this version has no quantised tensors")
    if not comfy.has_kernels:
        pytest.skip("comfy-kitchen is not installed")

    def load(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
        layout, kind, params = LAYOUTS[name]
        made = getattr(comfy.module("comfy.quant_ops"), layout)
        rows = {"per_channel": True} if params else {}
        codes, facts = made.quantize(weight_with_outliers(), scale="recalculate", **rows, **params)
        state = {f"weight{end}": part for end, part in made.state_dict_tensors(codes, facts).items()}
        text = json.dumps({"format": kind, **params})
        state["comfy_quant"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        operations = comfy.ops.mixed_precision_ops({}, torch.float32)
        layer = operations.Linear(SIZE, SIZE, bias=False, device="cpu", dtype=torch.float32)
        layer.load_state_dict(dict(state), strict=False)
        return layer, state

    return load


@pytest.mark.parametrize("relative", [0.01, 0.1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_tensors(
    quantised: Callable[[str], tuple[nn.Module, dict[str, Tensor]]],
    merge: Callable[[nn.Module, float], Merged],
    tmp_path: Path,
    name: str,
    relative: float,
) -> None:
    layer, state = quantised(name)
    check(merge(layer, relative), state, relative, tmp_path)


def test_what_is_too_large_to_dequantise_is_unknown(
    quantised: Callable[[str], tuple[nn.Module, dict[str, Tensor]]],
    merge: Callable[[nn.Module, float], Merged],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sigmascope.stages.coarse_weights._MOST_DEQUANTISED", 1)
    changes = merge(quantised("NVFP4")[0], 0.1).analysis["unet_weight_changes"]
    assert changes["arriving"] is None
    assert "too large to be dequantised" in changes["unavailable"]["arriving"]
    (row,) = (row for row in weight_rows(changes) if row.label == "Arrived")
    assert "too large to be dequantised" in row.value
