"""LoRAs for the tiny pipelines of all families, in every format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.families import make_pipeline
from torch import nn

from sigmascope.lora.convert import convert_lora
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.writer import save_lora

SaveLora = Callable[..., Path]


@pytest.fixture(scope="session")
def pipelines() -> Callable[[str], Any]:
    """The pipeline of a family, which no test may change."""
    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = make_pipeline(family)
        return made[family]

    return get


def factors_for(shape: tuple[int, ...], rank: int = 2, alpha: float = 2.0, seed: int = 0) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)
    inner = int(torch.Size(shape[1:]).numel())
    up, down = (torch.randn(size, generator=generator) for size in ((shape[0], rank), (rank, inner)))
    return LoraFactors(up, down, alpha, shape)


@pytest.fixture
def save(tmp_path: Path) -> SaveLora:
    """Write a LoRA for every Linear and Conv2d of a pipeline's parts: save(pipeline, "unet", format="kohya")."""

    def make(pipeline: Any, *parts: str, format: str = "peft", only: str = "", name: str = "lora") -> Path:
        layers = [
            (f"{part}.{path}", tuple(module.weight.shape))
            for part in parts
            for path, module in getattr(pipeline, part).named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and only in path
        ]
        modules = {path: factors_for(shape, seed=seed) for seed, (path, shape) in enumerate(layers)}
        shapes = {
            f"{part}.{key}": tuple(tensor.shape)
            for part in pipeline.components
            if isinstance(getattr(pipeline, part), nn.Module)
            for key, tensor in getattr(pipeline, part).state_dict().items()
        }
        layout, lora = layout_of(shapes), LoraFile(modules)
        own, target = (tmp_path / f"{prefix}{name}.safetensors" for prefix in ("own-", ""))
        if format in {"native", "peft"}:
            save_lora(target, lora, format=format, layout=layout, model_layers=list(shapes))
            return target
        save_lora(own, lora, format="native", layout=layout)
        model = tmp_path / "model.safetensors"
        save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, model)
        convert_lora(
            own, target, format, model=model, drop_unsupported=True
        )  # VACE's blocks have no other names
        return target

    return make
