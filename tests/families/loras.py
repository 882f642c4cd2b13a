"""LoRA files for the families: factors for every layer of a pipeline's parts, named as diffusers saves them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.families.family import FAMILIES
from torch import Tensor, nn

State = dict[str, Tensor]
KINDS = (nn.Linear, nn.Conv2d, nn.Conv3d)


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that LoRAs are trained for, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


def lora_state(
    pipeline: Any,
    parts: Iterable[str],
    *,
    rank: int = 2,
    size: float = 0.05,
    seed: int = 0,
    only: str = "",
) -> State:
    """Random factors for every layer of the parts.

    Args:
        pipeline: Whose components are meant.
        parts: Names of components, which come before the modules' names.
        rank: Of every module, where it is not more than the layer has.
        size: Standard deviation of all factors.
        seed: Two of them give factors that have nothing to do with each other.
        only: Leave out modules without this in their name.
    """
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for part in parts:
        for name, layer in adaptable(getattr(pipeline, part)).items():
            if only in name:
                state |= _factors(f"{part}.{name}", layer, rank, size, generator)
    return state


def modules_of(state: Iterable[str]) -> set[str]:
    """The modules that a state dict has factors for."""
    return {key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")}


def as_kohya(state: Mapping[str, Tensor]) -> State:
    """The same factors under kohya's names, for a U-Net and CLIP, without alphas."""
    starts = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    ends = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}
    found: State = {}
    for key, tensor in state.items():
        module, end = key.split(".lora_")
        part, _, name = module.partition(".")
        if part != "unet" and not name.startswith(("text_model.", "text_projection")):
            name = f"text_model.{name}"  # which CLIPTextModel had until transformers 5
        found[f"{starts[part]}_{name.replace('.', '_')}.{ends[end]}"] = tensor
    return found


def half(state: Mapping[str, Tensor], which: int) -> State:
    """Factors with every other row of up and column of down: 0 and 1 are orthogonal in all directions."""
    found: State = {}
    for key, tensor in state.items():
        kept = torch.zeros(tensor.shape[1] if ".lora_A." in key else tensor.shape[0])
        kept[which::2] = 1.0
        shape = (1, -1) if ".lora_A." in key else (-1, 1)
        found[key] = tensor * kept.reshape(*shape, *(1 for _ in tensor.shape[2:]))
    return found


def write(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> Path:
    """The state dict as a safetensors file."""
    tensors = {key: value.clone().contiguous() for key, value in state.items()}
    save_file(tensors, path, {"format": "pt", **(metadata or {})})
    return path


def parts_of(family: str, *, encoders: bool = True) -> tuple[str, ...]:
    """The components that diffusers' loader of the family takes LoRAs for."""
    known = FAMILIES[family]
    return (known.denoiser, *(known.lora_encoders if encoders else ()))


def _factors(name: str, layer: Any, rank: int, size: float, generator: torch.Generator) -> State:
    rows, columns, *kernel = layer.weight.shape
    down = size * torch.randn(rank, columns, *kernel, generator=generator)
    up = size * torch.randn(rows, rank, *(1 for _ in kernel), generator=generator)
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
