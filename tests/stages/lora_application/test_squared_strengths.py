"""ComfyUI multiplies OFT with its strength twice (Comfy-Org/ComfyUI pull request 15584): the finding, and ComfyUI's own arithmetic."""

from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import OFTAdapter, lora_adapter, random
from tests.comfy_shapes.checkout import Checkout
from tests.comfy_shapes.modules import BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher

from sigmascope.stages.lora_findings import squared_strengths
from sigmascope.stages.model_snapshot import read_model_patches

BLOCKS = random(2, 4, 4) - random(2, 4, 4).mT


def told(adapter: Any, strength: float) -> list[float]:
    """The strengths that it is said to act with."""
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: adapter}, strength)
    found = squared_strengths(read_model_patches(patcher).patches)
    return [float(str(one.evidence["acts_as"])) for one in found]


@pytest.mark.parametrize("strength", [0.5, 2.0, -0.5])
@pytest.mark.comfyui
def test_an_oft_acts_with_the_square_of_its_strength(comfy: Checkout, strength: float) -> None:
    adapter = comfy.module("comfy.weight_adapter.oft").OFTAdapter(set(), (BLOCKS, None, 0.0, None))
    weight = torch.eye(8)

    def change(strength: float) -> torch.Tensor:
        patch = (strength, adapter, 1.0, None, None)
        changed: torch.Tensor = comfy.lora.calculate_weight([patch], weight.clone(), "key")
        return changed - weight

    (squared,) = told(adapter, strength)
    torch.testing.assert_close(change(strength), squared * change(1.0))


@pytest.mark.parametrize(
    ("strength", "acts_as", "advice"),
    [(0.5, [0.25], "load it at 0.707"), (-0.5, [0.25], "below 0"), (1.0, [], ""), (0.0, [], "")],
)
def test_what_is_said_of_an_oft(strength: float, acts_as: list[float], advice: str) -> None:
    adapter = OFTAdapter(set(), (BLOCKS, None, 0.0, None))
    assert told(adapter, strength) == acts_as
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: adapter}, strength)
    found = squared_strengths(read_model_patches(patcher).patches)
    assert all(advice in str(one.advice) for one in found)


def test_of_other_kinds_nothing_is_said() -> None:
    assert told(lora_adapter(), 0.5) == []
