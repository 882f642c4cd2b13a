"""Small LoRAs and models that the tests of this room share."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.lora.applied_patches import make_patch, randn
from tests.lora.pipeline_loras import pipelines, save, saved_loras
from torch import nn

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile

__all__ = ["make_patch", "pipelines", "randn", "save", "saved_loras"]  # fixtures

MakeFactors = Callable[..., LoraFactors]
MakeLora = Callable[..., LoraFile]


@pytest.fixture
def make_factors() -> MakeFactors:
    """Random factors: make_factors(weight_shape, rank, alpha=None, dtype=float32, seed=0)."""

    def make(
        weight_shape: Sequence[int],
        rank: int,
        alpha: float | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> LoraFactors:
        generator = torch.Generator().manual_seed(seed)
        inner = int(torch.Size(weight_shape[1:]).numel())
        up = (
            torch.randn(weight_shape[0], rank, generator=generator, dtype=torch.float64)
            / weight_shape[0] ** 0.5
        )
        down = torch.randn(rank, inner, generator=generator, dtype=torch.float64) / inner**0.5
        chosen = float(rank) if alpha is None else alpha
        return LoraFactors(up.to(dtype), down.to(dtype), chosen, tuple(weight_shape))

    return make


@pytest.fixture
def make_lora(make_factors: MakeFactors) -> MakeLora:
    """A LoRA for every Linear and ungrouped Conv2d of a model: make_lora(model, rank=2, prefix="", seed=0)."""

    def make(
        model: nn.Module,
        rank: int = 2,
        alpha: float | None = None,
        prefix: str = "",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> LoraFile:
        layers = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        ]
        return LoraFile(
            {
                prefix + name: make_factors(module.weight.shape, rank, alpha, dtype, seed + index)
                for index, (name, module) in enumerate(layers)
            }
        )

    return make
