"""The real ComfyUI that the marked tests run against, and a tiny model of its layers."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comfy_shapes.checkout import Checkout
from torch import Tensor, nn

MakePatcher = Callable[..., Any]
State = Mapping[str, Tensor]


@pytest.fixture
def make_patcher(comfy: Checkout) -> MakePatcher:
    """A patcher of a model with a matrix 8×6, a square 8×8, a kernel 8×4×3×3 and a norm of 8."""

    def make(seed: int = 0) -> Any:
        layers = comfy.ops.manual_cast
        model = nn.Module()
        model.matrix = layers.Linear(6, 8)
        model.square = layers.Linear(8, 8)
        model.kernel = layers.Conv2d(4, 8, 3, padding=1)
        model.norm = layers.GroupNorm(2, 8)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(False)
        return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))

    return make


@pytest.fixture
def load_file(comfy: Checkout) -> Callable[[State], dict[Any, Any]]:
    """ComfyUI's own loading of a LoRA file's tensors for modules `matrix`, `square`, `kernel` and `norm`."""

    def load(state: State) -> dict[Any, Any]:
        names = {name: f"{name}.weight" for name in ("matrix", "square", "kernel", "norm")}
        loaded: dict[Any, Any] = comfy.lora.load_lora(dict(state), names)
        return loaded

    return load
