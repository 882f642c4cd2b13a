"""Patches that lie on a packed weight itself, as ComfyUI-GGUF (795e451) puts them there, with nothing in `backup`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter, lora_parts, lora_tuple
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from torch import Tensor, nn

from sigmascope.probes.comfyui_patcher import read_patches
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


class PackedPatcher(ModelPatcher):
    """Puts its entries on the weight when it loads; lists and tuples are made anew, adapters are not."""

    device: str | None = None

    def _merge(self, module: nn.Module, part: str, key: str) -> None:
        getattr(module, part).patches = [(moved(self.patches[key], self.device), key)]

    def unpatch_model(self) -> None:
        super().unpatch_model()
        for weight in self.model.parameters():
            weight.patches = []


def moved(value: Any, device: str | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    return value


def states(patcher: ModelPatcher) -> list[str]:
    return [patch.state for patch in read_patches(patcher).value or ()]


@pytest.mark.parametrize("make", [lora_adapter, lora_tuple])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_they_act_in_each_forward_pass(make: Callable[[], Any], device: str) -> None:
    packed = PackedPatcher(BaseModel())
    packed.device = device
    baseline = capture_lora_baseline(packed, None)
    changed = packed.clone()
    changed.device = device
    changed.add_patches({Q: make()}, 0.5)
    assert states(changed) == ["registered"]
    changed.load()
    assert states(changed) == ["lazy"]
    analysis = analyze_lora_application_results(baseline, changed, None, (changed, None))
    up, down, *_ = lora_parts()
    norm = 0.5 * float(torch.linalg.matrix_norm(up @ down)) / up.shape[1]
    assert analysis["effective"] is True
    assert analysis["findings"] == []
    assert analysis["unet_weight_changes"]["keys_value_changed"][Q]["delta_norm"] == pytest.approx(norm)
    changed.unpatch_model()
    assert states(changed) == ["registered"]


def test_those_of_another_clone_do_not_act() -> None:
    """The weight holds those that were loaded last."""
    packed = PackedPatcher(BaseModel())
    first, last = packed.clone(), packed.clone()
    first.add_patches({Q: lora_tuple()}, 0.5)
    last.add_patches({Q: lora_tuple()}, 0.25)
    first.load()
    last.load()
    assert (states(first), states(last)) == (["registered"], ["lazy"])
