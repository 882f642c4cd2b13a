"""Real adapters that PEFT injects into a model of every kind of layer."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.peft import read_adapters

Inject = Callable[..., nn.Module]


class Everything(nn.Module):
    """A layer of each kind that PEFT takes, and no forward pass of its own."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(6, 10), "bare": nn.Linear(10, 6, bias=False)})
            for _ in range(2)
        )
        self.wide = nn.Linear(64, 64)
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.pointwise = nn.Conv2d(6, 4, 1)
        self.video = nn.Conv3d(4, 6, (1, 3, 3))
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.transposed = Conv1D(10, 6)
        self.attention = nn.MultiheadAttention(8, 2)
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Everything().eval().requires_grad_(False)


@pytest.fixture
def inject(model: nn.Module) -> Inject:
    """Put an adapter of random factors into `model`, through PEFT."""

    def run(*targets: str, name: str = "style", kind: str = "LoraConfig", **options: Any) -> nn.Module:
        import peft

        options = {"r": 4, "target_modules": list(targets), **options}
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            peft.inject_adapter_in_model(getattr(peft, kind)(**options), model, name)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if f".{name}" in parameter_name and "magnitude" not in parameter_name:
                    parameter.normal_()
        return model

    return run


@pytest.fixture
def read(model: nn.Module) -> Callable[[], dict[str, AppliedPatch]]:
    """The adapters of `model` by the weight's name, one each."""

    def run() -> dict[str, AppliedPatch]:
        patches = read_adapters(model).value
        assert patches is not None
        assert len({patch.key for patch in patches}) == len(patches)
        return {patch.key: patch for patch in patches}

    return run


def product(patch: AppliedPatch) -> Tensor:
    """strength · scale · up · down, as the weight's shape."""
    assert patch.strength is not None
    assert patch.scale is not None
    matrix = patch.tensors["up"].flatten(1) @ patch.tensors["down"].flatten(1)
    return (patch.strength * patch.scale * matrix).reshape(patch.weight_shape or ())
