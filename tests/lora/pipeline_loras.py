"""LoRAs for the tiny pipelines of all families, in every format."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from torch import nn

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


@pytest.fixture(scope="session")
def saved_loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what `save` has written: pipelines of one class are all alike, and so are their LoRAs."""
    return tmp_path_factory.mktemp("saved_loras")


@pytest.fixture
def save(tmp_path: Path, saved_loras: Path) -> SaveLora:
    """Write a LoRA for every Linear and Conv2d of a pipeline's parts: save(pipeline, "unet", format="kohya")."""

    def make(pipeline: Any, *parts: str, format: str = "peft", only: str = "", name: str = "lora") -> Path:
        kept = saved_loras / f"{'-'.join((type(pipeline).__name__, *parts, format, only))}.safetensors"
        if not kept.exists():
            _write_lora(kept, pipeline, parts, format, only)
        return Path(shutil.copy(kept, tmp_path / f"{name}.safetensors"))

    return make


def _write_lora(target: Path, pipeline: Any, parts: Sequence[str], format: str, only: str) -> None:
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
    save_lora(target, lora, format=format, layout=layout, model_layers=list(shapes))
