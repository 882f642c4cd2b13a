"""PEFT's LoRA layers in a model: put in by exact names with a rank and alpha each, and taken out again."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.plan_table import PlannedModule
from sigmascope.lbm.training.targets import DENOISER

ADAPTER = "default"
PeftLayer = Any
"""peft.tuners.lora.LoraLayer, which has no types of its own."""


def inject(denoiser: nn.Module, modules: Sequence[PlannedModule]) -> dict[str, PeftLayer]:
    """Replace layers by PEFT's, which hold the layer and two float32 factors with no useful values yet.

    Args:
        denoiser: Changed in place.
        modules: The layers by their native names.

    Returns:
        PEFT's layers by the same names.

    Raises:
        ConfigError: The installed PEFT does not give each layer the rank and alpha asked for.
    """
    paths = {module.name: module.name.removeprefix(DENOISER) for module in modules}
    config = _config(modules, paths)
    inject_adapter_in_model(config, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    layers = {name: denoiser.get_submodule(path) for name, path in paths.items()}
    for module in modules:
        _materialise(layers[module.name])
        _require_as_planned(layers[module.name], module)
    return layers


def take_out(denoiser: nn.Module, layers: Mapping[str, PeftLayer]) -> None:
    """Put the model's own layers back where PEFT's are; everything is frozen then.

    Args:
        denoiser: As `inject` left it.
        layers: As `inject` gave them.
    """
    for name, layer in layers.items():
        path = name.removeprefix(DENOISER)
        owner, _, child = path.rpartition(".")
        setattr(denoiser.get_submodule(owner), child, layer.base_layer)
    if hasattr(denoiser, "peft_config"):
        del denoiser.peft_config
    denoiser.requires_grad_(False)


def _config(modules: Iterable[PlannedModule], paths: Mapping[str, str]) -> Any:
    """PEFT tries every pattern on every layer, so layers of one rank share a pattern."""
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    by_alpha: defaultdict[float, list[str]] = defaultdict(list)
    for module in modules:
        by_rank[module.rank].append(paths[module.name])
        by_alpha[module.alpha].append(paths[module.name])
    rank = Counter({key: len(names) for key, names in by_rank.items()}).most_common(1)[0][0]
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=_any_of(list(paths.values())),
        rank_pattern={_any_of(names): own for own, names in by_rank.items() if own != rank},
        alpha_pattern={_any_of(names): own for own, names in by_alpha.items() if own != rank},
        init_lora_weights=False,
    )


def _any_of(paths: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, paths))})"


def _materialise(layer: PeftLayer) -> None:
    """PEFT's factors come without storage, in the base's dtype; ours are float32 beside the base."""
    device = layer.base_layer.weight.device
    for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
        empty = torch.empty(factor.weight.shape, dtype=torch.float32, device=device)
        factor.weight = nn.Parameter(empty)


def _require_as_planned(layer: PeftLayer, module: PlannedModule) -> None:
    rank, scaling = layer.r.get(ADAPTER), layer.scaling.get(ADAPTER)
    if rank != module.rank or scaling != module.alpha / module.rank:
        raise ConfigError(
            f"{module.name}: PEFT gave it rank {rank} and strength {scaling}, "
            f"expected {module.rank} and {module.alpha / module.rank}.",
            hint="Update PEFT: pip install -U peft.",
        )
